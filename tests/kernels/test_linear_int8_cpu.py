"""Linear layers of int8 weights on a CPU: the kernel against float64, for odd sizes, layouts, threads."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from selective_compile import int8_ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.int8_ops import as_int8, linears_int8
from selective_compile.kernels import linear_cpu
from tests.kernels.linear_cases import assert_near_float64, inputs

pytestmark = [
    pytest.mark.skipif(not linear_cpu.available(), reason=str(linear_cpu.unavailable_reason())),
    pytest.mark.usefixtures("matrix_unit"),
]

DTYPES = [torch.float32, torch.bfloat16]


def meant(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weight.double() * scales.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 9, 12, 13, 17, 33, 129])
def test_odd_sizes(rows, dtype):
    for columns, depth in ((1, 1), (5, 3), (13, 17), (97, 129), (31, 1024), (260, 770), (29, 4097)):
        x, weight, bias = inputs(rows, columns, depth, dtype)
        numbers, scales = as_int8(weight)
        for added in (None, bias):
            (result,) = linear_cpu.linears_int8(x, [numbers], [scales], [added])
            assert_near_float64(result, x, meant(numbers, scales), added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 20])
def test_several_weights_give_what_each_gives_alone_on_any_number_of_threads(rows, dtype):
    x = torch.randn(2, rows, 70).to(dtype)
    weights, scales = zip(*(as_int8(torch.randn(columns, 70)) for columns in (5, 64, 33, 1)), strict=True)
    biases = [None, torch.randn(64).to(dtype), None, torch.randn(1).to(dtype)]
    together = linear_cpu.linears_int8(x, weights, scales, biases)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for one, *operands in zip(together, weights, scales, biases, strict=True):
            assert torch.equal(one, linear_cpu.linears_int8(x, *([operand] for operand in operands))[0])
            assert_near_float64(one, x, meant(*operands[:2]), operands[2])
    finally:
        torch.set_num_threads(before)


def test_rounding_is_symmetric_to_the_nearest_and_a_row_of_zeros_stays_zero():
    numbers, scales = as_int8(torch.tensor([[254.0, -127.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-1e-3, 0.0, 5e-4, 1e-3]]))
    assert numbers.tolist() == [[127, -64, 2, 0], [0, 0, 0, 0], [-127, 0, 64, 127]]
    torch.testing.assert_close(scales, torch.tensor([2.0, 1.0, 1e-3 / 127]))


def all_at_once(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(dim=1).float()
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("block", [1, 60, 2**18])
def test_blocks_of_rows_give_what_all_rows_at_once_do(dtype, block, monkeypatch):
    monkeypatch.setattr(int8_ops, "BLOCK", block)
    for shape in ((1, 1), (0, 3), (13, 17), (70, 29), (5, 600)):
        weight = (torch.randn(shape) * torch.randn(shape[0], 1).exp()).to(dtype)
        weight[2:3] = 0
        for each in (weight, weight.t().contiguous().t()):
            numbers, scales = as_int8(each)
            assert all(map(torch.equal, (numbers, scales), all_at_once(weight))) and numbers.is_contiguous()
            wide = weight.double()
            expected = float((numbers * scales[:, None] - weight.float()).double().norm() / wide.norm().clamp(1e-300))
            assert int8_ops.relative_error(each, numbers, scales) == pytest.approx(expected, rel=1e-6)


class Largest(TorchDispatchMode):
    """The most bytes of a result that is none of those given."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.bytes = given, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.data_ptr() != self.given.data_ptr():
            self.bytes = max(self.bytes, result.nbytes if result.dtype is not torch.int8 else 0)
        return result


def test_copies_are_of_some_rows_at_a_time():
    weight = torch.randn(2048, 2048)
    with Largest(weight) as largest:
        numbers, scales = as_int8(weight)
        int8_ops.relative_error(weight, numbers, scales)
    assert largest.bytes <= 2 * 2**20


def test_numbers_that_are_not_finite_or_hardly_any_are_not_hidden():
    least = 2.0**-149
    weight = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [190 * least, -least], [least, 0.0], [3e38, -3e38]])
    numbers, scales = as_int8(weight)
    meant = numbers * scales[:, None]
    assert not meant[:2].isfinite().all(dim=1).any()
    assert float((meant[2:] - weight[2:]).abs().max()) <= 3e38 / 254
    assert meant[2, 0] >= 127 * least and abs(float(meant[3, 0])) <= least


def test_what_does_not_fit_is_refused():
    x, weight, bias = inputs(3, 5, 7, torch.float32)
    numbers, scales = as_int8(weight)
    for arguments, message in (
        ((x[:, :6], numbers, scales, None), r"weight must be \[N, 6\] of torch.int8, got \[5, 7\]"),
        ((x, weight, scales, None), "weight must be .* torch.int8, got .* torch.float32"),
        ((x, numbers, scales[:4], None), r"scales must be \[5\] of float32, got \[4\]"),
        ((x, numbers, scales, bias.double()), "bias must be .* torch.float64"),
        ((x.half(), numbers, scales, None), "x must be .* torch.float16"),
        ((x, numbers.t().contiguous().t(), scales, None), "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_cpu.linears_int8(arguments[0], *([operand] for operand in arguments[1:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_runs_the_kernel_unless_told_otherwise(dtype):
    x, weight, bias = inputs((2, 20), 13, 17, dtype)
    numbers, scales = as_int8(weight)
    opcheck(linears_int8, (x, [numbers, numbers[:4]], [scales, scales[:4]], [bias, None]))
    (result,) = linears_int8(x, [numbers], [scales], [bias])
    assert torch.equal(result, linear_cpu.linears_int8(x, [numbers], [scales], [bias])[0])
    with forced_implementation("reference"):
        (result,) = linears_int8(x, [numbers], [scales], [bias])
    assert torch.equal(result, reference.linear_int8(x, numbers, scales, bias))
    assert_near_float64(result, x, meant(numbers, scales), bias, roundings=2)
    assert int8_ops.DTYPES == tuple(DTYPES)
