"""The native linear kernel against float64, for odd sizes, layouts and threads, and changing weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck

from selective_compile import ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.int8_ops import as_int8
from selective_compile.kernels import linear_cpu, native
from selective_compile.kernels.linear_cpu import linear
from selective_compile.runtime.batch import SMALLEST_INVARIANT
from tests.kernels.instruction_sets import ARCHITECTURES, built_for, runs
from tests.kernels.linear_cases import assert_near_float64, by_columns, inputs

pytestmark = [
    pytest.mark.skipif(not linear_cpu.available(), reason=str(linear_cpu.unavailable_reason())),
    pytest.mark.usefixtures("matrix_unit"),
]

DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 19, 24, 25, 33, 56, 65, 128, 129)
# (N, K): one; under every tile; no multiple of 12 or 16; rows of 4096 bytes; K cut into blocks at 128 rows.
SIZES = ((1, 1), (5, 3), (16, 16), (13, 17), (97, 129), (31, 1024), (260, 770), (29, 4097), (25, 2048))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_odd_sizes(rows, dtype, threads):
    for columns, depth in SIZES:
        x, weight, bias = inputs(rows, columns, depth, dtype)
        for lies in (weight, by_columns(weight)):
            assert_near_float64(linear(x, lies), x, weight)
            assert_near_float64(linear(x, lies, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_are_packed_at_once(dtype, threads):
    x, weight, bias = inputs(1100, 45, 300, dtype)
    assert_near_float64(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instruction_set(architecture, tmp_path, monkeypatch):
    if not runs(architecture):
        pytest.skip(f"this processor is no {architecture}")
    library = built_for(architecture, linear_cpu.__file__, tmp_path)
    monkeypatch.setitem(linear_cpu._functions._functions, "selective_linear", library.selective_linear)
    for (columns, depth), rows, dtype in product(SIZES[2:], (1, 3, 4, 5, 8, 10, 12, 16, 18, 20, 33), DTYPES):
        x, weight, bias = inputs(rows, columns, depth, dtype)
        for lies in (weight, by_columns(weight)):
            assert_near_float64(linear(x, lies, bias), x, weight, bias)
        numbers, scales = as_int8(weight)
        (result,) = linear_cpu.linears_int8(x, [numbers], [scales], [bias])
        assert_near_float64(result, x, numbers.double() * scales.double()[:, None], bias)


def test_more_threads_than_work():
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        for rows in (1, 20):
            x, weight, bias = inputs(rows, 5, 40, torch.float32)
            assert_near_float64(linear(x, weight, bias), x, weight, bias)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_nothing_to_compute(shape, dtype):
    columns, depth = shape
    for rows in (0, 4):
        x, weight, bias = inputs(rows, columns, depth, dtype)
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("shape", [(), (7,), (2, 9), (2, 3, 5), (2, 0, 5)], ids=str)
def test_leading_dimensions(shape):
    x, weight, bias = inputs(shape, 21, 40, torch.bfloat16)
    result = linear(x, weight, bias)
    assert result.shape == (*shape, 21)
    if result.numel():
        assert_near_float64(result, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 33])
def test_layouts(rows, dtype):
    x, weight, bias = inputs(rows, 21, 40, dtype)
    wide = torch.full((rows, 80), torch.nan, dtype=dtype)
    wide[:, ::2] = x
    bias_of_two = torch.stack([bias, bias * torch.nan], 1)
    for same_x in (x, x.t().contiguous().t(), wide[:, ::2]):
        assert_near_float64(linear(same_x, weight, bias_of_two[:, 0]), x, weight, bias)
    # Rows, and columns, of a larger weight; at an address that is no multiple of 4; with others that lie otherwise.
    assert_near_float64(linear(x, weight[4:20], bias[4:20]), x, weight[4:20], bias[4:20])
    assert_near_float64(linear(x, by_columns(weight)[4:20], bias[4:20]), x, weight[4:20], bias[4:20])
    moved = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight).copy_(weight)
    for lies in (moved, torch.empty(weight.numel() + 1, dtype=dtype)[1:].view(40, 21).copy_(weight.t()).t()):
        assert_near_float64(linear(x, lies, bias), x, weight, bias)
    weights = [weight, by_columns(weight), by_columns(weight)[:1]]
    found = linear_cpu.linears(x, weights, [bias, bias, bias[:1]])
    for result, lies in zip(found, weights, strict=True):
        assert torch.equal(result, linear(x, lies, bias[: len(lies)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 21])
def test_several_weights_by_columns(rows, dtype, threads):
    x, *_ = inputs(rows, 1, 70, dtype)
    weights, biases = zip(*(inputs(1, columns, 70, dtype)[1:] for columns in (40, 7, 1, 1030)), strict=True)
    biases = [biases[0], None, *biases[2:]]
    found = linear_cpu.linears(x, [by_columns(weight) for weight in weights], biases)
    for result, weight, bias in zip(found, weights, biases, strict=True):
        assert_near_float64(result, x, weight, bias)
    if dtype is torch.float32:  # where one order is for all, and one column is by columns, too
        assert torch.equal(found[0], linear(x, by_columns(weights[0]), biases[0]))


def test_a_matrix_unit_is_used_where_there_is_one(matrix_unit, monkeypatch):
    """By the last bits of many sums: nothing else would tell that the system has refused it."""
    x, weight, _ = inputs(40, 9000, 512, torch.bfloat16)
    found = linear(x, weight)
    monkeypatch.setattr(native, "MATRIX_UNIT", False)
    assert torch.equal(found, linear(x, weight)) is not matrix_unit


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_sums_changes_once_and_before_batches_are_invariant(dtype, matrix_unit):
    """Also where several passes over a weight take the rows, and the last does rows of the one before again."""
    x, weight, bias = inputs(SMALLEST_INVARIANT + 9, 1000, 500, dtype)
    alone, many = torch.cat([linear(row[None], weight, bias) for row in x]), linear(x, weight, bias)
    results = [(rows, linear(x[-rows:], weight, bias)) for rows in range(1, len(x) + 1)]
    # Which rounding to bfloat16 may hide.
    few = next((rows - 1 for rows, result in results if not torch.equal(result, alone[-rows:])), SMALLEST_INVARIANT - 1)
    assert (3 if matrix_unit and dtype is torch.bfloat16 else 8) <= few < SMALLEST_INVARIANT
    assert all(torch.equal(result, many[-rows:]) for rows, result in results[few:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 20])
def test_nothing_around_the_operands_is_read_or_written(rows, dtype):
    x, weight, bias = inputs(rows, 27, 33, dtype)
    expected = linear(x, weight, bias)
    framed = []
    for tensor in (x, weight, bias):
        frame = torch.full((tensor.numel() + 256,), torch.nan, dtype=dtype)
        frame[128:-128] = tensor.flatten()
        framed.append(frame[128:-128].view_as(tensor))
    assert torch.equal(linear(*framed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [41, 64, 200])
@pytest.mark.parametrize("rows", [4, 20, 70])
def test_what_is_not_finite_stays_in_its_row_and_column(rows, depth, dtype):
    x, weight, _ = inputs(rows, 30, depth, dtype)
    clean = linear(x, weight)
    x[3, 7], weight[11, 0] = torch.nan, torch.inf
    result = linear(x, weight)
    assert result[3].isnan().all() and result[:3, 11].isinf().all()
    kept = [n for n in range(30) if n != 11]
    assert torch.equal(result[:3, kept], clean[:3, kept]) and torch.equal(result[4:, kept], clean[4:, kept])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 20, 33])
def test_several_weights_give_what_each_gives_alone_to_the_bit(rows, dtype, threads):
    x = torch.randn(2, rows, 70).to(dtype)
    weights = [torch.randn(columns, 70).to(dtype) for columns in (5, 64, 0, 33, 1)]
    biases = [None if i % 2 else torch.randn(len(weight)).to(dtype) for i, weight in enumerate(weights)]
    together = linear_cpu.linears(x, weights, biases)
    assert len(together) == len(weights)
    for one, weight, bias in zip(together, weights, biases, strict=True):
        assert torch.equal(one, linear(x, weight, bias))
    turned = [*weights[:1], weights[1].t().contiguous().t()]  # one that the kernel does not take
    for one, weight, bias in zip(linear_cpu.linears(x, turned, biases[:2]), turned, biases, strict=False):
        torch.testing.assert_close(one, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "fewer"), [(8, (1, 2, 5, 7)), (129, (19, 33, 64))])
def test_a_row_does_not_depend_on_the_rows_around_it_nor_on_the_threads(rows, fewer, dtype, threads):
    x, weight, bias = inputs(rows, 50, 500, dtype)
    every = linear(x, weight, bias)
    for count in fewer:
        assert torch.equal(linear(x[:count], weight, bias), every[:count])
        assert torch.equal(linear(x[-count:], weight[7:], bias[7:]), every[-count:, 7:])
    torch.set_num_threads(3 - threads)
    assert torch.equal(linear(x, weight, bias), every)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_several_blocks_does_not_depend_on_the_rows_around_it(dtype):
    """Of how many blocks K is, and where they end, the number of rows tells."""
    x, weight, _ = inputs(129, 25, 4501, dtype)
    every = linear(x, weight)
    for count in (19, 40, 100):
        assert torch.equal(linear(x[:count], weight), every[:count])


@pytest.mark.parametrize("rows", [2, 20, 40])
def test_long_sums_are_as_near_as_those_of_others(rows):
    """One after another, 14,336 products came to sums of 20 rows that were off by 2.1e-6, and MKL's by 3.7e-7."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 14336, generator=generator) for n in (rows, 64))
    weight *= 14336**-0.5
    off = linear(x, weight).double() - x.double() @ weight.double().T
    assert off.square().mean().sqrt() < 7e-7


