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


@given(
    rows=st.integers(1, 600),
    group=st.integers(1, 130),
    key_size=st.integers(1, 600),
    value_size=st.integers(1, 600),
    bytes_per_element=st.sampled_from((2, 4)),
    block_size=st.sampled_from((0, 5, 16, 64, 128)),
    bulk=st.booleans(),
    most=st.booleans(),
    backend=st.sampled_from(("cuda", "hip")),
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


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("parts", (1, 2, 8, 32, 1000))
@pytest.mark.parametrize("large", (False, True))
def test_every_processor_has_a_piece_of_a_step_that_is_long_enough(large: bool, parts: int, processors: int) -> None:
    found = tiles.split_config(parts=parts, keys=None, large=large, processors=processors)
    assert found.slots * parts >= processors
    most = (tiles.PIECES_OF_LARGE if large else tiles.PIECES_OF_SMALL) * processors
    assert found.slots == 1 or (found.slots - 1) * parts < most


def test_what_sees_few_keys_is_whole() -> None:
    """By its window: a context that is short so far is no reason, since the next step would need another kernel."""
    for keys, slots in ((None, 132), (256, 0), (257, 132)):
        assert tiles.split_config(parts=8, keys=keys, large=False, processors=132).slots == slots


@given(
    position=st.integers(0, 400),
    rows=st.integers(1, 9),
    window=st.just(0) | st.integers(1, 90),
    chunk=st.just(0) | st.integers(1, 90),
    block_n=st.sampled_from((16, 64, 128)),
)
def test_no_tile_walks_over_more_keys_than_it_says(position, rows, window, chunk, block_n) -> None:
    first = next(
        j
        for j in range(position + 1)
        if (not window or j > position - window) and (not chunk or j // chunk == position // chunk)
    )
    walked = position + rows - first // block_n * block_n
    most = tiles.most_keys(rows=rows, window=window, chunk=chunk, block_n=block_n)
    assert (most is None) == (window == chunk == 0)
    assert most is None or walked <= most


def test_the_processors_are_those_of_the_device(monkeypatch) -> None:
    asked = {"cuda:77": SimpleNamespace(multi_processor_count=132)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked[str(device)])
    assert tiles.processors(torch.device("cuda", 77)) == 132
    assert tiles.processors(torch.device("cpu")) == 1
