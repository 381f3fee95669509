"""The native kernel for rows in groups against float64, for groups of no rows, of few and of many, of odd sizes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from selective_compile import reference
from selective_compile.grouped_ops import grouped_linear as operator
from selective_compile.grouped_ops import take_rows
from selective_compile.implementations import forced_implementation
from selective_compile.int8_ops import as_int8
from selective_compile.kernels import linear_cpu, native
from selective_compile.kernels.linear_cpu import grouped_linear, linear
from tests.kernels.linear_cases import assert_near_float64, by_columns
from tests.test_soak import resident_bytes

pytestmark = [
    pytest.mark.skipif(not linear_cpu.available(), reason=str(linear_cpu.unavailable_reason())),
    pytest.mark.usefixtures("matrix_unit"),
]

DTYPES = [torch.float32, torch.bfloat16]
# Rows of each group: of the ways of multiplying one, the other, and both; more than are packed at once; none at all.
COUNTS = ((1, 0, 3, 2), (0, 40, 19), (2, 0, 0, 25, 4, 33, 1), (700, 0, 3, 650), (0, 0), (5,))
SIZES = ((1, 1), (13, 17), (97, 129), (45, 770), (25, 2048))  # (N, K)


def inputs(counts, columns: int, depth: int, dtype: torch.dtype, behind: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [S, depth] with ``behind`` rows of no group, weights [E, columns, depth], ends [E]."""
    torch.manual_seed(columns * depth)
    x = torch.randn(sum(counts) + behind, depth).to(dtype)
    return (
        x,
        torch.randn(len(counts), columns, depth).to(dtype),
        torch.tensor(list(accumulate(counts)), dtype=torch.int32),
    )


def assert_near(result: Tensor, x: Tensor, weight: Tensor, ends: Tensor, *, roundings: int = 1) -> None:
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if begin < end:
            assert_near_float64(result[begin:end], x[begin:end], weight[group], roundings=roundings)
        begin = end
    assert not result[begin:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_odd_sizes(counts, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for columns, depth in SIZES:
        x, weight, ends = inputs(counts, columns, depth, dtype, behind=3)
        for lies in (weight, by_columns(weight)):
            assert_near(grouped_linear(x, lies, ends), x, weight, ends)
        numbers, scales = as_int8(weight)
        found = grouped_linear(x, numbers, ends.long(), scales)
        assert_near(found, x, numbers.double() * scales.double()[..., None], ends)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_gives_what_a_linear_layer_gives_to_the_bit(dtype):
    x, weight, ends = inputs((1, 30, 0, 5, 12), 70, 300, dtype)
    found, begin = grouped_linear(x, weight, ends), 0
    for group, end in enumerate(ends.tolist()):
        assert torch.equal(found[begin:end], linear(x[begin:end], weight[group]))
        begin = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["weights", "by columns", "int8"])
def test_of_a_batch_invariant_one_a_row_does_not_depend_on_the_rows_of_its_group(dtype, form):
    x, weight, _ = inputs((40, 0), 50, 700, dtype)
    weight, scales = as_int8(weight) if form == "int8" else (weight, None)
    weight = by_columns(weight) if form == "by columns" else weight
    every = grouped_linear(x, weight, torch.tensor([40, 40]), scales, batch_invariant=True)
    for count in (1, 2, 3, 7, 18, 25):
        for first in (0, 40 - count):
            rows = x[first : first + count]
            alone = grouped_linear(rows, weight, torch.tensor([count, count]), scales, batch_invariant=True)
            assert torch.equal(alone, every[first : first + count])
    if dtype is torch.float32:  # where no rounding hides it; columns of it are always summed in that order
        few = grouped_linear(x[:1], weight, torch.tensor([1, 1]), scales)
        assert torch.equal(few, every[:1]) == (form == "by columns")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lies", [Tensor.contiguous, by_columns])
def test_weights_of_groups_without_rows_are_not_read(lies, dtype):
    x, weight, ends = inputs((0, 3, 0, 20, 0), 27, 33, dtype)
    weight = lies(weight)
    clean = grouped_linear(x, weight, ends)
    weight[0::2] = torch.nan
    assert torch.equal(grouped_linear(x, weight, ends), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [41, 64, 200])
@pytest.mark.parametrize("lies", [Tensor.contiguous, by_columns])
def test_what_is_not_finite_stays_in_its_group_row_and_column(lies, depth, dtype):
    x, weight, ends = inputs((3, 30), 30, depth, dtype)
    weight = lies(weight)
    clean = grouped_linear(x, weight, ends)
    x[2], weight[1, 11, 0] = torch.nan, torch.inf
    found = grouped_linear(x, weight, ends)
    assert found[2].isnan().all() and torch.equal(found[:2], clean[:2])
    kept = [n for n in range(30) if n != 11]
    assert torch.equal(found[3:, kept], clean[3:, kept]) and not found[3:, 11].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype):
    x, weight, ends = inputs((2, 21), 21, 40, dtype)
    clean = grouped_linear(x, weight, ends)
    assert torch.equal(grouped_linear(x.t().contiguous().t(), weight, torch.stack([ends, ends], 1)[:, 1]), clean)
    moved = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight).copy_(weight)
    assert torch.equal(grouped_linear(x, moved, ends), clean)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        grouped_linear(x, weight.permute(1, 2, 0).contiguous().permute(2, 0, 1), ends)
    with pytest.raises(ValueError, match="weight must be contiguous, or transposed where it is not int8"):
        grouped_linear(x, by_columns(weight).to(torch.int8), ends, torch.ones(weight.shape[:2]))


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (5, 2, 0, 4), (5, 2, 3, 0)], ids=str)
def test_nothing_to_compute(shape):
    rows, groups, columns, depth = shape
    ends = torch.tensor([rows] * groups)
    found = grouped_linear(torch.ones(rows, depth), torch.ones(groups, columns, depth), ends)
    assert torch.equal(found, torch.zeros(rows, columns))


