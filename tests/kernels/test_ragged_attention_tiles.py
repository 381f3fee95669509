"""How keys are shared out: properties of the choice, whatever its constants are worth on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")

# A100, H100 and MI300X.
PROCESSORS = (108, 132, 304)
STEPS = {
    "num_rows": st.integers(0, 9000),
    "num_requests": st.integers(0, 1000),
    "parts": st.integers(1, 64),
    "keys": st.integers(0, 2**20),
    "block_n": st.sampled_from((16, 32, 64)),
    "processors": st.sampled_from((1, *PROCESSORS)),
}


def splits(**sizes: int):
    """Of a step that decodes, if not told otherwise."""
    requests = sizes.get("num_requests", 1)
    defaults = {"num_rows": requests, "num_requests": requests, "parts": 8, "block_n": 64, "processors": 132}
    return tiles.split_config(**(defaults | sizes))


@given(**STEPS)
def test_the_splits_hold_all_keys_and_are_none_too_many(**sizes: int) -> None:
    found = splits(**sizes)
    assert found.count >= 1 and found.length >= 1
    assert found.count * found.length >= sizes["keys"]
    assert found.length % sizes["block_n"] == 0
    assert found.count == 1 or found.length >= tiles.SHORTEST
    programs = max(1, min(sizes["num_rows"], sizes["num_requests"]) * sizes["parts"])
    filled = tiles.PROGRAMS_PER_PROCESSOR * sizes["processors"]
    assert found.count <= tiles.MOST or (found.count - 1) * programs < filled


@given(**STEPS, more=st.integers(1, 5000), name=st.sampled_from(("keys", "processors", "num_requests", "parts")))
def test_more_keys_or_processors_make_no_fewer_splits_and_more_programs_no_more(more, name, **sizes: int) -> None:
    before, after = splits(**sizes).count, splits(**(sizes | {name: sizes[name] + more})).count
    assert before <= after if name in ("keys", "processors") else before >= after


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("parts", (1, 2, 8, 32))
def test_no_processor_is_idle_at_a_long_context_in_any_batch(parts: int, processors: int) -> None:
    for requests in range(1, 129):
        for keys in (4096, 8192, 32768, 131072):
            found = splits(num_requests=requests, parts=parts, keys=keys, processors=processors)
            # In a step whose keys suffice for programs of the shortest split.
            filled = min(processors, requests * parts * (keys // tiles.SHORTEST))
            assert requests * parts * found.count >= filled


@pytest.mark.parametrize("requests", (1, 11, 12, 13, 16, 17, 32, 64, 256, 1024))
def test_a_long_context_is_split_at_every_batch_size(requests: int) -> None:
    """One long request among short ones would be walked long after they are done."""
    assert splits(num_requests=requests, keys=4096).count >= 2
    assert splits(num_requests=requests, keys=65536).length <= tiles.LONGEST
    # A mixed step, in which some requests decode.
    assert splits(num_requests=requests, num_rows=4000 + requests, keys=65536).length <= tiles.LONGEST


@given(
    rows=st.integers(1, 600),
    group=st.integers(1, 130),
    key_size=st.integers(1, 600),
    value_size=st.integers(1, 600),
    bytes_per_element=st.sampled_from((2, 4)),
    block_size=st.sampled_from((0, 5, 16, 64, 128)),
    bulk=st.booleans(),
)
def test_a_tile_holds_its_rows_in_powers_of_two(rows, group, **sizes) -> None:
    tile = tiles.tile_config(num_rows=rows, num_requests=8, group=group, **sizes)
    for size in (tile.block_m, tile.block_n, tile.block_d, tile.block_dv):
        assert size >= 16 and size & (size - 1) == 0
    assert (
        group % tile.heads == 0
        and tile.block_m >= tile.heads
        and tile.block_d >= sizes["key_size"]
        and tile.block_dv >= sizes["value_size"]
    )
    assert not tile.bulk or (sizes["block_size"] % tile.block_n == 0 and sizes["block_size"] > 0)


def test_a_short_context_is_whole() -> None:
    assert {splits(num_requests=requests, keys=keys).count for requests in (1, 64) for keys in (0, 1, 511)} == {1}
    assert splits(keys=512).count == 2


@given(
    position=st.integers(0, 400),
    rows=st.integers(1, 9),
    window=st.just(0) | st.integers(1, 90),
    chunk=st.just(0) | st.integers(1, 90),
    block_n=st.sampled_from((16, 64)),
)
def test_no_tile_walks_over_more_keys_than_it_says(position, rows, window, chunk, block_n) -> None:
    capacity = position + rows
    first = next(
        j
        for j in range(position + 1)
        if (not window or j > position - window) and (not chunk or j // chunk == position // chunk)
    )
    walked = position + rows - first // block_n * block_n
    assert walked <= tiles.most_keys(capacity=capacity, rows=rows, window=window, chunk=chunk, block_n=block_n)


def test_the_processors_are_those_of_the_device(monkeypatch) -> None:
    asked = {"cuda:77": SimpleNamespace(multi_processor_count=132)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked[str(device)])
    assert tiles.processors(torch.device("cuda", 77)) == 132
    assert tiles.processors(torch.device("cpu")) == 1