@pytest.mark.parametrize("rows", [2, 20])
def test_a_weight_changed_in_place_is_seen_by_the_next_call(rows):
    layer = nn.Linear(48, 24)
    x = torch.randn(rows, 48)
    with torch.no_grad():
        first = linear(x, layer.weight, layer.bias)
        layer.weight.data.mul_(2)
        layer.bias.data.zero_()
        assert_near_float64(linear(x, layer.weight, layer.bias), x, layer.weight, layer.bias)
        assert not torch.allclose(linear(x, layer.weight, layer.bias), first)


def test_what_does_not_fit_is_refused():
    x, weight, bias = inputs(3, 5, 7, torch.float32)
    for arguments, message in (
        ((x[:, :6], weight), r"weight must be \[N, 6\] of torch.float32, got \[5, 7\]"),
        ((x, weight.bfloat16()), "weight must be .* got .* torch.bfloat16"),
        ((x, weight, bias[:4]), r"bias must be \[5\]"),
        ((x, weight, bias.double()), "bias must be .* torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(*arguments)


# ------------------------------------------------------------------------------------------------ the op


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [(3,), (2, 20)], ids=str)
def test_opcheck(rows, dtype):
    x, weight, bias = inputs(rows, 13, 17, dtype)
    opcheck(ops.linear, (x, weight, bias))
    opcheck(ops.linear, (x.transpose(0, -1).contiguous().transpose(0, -1), weight, None))
    opcheck(ops.linears, (x, [weight, weight[:4]], [bias, None]))


def test_the_op_runs_the_kernel_unless_told_otherwise(monkeypatch):
    x, weight, bias = inputs(20, 50, 3000, torch.float32)
    assert torch.equal(ops.linear(x, weight, bias), linear(x, weight, bias))
    with forced_implementation("reference"):
        assert torch.equal(ops.linear(x, weight, bias), reference.linear(x, weight, bias))
        assert torch.equal(ops.linears(x, [weight], [bias])[0], reference.linear(x, weight, bias))
    monkeypatch.setattr(linear_cpu, "available", lambda: False)
    ops._kernel.cache_clear()
    assert torch.equal(ops.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(ops.linears(x, [weight], [None])[0], F.linear(x, weight))
    ops._kernel.cache_clear()


def test_the_op_refuses_gradients():
    x, weight, _ = inputs(3, 5, 7, torch.float32)
    with pytest.raises(RuntimeError, match="no derivative"):
        ops.linear(x, weight.requires_grad_())
    with torch.no_grad():
        assert_near_float64(ops.linear(x, weight), x, weight)


def test_one_compiled_graph_serves_every_number_of_rows_and_sees_changed_weights():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 16, bias=False)

        def forward(self, x):
            hidden = F.silu(ops.linear(x, self.first.weight, self.first.bias))
            return ops.linear(hidden, self.second.weight, None)

    torch._dynamo.reset()
    model = Two()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (5, 2, 70, 9):
            x = torch.randn(1, rows, 24)
            expected = model.second(F.silu(model.first(x)))
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
            model.first.weight.data.add_(0.1)
    assert counter.frame_count == 1