@pytest.mark.parametrize("run", [grouped_linear, reference.grouped_linear, operator])
@pytest.mark.parametrize("ends", [(3, 2, 5), (-1, 2, 5), (1, 2, 6), (1, 2, 2**32 + 3), (1 - 2**32, 2, 5)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 4), (0, 4), (3, 0)], ids=str)
def test_ends_that_are_none_are_refused(ends, sizes, run):
    x, weight, _ = inputs((1, 2, 2), *sizes, torch.float32)
    with pytest.raises(ValueError, match="ends must be in order and at most 5, got"):
        run(x, weight, torch.tensor(ends))


def test_packed_rows_of_many_small_groups_are_bounded():
    """As those of one large group are; a batch-invariant call packs 16 rows for one."""
    groups, depth = 512, 4096
    x, weight, ends = torch.randn(groups, depth), torch.randn(groups, 1, depth), torch.arange(1, groups + 1)
    before = resident_bytes()
    found = grouped_linear(x, weight, ends, batch_invariant=True)
    assert resident_bytes() - before < 40e6
    assert_near(found, x, weight, ends)


X, WEIGHT, ENDS, SCALES = torch.ones(5, 4), torch.ones(2, 3, 4), torch.tensor([2, 5]), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((X[0], WEIGHT, ENDS), r"x must be \[S, K\]"),
        ((X.double(), WEIGHT.double(), ENDS), r"x must be \[S, K\] of one of .*, got \[5, 4\] of torch.float64"),
        ((X, WEIGHT[0], ENDS), r"weight must be \[E, N, 4\]"),
        ((X, WEIGHT.bfloat16(), ENDS), "weight must be .* of torch.float32, got .* of torch.bfloat16"),
        ((X[:, :3], WEIGHT, ENDS), r"weight must be \[E, N, 3\] of .*, got \[2, 3, 4\]"),
        ((X, WEIGHT, ENDS[:1]), r"ends must be \[2\]"),
        ((X, WEIGHT, ENDS.float()), "ends must be .* got .* of torch.float32"),
        ((X, WEIGHT, ENDS, SCALES), "weight must be .* of torch.int8"),
        ((X, WEIGHT.to(torch.int8), ENDS, SCALES[:, :2]), r"scales must be \[2, 3\] of float32, got \[2, 2\]"),
    ],
    ids=[
        *("x of one dimension", "x of a dtype", "weight of two dimensions", "weight of another dtype", "another depth"),
        *("too few ends", "ends of no integers", "scales without int8", "too few scales"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        operator(*given)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operator(dtype, implementation):
    x, weight, ends = inputs((3, 0, 22), 16, 32, dtype)
    with forced_implementation(implementation), torch.no_grad():
        opcheck(operator, (x, weight, ends), test_utils=("test_schema", "test_faketensor"))
        torch.testing.assert_close(operator(x, weight, ends), reference.grouped_linear(x, weight, ends))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_rows_are_taken(dtype):
    x, index = torch.randn(7, 5).to(dtype), torch.tensor([6, 0, 0, 3])
    opcheck(take_rows, (x, index), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(take_rows(x, index), x[index]) and take_rows(x, index[:0]).shape == (0, 5)
    for wrong in (7, -1):
        with pytest.raises(ValueError, match="the index must be among the rows"):
            take_rows(x, torch.tensor([wrong]))


def test_a_matrix_unit_is_used_where_there_is_one(matrix_unit, monkeypatch):
    x, weight, ends = inputs((0, 40), 9000, 512, torch.bfloat16)
    found = grouped_linear(x, weight, ends)
    monkeypatch.setattr(native, "MATRIX_UNIT", False)
    assert torch.equal(found, grouped_linear(x, weight, ends)) is not matrix_unit
