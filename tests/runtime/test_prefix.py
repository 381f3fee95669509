"""Models whose first tokens see one another, next to Hugging Face: prompts of any length, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import selective_compile as sc
from selective_compile.backend import Program, compile_step_program
from selective_compile.generate_states import CACHE
from tests.decoders import Decoder
from tests.oracle import generated_alone
from tests.prefix_models import PrefixByFunction, PrefixModel, prefix_model

PREFIX, BLOCK = 10, 4


def config(**others: Any) -> sc.EngineConfig:
    chosen = {"block_size": BLOCK, "token_budget": 12, "max_requests": 4, "max_kv_tokens": 160, **others}
    return sc.EngineConfig(compile=False, **chosen)


@pytest.fixture(scope="module")
def model() -> Any:
    return prefix_model(PREFIX)


@pytest.fixture(scope="module")
def program(model: Any) -> Program:
    return compile_step_program(model, config())


def test_the_report_says_which_prefix(model: Any) -> None:
    report = sc.explain(model)
    assert report.ok and [call.mask for call in report.calls] == [f"causal, prefix {PREFIX}"] * 2
    assert f"causal, prefix {PREFIX}" in str(report)


# Many of them begin alike, up to any place in the prefix and behind it.
START = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
PROMPTS = st.lists(
    st.tuples(st.integers(0, len(START)), st.lists(st.integers(0, 5), min_size=1, max_size=20)), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(
    prompts=PROMPTS,
    tokens=st.integers(1, 16),
    budget=st.integers(PREFIX, 18),
    blocks=st.integers(13, 25),
    drafted=st.sampled_from([0, 3]),
    batching=st.sampled_from(["inflight_fused", "inflight", "static"]),
    late=st.integers(0, 3),
)
def test_tokens_are_those_of_hugging_face(
    model: Any,
    program: Program,
    prompts: list[tuple[int, list[int]]],
    tokens: int,
    budget: int,
    blocks: int,
    drafted: int,
    batching: Any,
    late: int,
) -> None:
    """Under chunks, prefixes that are found, drafts, arrivals and pools so small that requests give way."""
    given = config(token_budget=budget, max_kv_tokens=blocks * BLOCK, batching=batching)
    engine = sc.Engine(model, given, program=program)
    options = {"prompt_lookup_num_tokens": drafted} if drafted else {}
    wanted = [START[:shared] + own for shared, own in prompts]
    wanted += reversed(wanted)
    requests = []
    for prompt in wanted:
        requests.append(engine.submit(prompt, max_new_tokens=tokens, **options))
        for _ in range(late):
            engine.step()
            engine._scheduler.check()
    while engine.step():
        engine._scheduler.check()
    alone = [generated_alone(model, prompt, tokens) for prompt in wanted[: len(prompts)]]
    assert [request.tokens for request in requests] == [*alone, *reversed(alone)]
    assert engine.stats().blocks_used == 0


def test_requests_give_way_and_go_on_as_they_were(model: Any, program: Program) -> None:
    """Of prompts that end in the prefix and behind it, with what they generate across its end."""
    engine = sc.Engine(model, config(max_kv_tokens=44), program=program)
    prompts = [[7 * n % 199 for n in range(first, first + length)] for first, length in ((0, 3), (50, 9), (90, 14))]
    requests = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    while engine.step():
        engine._scheduler.check()
    assert engine.stats().preemptions > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == generated_alone(model, prompt, 20)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prefix_by_a_function_of_indices(attention: str) -> None:
    model = prefix_model(PREFIX, attention=attention)
    model.model.__class__ = PrefixByFunction
    engine = sc.Engine(model, config(fallback="refuse"))
    prompts = [[7 * n % 199 for n in range(length)] for length in (1, 6, 10, 25)]
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert list(request.result().tokens) == generated_alone(model, prompt, 12)


@pytest.mark.parametrize(
    ("first", "second", "reused"),
    [
        (START, START, 16),  # all but the block of the last token
        (START, [*START[:13], 0, 0], 12),
        (START, [*START[:12], 0, 0], 12),
        (START, [*START[:11], 0, 0, 0], 0),  # a block of which 8 tokens only are in the prefix
        (START, [*START[:9], 0, *START[10:]], 0),  # the first two blocks hold the same tokens and other keys
        (START, START[:9], 0),
        (START[:9], START[:9], 0),
        ([*START[:9], 0, 0, 0, 0], [*START[:9], 0, 0, 0, 0, 0], 12),
    ],
)
def test_blocks_are_shared_from_the_end_of_the_prefix_on(
    model: Any, program: Program, first: list[int], second: list[int], reused: int
) -> None:
    engine = sc.Engine(model, config(), program=program)
    found = []
    for prompt in (first, second, second):
        before = engine.stats().tokens_reused
        tokens = list(engine.submit(prompt, max_new_tokens=8).result().tokens)
        # The second time, too: all of its blocks are then those that go together.
        assert tokens == generated_alone(model, prompt, 8)
        found.append(engine.stats().tokens_reused - before)
    whole = (len(second) - 1) // BLOCK * BLOCK
    assert found == [0, reused, whole if len(second) >= PREFIX else 0]


def test_blocks_of_what_was_generated_in_the_prefix_are_not_those_of_a_prompt(model: Any, program: Program) -> None:
    """The first tokens did not see what came behind them."""
    engine = sc.Engine(model, config(), program=program)
    generated = list(engine.submit(START[:3], max_new_tokens=14).result().tokens)
    prompt = [*START[:3], *generated, 0]
    request = engine.submit(prompt, max_new_tokens=8)
    assert list(request.result().tokens) == generated_alone(model, prompt, 8)
    assert engine.stats().tokens_reused == 0


@pytest.mark.parametrize("length", [2, PREFIX - 1, PREFIX, PREFIX + 5])
def test_beams_and_samples(model: Any, program: Program, length: int) -> None:
    prompt = [5 * n % 199 for n in range(length)]
    ids = torch.tensor([prompt])
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 12}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    ours = sc.generate(model, ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", (2, 14))
@pytest.mark.parametrize("steps", (2, 8))
def test_beams_that_are_computed_again(model: Any, program: Program, length: int, steps: int) -> None:
    """All of them see what the first one sees."""
    prompt = [5 * n % 199 for n in range(length)]
    ids = torch.tensor([prompt])
    options: Any = {"num_beams": 3, "max_new_tokens": 14, "do_sample": False}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()
    engine = sc.Engine(model, config(token_budget=12, max_kv_tokens=320), program=program)
    request = engine.submit(prompt, **options)
    for _ in range(steps):
        engine.step()
    engine.drop_computed()
    assert list(request.result().tokens) == theirs


def test_a_prompt_whose_prefix_does_not_fit_into_a_step_is_refused(model: Any, program: Program) -> None:
    engine = sc.Engine(model, config(token_budget=PREFIX - 1), program=program)
    with pytest.raises(
        ValueError, match="token_budget must be at least 10 for a prompt of 11: the first 10 tokens see"
    ):
        engine.submit(list(range(PREFIX + 1)), max_new_tokens=2)
    assert engine.submit([1] * (PREFIX - 1), max_new_tokens=3).result().tokens


def test_a_prefill_in_parts_as_generate_would_have_it_is_refused(model: Any, program: Program) -> None:
    engine = sc.Engine(model, config(), program=program)
    with pytest.raises(
        ValueError, match="prefill_chunk_size must be None or at least 10 for a prompt of 11: the first"
    ):
        engine.submit(list(range(PREFIX + 1)), max_new_tokens=2, prefill_chunk_size=PREFIX - 1)
    engine.submit(list(range(PREFIX + 1)), max_new_tokens=2, prefill_chunk_size=PREFIX).result()


def test_what_does_not_go_with_a_prefix_is_refused(model: Any, program: Program) -> None:
    with pytest.raises(ValueError, match="batch_invariant must be False for a model whose first 10 tokens see one"):
        sc.Engine(model, config(batch_invariant=True))
    with pytest.raises(ValueError, match="all tokens see its prefix, so that it cannot be narrowed to 5"):
        sc.Engine(model, config(max_attention_window=5))


def test_a_model_that_goes_on_otherwise_runs_as_it_does() -> None:
    """Without a cache all tokens are computed anew in each step: those in front see what is generated in the prefix."""
    model = prefix_model(PREFIX, num_hidden_layers=2)
    model.generation_config.use_cache = False
    report = sc.explain(model)
    assert not report.ok and "generate goes on otherwise than with a cache" in str(report)
    engine = sc.Engine(model, config())
    tokens = list(engine.submit([1, 2, 3], max_new_tokens=12).result().tokens)
    assert tokens == generated_alone(model, [1, 2, 3], 12)
    assert tokens != generated_alone(prefix_model(PREFIX), [1, 2, 3], 12)


def test_padding_which_generate_would_count_is_refused_and_lists_are_not(model: Any) -> None:
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask must be all ones for a model whose first 10 tokens see one"):
        sc.generate(model, ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0)
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5]]
    ours = sc.generate(model, prompts, max_new_tokens=12, pad_token_id=0)
    for row, prompt in zip(ours, prompts, strict=True):
        assert [int(token) for token in row][-12:] == generated_alone(model, prompt, 12)


def test_without_a_cache_only_prompts_that_fill_the_prefix(model: Any, program: Program) -> None:
    engine = sc.Engine(model, config(), program=program)
    with pytest.raises(ValueError, match="use_cache must not be False for a prompt of 9 tokens: the first 10 see"):
        engine.submit([1] * 9, max_new_tokens=4, use_cache=False)
    request = engine.submit(START, max_new_tokens=4, use_cache=False)
    assert list(request.result().tokens) == generated_alone(model, START, 4)


class Alone(PrefixModel):
    """Does something else with a prompt of one token."""

    def forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(input_ids, *args, **kwargs)
        if input_ids.shape[1] == 1 and kwargs[CACHE].get_seq_length() == 1:
            result.last_hidden_state = -result.last_hidden_state
        return result


def test_a_branch_on_a_prompt_of_one_token_is_found() -> None:
    model = prefix_model(PREFIX, num_hidden_layers=1)
    model.model.__class__ = Alone
    report = sc.explain(model)
    assert not report.ok and "from 1 of them" in str(report)


def prefix_of_three(ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    places = torch.arange(ids.shape[1])
    return ((places[None] <= places[:, None]) | (places < 3))[None, None]


def test_of_a_model_without_generate_it_is_not_known_how_it_goes_on() -> None:
    model: nn.Module = Decoder(layers=1, mask=prefix_of_three)
    with pytest.raises(sc.RefusedError, match="the first 3 tokens see one another, and it is not known how the model"):
        sc.Engine(model, config())
