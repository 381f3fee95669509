"""What generated code calls, found without running it; code that does what is not followed is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from selective_compile import ops
from selective_compile.call_values import NotFollowed, Pointer, Size
from selective_compile.kernels import linear_cpu
from selective_compile.native_calls import THREADS, NativeCalls, native_calls

pytestmark = pytest.mark.skipif(not linear_cpu.available(), reason=str(linear_cpu.unavailable_reason()))

T = Size.symbol(1)
PREAMBLE = """
import torch
from math import pi
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
aten = torch.ops.aten
def call(args):
    x, weight = args
    args.clear()
    rows = x.size()[0]
"""


def written(body: str) -> Callable[[list[Any]], Any]:
    names: dict[str, Any] = {}
    exec(PREAMBLE + "".join(f"    {line}\n" for line in body.splitlines()), names)
    return names["call"]  # type: ignore[no-any-return]


def examples() -> list[Tensor]:
    """x [T, 8] and a weight [8, 8]."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(5, 8), symbolic_context=rows)
    return [x, mode.from_tensor(torch.randn(8, 8), static_shapes=True)]


def calls_of(body: str) -> NativeCalls:
    return native_calls(written(body), examples())


def test_calls_have_addresses_and_sizes_as_sums() -> None:
    found = calls_of(
        """assert_size_stride(weight, (8, 8), (8, 1))
one, other = torch.ops.selective.linears.default(x, [weight, weight], [None, None])
del x
last = torch.ops.selective.linear.default(reinterpret_tensor(other, (rows, 8), (8, 1), 0), weight, bias=None)
return (last, )"""
    )
    first, second = found.calls
    assert found.sizes == ((0, 0),) and found.output.shape == (T, 8)
    assert first.packed and first.function == second.function == linear_cpu.address_of("selective_linear")
    x, rows, depth, _, _, _, threads, _, parts, *_ = first.arguments
    assert (rows, depth, threads, parts) == (T, 8, THREADS, 2)
    assert isinstance(x, Pointer) and x.storage.argument == 0
    assert second.arguments[0] == first.arguments[9 + 5 + 2], "reads what the first call wrote for its second weight"
    assert second.arguments[9 + 2] == found.output.data_ptr()


def test_a_sequence_runs_at_any_size() -> None:
    from selective_compile.call_sequence import CallSequence

    body = """buf = torch.ops.selective.linear.default(x, weight, None)
return (torch.ops.selective.linear.default(buf, weight, None), )"""
    sequence = CallSequence(calls_of(body), num_arguments=2, num_weights=0)
    for rows in (2, 5, 40, 3):
        x, weight = torch.randn(rows, 8), torch.randn(8, 8)
        wanted = linear_cpu.linear(linear_cpu.linear(x, weight), weight)
        assert torch.equal(sequence([x, weight], ()), wanted)
    kept = sequence([x, weight], ())
    sequence([x + 1, weight], ())
    assert torch.equal(kept, wanted), "a result stays as it is"


ATTENTION = """pools = [empty_strided_cpu((3, 2, 16, 4), (128, 64, 4, 1), torch.float32) for _ in "kv"]
lengths = [empty_strided_cpu((3, ), (1, ), torch.int32) for _ in "abcd"]
rows_of = reinterpret_tensor(x, (rows, 2, 4), (8, 4, 1), 0)
buf = torch.ops.selective.ragged_attention.default(
    rows_of, rows_of, rows_of, *pools, *lengths[:2], reinterpret_tensor(lengths[2], (3, 1), (1, 1), 0), lengths[3],
    0.5, 0, 0.0, {0})
return (buf, )"""


def test_arguments_of_attention_that_are_none_are_followed_and_others_are_not() -> None:
    """Generated code gives every argument that has a default, however many an operator comes to have."""
    schema = ops.ragged_attention._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    followed = {"chunk", "sinks", "slopes", "prefix", "distance_bias"}
    assert followed < set(defaults)
    given = ", ".join(f"{name}={value}" for name, value in defaults.items())
    assert len(calls_of(ATTENTION.format(given)).calls) == len(calls_of(ATTENTION.format("")).calls) == 1
    for name in defaults.keys() - followed:
        with pytest.raises(NotFollowed, match=f"attention with {name}"):
            calls_of(ATTENTION.format(f"{name}=weight"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (aten.sort.default(x)[0], )", "aten.sort"),
        ("return (torch.ops.aten.mm.default(x, weight), )", r"torch\.ops\.aten"),
        ("return (torch.sin(x), )", "torch.sin"),
        ("return (x, )", "part of something else"),
        ("return (empty_strided_cpu((rows, 8), (8, 1), torch.float32), rows)", "2 values"),
        ("return (empty_strided_cpu((1, rows), (1, 1), torch.float32)[0], )", None),
        ("return (empty_strided_cpu((rows, rows), (rows, 1), torch.float32), )", "product of two sizes"),
        (
            "whole = empty_strided_cpu((rows, 8), (8, 1), torch.float32)\n"
            "return (reinterpret_tensor(whole, (rows, 4), (4, 1), 0), )",
            "part of something else",
        ),
        ("return (torch.ops.selective.linear.default(reinterpret_tensor(x, (rows, 4), (8, 1), 0), weight), )", "copy"),
        ("return (torch.ops.selective.scan.default(x, weight), )", "torch.ops.selective.scan"),
    ],
)
def test_what_is_not_followed_is_refused(body: str, message: str | None) -> None:
    refusal = NotFollowed if message else (TypeError, AttributeError)
    with pytest.raises(refusal, match=message):
        calls_of(body)


def test_arguments_must_be_tensors_on_a_cpu() -> None:
    with pytest.raises(NotFollowed, match="no tensor on a CPU: int"):
        native_calls(operator.itemgetter(0), [3])
