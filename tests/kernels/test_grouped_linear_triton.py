"""The Triton kernel for rows in groups, in the interpreter: what a row depends on; and compiled for four targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import reference
from selective_compile.grouped_ops import grouped_linear as operator
from selective_compile.implementations import forced_implementation
from tests.kernels.test_grouped_linear_cpu import assert_near, inputs
from tests.kernels.test_linear_triton import CUT_OFF, DTYPES, ELEMENTS, compiling, triton_cache  # noqa: F401

triton = pytest.importorskip("triton")
even_dots = pytest.importorskip("tests.kernels.even_dots").even_dots
launcher = pytest.importorskip("selective_compile.kernels.grouped_linear_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
tile_of = pytest.importorskip("selective_compile.kernels.linear_triton").tile_of

COUNTS = ((1, 0, 3, 2), (0, 70, 1, 0, 33), (0, 0), (5,), (64, 64))
SIZES = ((1, 1), (13, 17), (70, 130))  # (N, K)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_odd_sizes(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for columns, depth in SIZES:
        x, weight, ends = inputs(counts, columns, depth, dtype, behind=3)
        for lies in (weight, weight.mT.contiguous().mT):
            assert_near(launcher.grouped_linear(x, lies, ends.long()), x, weight, ends, roundings=CUT_OFF)


def test_more_groups_than_rows() -> None:
    counts = [0] * 130
    counts[3], counts[129] = 2, 1
    x, weight, ends = inputs(counts, 7, 9, torch.float32)
    assert_near(launcher.grouped_linear(x, weight, ends), x, weight, ends)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    others=st.lists(st.sampled_from((0.0, 1.0, torch.inf, torch.nan)), max_size=80),
    place=st.integers(0, 80),
)
def test_a_row_has_the_same_bits_among_any_others_of_its_group(
    dtype: torch.dtype, others: list[float], place: int
) -> None:
    x, weight, _ = inputs((1, 1), 20, 75, dtype)
    alone = launcher.grouped_linear(x, weight, torch.tensor([1, 2]))
    place = min(place, len(others))
    rows = torch.tensor(others).to(dtype)[:, None].expand(len(others), 75)
    among = torch.cat([x[:1], rows[:place], x[1:], rows[place:]])
    found = launcher.grouped_linear(among, weight, torch.tensor([1, len(among)]))
    assert torch.equal(found[0], alone[0]) and torch.equal(found[1 + place], alone[1])


@pytest.mark.parametrize("ends", [(3, 2, 5), (-4, 2, 5), (1, 2, 900), (7, 7, 7)], ids=str)
def test_ends_that_are_none_reach_nothing_else(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read them: what they say of other memory is not read, nor written."""
    x, weight, _ = inputs((1, 2, 2), 3, 4, torch.float32)
    frame, results = torch.full((1000, 4), torch.nan), torch.full((1000, 3), 7.0)
    frame[500:505] = x
    new_empty = torch.Tensor.new_empty

    def framed(self: Tensor, *size: Any, **options: Any) -> Tensor:
        return results[500:505] if size == ((5, 3),) else new_empty(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", framed)
    found = launcher.grouped_linear(frame[500:505], weight, torch.tensor(ends))
    assert found.data_ptr() == results[500:].data_ptr() and found.isfinite().all()
    assert (results[:500] == 7).all() and (results[505:] == 7).all()


def test_the_operator_runs_it() -> None:
    x, weight, ends = inputs((3, 0, 22), 16, 32, torch.float32)
    with forced_implementation("triton"), torch.no_grad():
        torch.testing.assert_close(operator(x, weight, ends), reference.grouped_linear(x, weight, ends))
        with pytest.raises(ValueError, match="weight must not be int8"):
            launcher.grouped_linear(x, weight.to(torch.int8), ends, torch.ones(3, 16))


@compiling
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("experts", [(32, 1024, 512), (128, 1536, 2048)], ids=str)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: Any, element: str, experts: tuple[int, int, int], tmp_path: Any) -> None:
    groups, columns, depth = experts
    tile = tile_of(columns=columns, depth=depth, bytes_per_element=ELEMENTS[element])
    constants: dict[str, Any] = {"GROUPS": groups, "COLUMNS": columns, "DEPTH": depth}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    constants |= {"WIDEN": False, "weight_column_stride": 1}
    types = {**dict.fromkeys(("output", "x", "weight"), f"*{element}"), "offsets": "*i32"}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = ahead.compile_ahead(launcher._grouped_linear_kernel, target, types, constants, **options)
    ahead.assert_ships(compiled, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_on_a_gpu(dtype: torch.dtype) -> None:
    for columns, depth in (*SIZES, (1000, 4096)):
        x, weight, ends = inputs((1, 0, 300, 7, 64), columns, depth, dtype)
        every = launcher.grouped_linear(x.cuda(), weight.cuda(), ends.cuda())
        assert_near(every.cpu(), x, weight, ends)
        for size in (1, 7, 64, 299):
            few = torch.tensor([1, 1, 1 + size, 1 + size, 1 + size])
            part = launcher.grouped_linear(x[: 1 + size].cuda(), weight.cuda(), few.cuda())
            assert torch.equal(part, every[: 1 + size])
