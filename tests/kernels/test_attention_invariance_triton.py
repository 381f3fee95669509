"""Rows as requests of their own, as a batch-invariant engine has them: the Triton kernel gives each the same bits."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.ragged_cases import Case, Inputs, cases, make_inputs

pytest.importorskip("triton")
even_dots = pytest.importorskip("tests.kernels.even_dots").even_dots
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
choice = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def few_rows() -> st.SearchStrategy[Case]:
    """The interpreter takes a millisecond for a step of a row's keys. Batch-invariant engines refuse a prefix."""
    return cases().map(
        lambda case: dataclasses.replace(
            case, prefix=0, requests=tuple((rows % 6, past % 70) for rows, past in case.requests)
        )
    )


def rows_of(case: Case) -> list[tuple[int, int]]:
    """Of each row its request and its position there."""
    return [(n, past + row) for n, (count, past) in enumerate(case.requests) for row in range(count)]


def attended(inputs: Inputs, places: list[tuple[int, int, int]], *, padding: int = 0, width: int = 0) -> Tensor:
    """The results of these rows (row, request, position), each a request, in pools that are written already.

    padding: rows behind them that are nobody's, with as many empty requests; width: more entries of the block table.
    """
    rows = torch.tensor([row for row, _, _ in places])
    of_requests = torch.tensor([request for _, request, _ in places])
    count, total = len(places), len(places) + padding
    table = inputs.block_table.new_zeros(total, inputs.block_table.shape[1] + width)
    table[:count, : inputs.block_table.shape[1]] = inputs.block_table[of_requests]
    contexts = inputs.context_lens.new_zeros(total)
    contexts[:count] = torch.tensor([position + 1 for _, _, position in places])
    padded = [torch.cat([t[rows], t.new_full((padding, *t.shape[1:]), torch.nan)]) for t in new_rows(inputs)]
    given = dataclasses.replace(
        inputs,
        query=padded[0],
        key=padded[1],
        value=padded[2],
        cu_seqlens_q=torch.arange(total + 1, dtype=torch.int32).clamp(max=count),
        context_lens=contexts,
        block_table=table,
        slot_mapping=torch.full((total,), -1),
    )
    return launcher.ragged_attention(*given.ragged(), batch_invariant=True)[:count]


def new_rows(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.query, inputs.key, inputs.value


def written(case: Case, dtype: torch.dtype) -> tuple[Inputs, list[tuple[int, int, int]]]:
    """A step whose keys and values are in the pools, as they are whatever the chunking; and its rows."""
    inputs = make_inputs(case, dtype)
    launcher.ragged_attention(*inputs.ragged())
    return inputs, [(row, *place) for row, place in enumerate(rows_of(case))]


@settings(max_examples=15, deadline=None)
@given(case=few_rows(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**20))
def test_a_row_has_the_same_bits_among_any_others(case: Case, dtype: torch.dtype, seed: int) -> None:
    inputs, places = written(case, dtype)
    if not places:
        return
    rng = Random(seed)
    every = attended(inputs, places)
    for _ in range(2):
        chosen = rng.sample(places, rng.randint(1, min(9, len(places))))
        found = attended(inputs, chosen, padding=rng.randint(0, 20), width=rng.randint(0, 3))
        assert torch.equal(found, every[[row for row, _, _ in chosen]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", (1, 4, 7, 32))
@pytest.mark.parametrize("bulk", (False, True))
def test_steps_of_any_size_have_one_tile(bulk: bool, group: int, dtype: torch.dtype) -> None:
    sizes = {"group": group, "key_size": 128, "value_size": 128, "bytes_per_element": dtype.itemsize}
    sizes |= {"block_size": 64, "bulk": bulk}
    tiles = {choice.tile_config(num_rows=n, num_requests=n, **sizes) for n in (2, 3, 32, 33, 500, 8192)}
    assert len(tiles) == 1
    tiles.add(choice.tile_config(num_rows=32, num_requests=2, **sizes))
    # Of 32 heads a tile of float32 has one row, tall or low.
    assert len(tiles) == (1 if group == 32 and dtype == torch.float32 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_on_a_gpu(dtype: torch.dtype) -> None:
    case = Case(name="", requests=((1, 300), (70, 90), (33, 0)), key_size=64, value_size=64, query_heads=8)
    inputs = make_inputs(case, dtype)
    moved = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in moved.items()}
    inputs = Inputs(**moved)
    launcher.ragged_attention(*inputs.ragged())
    places = [(row, *place) for row, place in enumerate(rows_of(case))]
    with torch.device("cuda"):
        every = attended(inputs, places)
        for size in (1, 7, 60):
            parts = [attended(inputs, places[i : i + size], padding=size) for i in range(0, len(places), size)]
            assert torch.equal(torch.cat(parts), every)
