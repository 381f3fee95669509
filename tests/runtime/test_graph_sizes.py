"""For how many tokens and requests steps are captured: what is nobody's stays a small share, and what the kernels
choose by shapes is chosen as for the step by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selective_compile.runtime.graph_sizes import (
    GraphSizes,
    decode_sizes,
    graph_sizes,
    mixed_sizes,
    worth_capturing,
)

BUDGETS = st.integers(1, 9000)
REQUESTS = st.integers(1, 300)


def sizes_for(max_requests: int, budget: int, *, invariant: bool = False) -> GraphSizes:
    return graph_sizes(max_requests, mixed_sizes(budget, invariant=invariant), invariant=invariant)


def test_numbers_of_requests() -> None:
    assert decode_sizes(1) == (2,) and decode_sizes(8) == (2, 4, 8) and decode_sizes(9) == (2, 4, 8, 16)
    assert decode_sizes(64) == (2, 4, 8, 16, 32, 48, 64) and decode_sizes(65)[-1] == 80
    assert decode_sizes(5, invariant=True) == (32,) and decode_sizes(70, invariant=True) == (32, 48, 64, 80)


def test_numbers_of_tokens() -> None:
    assert mixed_sizes(1) == (2,) and mixed_sizes(24) == (16, 24)
    assert mixed_sizes(300) == (*range(16, 257, 16), 288, 300)
    assert mixed_sizes(9, invariant=True) == (32,) and mixed_sizes(50, invariant=True) == (32, 48, 50)
    assert len({*sizes_for(64, 512).decode, *sizes_for(64, 512).mixed}) == 35
    assert len(mixed_sizes(512)) == 24 and len(mixed_sizes(8192)) == 56


@given(budget=BUDGETS, tokens=BUDGETS)
def test_what_is_nobodys_in_a_mixed_step_is_an_eighth_or_less_than_a_tile(budget: int, tokens: int) -> None:
    sizes = mixed_sizes(budget)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max(2, budget)
    if tokens <= budget:
        taken = next(size for size in sizes if size >= tokens)
        assert taken - tokens < 16 or 8 * (taken - tokens) <= taken


@given(max_requests=REQUESTS, budget=BUDGETS, data=st.data(), invariant=st.booleans())
def test_every_step_within_the_budget_has_a_graph(
    max_requests: int, budget: int, data: st.DataObject, invariant: bool
) -> None:
    sizes = sizes_for(max_requests, budget, invariant=invariant)
    tokens = data.draw(st.integers(1, budget))
    requests = data.draw(st.integers(1, min(tokens, max_requests)))
    found = sizes.fitting(tokens, requests)
    assert found is not None and found.tokens >= tokens and found.rows >= requests
    if invariant:
        assert found.requests == found.tokens >= 32, "each row is a request, and no step has few rows"
    else:
        assert found.requests == found.rows <= found.tokens


@given(max_requests=REQUESTS, budget=BUDGETS, data=st.data())
def test_a_step_of_few_requests_has_a_graph_of_few(max_requests: int, budget: int, data: st.DataObject) -> None:
    """As `kernels.ragged_attention_tiles` tells them: by whether there are more than two tokens a request."""
    sizes = sizes_for(max_requests, budget)
    tokens = data.draw(st.integers(1, budget))
    requests = data.draw(st.integers(1, min(tokens, max_requests)))
    found = sizes.fitting(tokens, requests)
    assert found is not None
    if tokens > 2 * requests and found.tokens > 4:
        assert found.tokens > 2 * found.requests


def test_the_tile_of_a_mixed_step_of_many_engines_is_that_of_its_prompts() -> None:
    tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")

    def tile(tokens: int, requests: int) -> int:
        head = {"group": 4, "key_size": 128, "value_size": 128, "bytes_per_element": 2}
        found = tiles.tile_config(num_rows=tokens, num_requests=requests, block_size=64, bulk=True, **head)
        return int(found.block_m)

    sizes = sizes_for(256, 512)
    for tokens, requests in ((500, 3), (512, 200), (300, 100), (64, 9)):
        found = sizes.fitting(tokens, requests)
        assert found is not None and tile(found.tokens, found.requests) == tile(tokens, requests) > 16


def test_steps_are_captured_as_long_as_the_device_waits_for_the_host() -> None:
    asked = []

    def seconds(tokens: int) -> tuple[float, float]:
        """Launched in 3 ms, computed in 2 ms and 10 us for each token; the device cannot be done before the host."""
        asked.append(tokens)
        return 3e-3, max(3e-3, 2e-3 + 1e-5 * tokens)

    sizes = mixed_sizes(2048)
    found = worth_capturing(sizes, seconds)
    assert list(found) == [size for size in sizes if size < 250] and len(asked) <= 6
    assert list(worth_capturing(sizes, lambda tokens: (1.0, 1.1))) == list(sizes)
    assert list(worth_capturing(sizes, lambda tokens: (1.0, 2.0))) == []
