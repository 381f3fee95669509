"""The ops with a state as PyTorch sees them: schemas, fakes, functionalisation, and the choice of implementation."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from selective_compile import state_ops, state_reference
from selective_compile.implementations import forced_implementation
from tests.kernels.state_cases import OPS, SIZES, Call, StateCase, make_call

STEP = ((3, 5), (1, 0), (0, 0), (1, 20))
DYNAMIC = ("x", "dt", "B", "C", "query", "key", "value", "decay", "beta", "update", "input_gate")
DYNAMIC += ("cu_seqlens_q", "context_lens", "state_slots")


def finite(op: str, requests: tuple[tuple[int, int], ...] = STEP, padding_rows: int = 1) -> Call:
    """opcheck compares tensors without equal_nan."""
    call = make_call(
        StateCase(op=op, name="", sizes=SIZES[op][0], requests=requests, padding_rows=padding_rows), torch.float32
    )
    for value in call.arguments.values():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.nan_to_num_(0.5)
    return call


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    with forced_implementation("reference"):
        opcheck(getattr(state_ops, op), finite(op).positional())
        opcheck(getattr(state_ops, f"varlen_{op}"), finite(op).varlen())


@pytest.mark.parametrize("op", OPS)
def test_the_varlen_op_is_the_op_with_fresh_requests(op):
    call = finite(op)
    with forced_implementation("reference"):
        output = getattr(state_ops, f"varlen_{op}")(*call.varlen())
        assert torch.equal(output, call.fresh().run(state_reference))
        assert torch.equal(getattr(state_ops, op)(*call.positional()), finite(op).run(state_reference))


def two_layers(op: str, pools: tuple[Tensor, Tensor], call: Call) -> Tensor:
    run = getattr(state_ops, op)
    first = run(*call.replaced(state_pool=pools[0]).positional())
    again = {name: call.arguments[name] * 0.5 for name in ("x", "value", "update") if name in call.arguments}
    return first + run(*call.replaced(state_pool=pools[1], **again).positional())


@pytest.mark.parametrize("op", ["causal_conv1d", "ssd"])
def test_a_compiled_graph_writes_the_pools_in_place_without_copying_them(op):
    """Functionalisation makes the op pure; if Inductor did not undo that, each call would copy the pools."""
    call = finite(op)
    pools, expected_pools = ([call.pool.repeat(7, *[1] * (call.pool.dim() - 1)) for _ in range(2)] for _ in range(2))
    addresses = [pool.data_ptr() for pool in pools]
    names = tuple(call.arguments)

    def step(pools, *arguments):
        return two_layers(op, pools, call.replaced(**dict(zip(names, arguments, strict=True))))

    with torch.no_grad(), forced_implementation("reference"):
        expected = two_layers(op, expected_pools, call)
        result, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), pools, *call.positional())
    torch.testing.assert_close(result, expected)
    for pool, expected_pool, address in zip(pools, expected_pools, addresses, strict=True):
        torch.testing.assert_close(pool, expected_pool)
        assert not torch.equal(pool[: len(call.pool)], call.pool)
        assert pool.data_ptr() == address
    assert code.count(f"torch.ops.selective.{op}.default(") == 2
    rows = len(pools[0])
    assert f"({rows}, {pools[0].shape[1]}," in code, "the next line means nothing when the size is not spelt out"
    assert not re.search(rf"= empty_strided\w*\(\({rows},", code)
    assert not re.search(r"\b(clone|copy_)\b", code)


@pytest.mark.parametrize("op", OPS)
def test_one_graph_serves_every_number_of_tokens_and_requests(op):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    names = tuple(finite(op).arguments)

    @torch.compile(fullgraph=True, backend=counter)
    def step(*arguments):
        call = Call(op=op, arguments=dict(zip(names, arguments, strict=True)))
        return getattr(state_ops, op)(*call.positional()) + getattr(state_ops, f"varlen_{op}")(*call.varlen())

    steps = (STEP, ((2, 0), (4, 1), (1, 60)), ((9, 2), (0, 0), (1, 1), (5, 5), (2, 2)))
    with torch.no_grad(), forced_implementation("reference"):
        for padding, requests in enumerate(steps):
            call, expected = finite(op, requests, padding), finite(op, requests, padding)
            for name in DYNAMIC:
                if name in call.arguments and call.arguments[name].dim():
                    torch._dynamo.mark_dynamic(call.arguments[name], 0)
            torch._dynamo.mark_dynamic(call.pool, 0)
            wanted = expected.run(state_reference) + expected.fresh().run(state_reference)
            torch.testing.assert_close(step(*call.positional()), wanted)
            torch.testing.assert_close(call.pool, expected.pool)
    assert counter.frame_count == 1


META = {
    "causal_conv1d": {"x": (5, 7), "weight": (7, 4), "bias": (7,), "state_pool": (3, 7, 3)},
    "selective_scan": {"x": (5, 6), "dt": (5, 6), "A": (6, 4), "B": (5, 4), "C": (5, 2, 4), "D": (6,)}
    | {"state_pool": (3, 6, 4)},
    "ssd": {"x": (5, 6, 8), "dt": (5, 6), "A": (6,), "B": (5, 2, 4), "C": (5, 2, 4), "D": (6,)}
    | {"state_pool": (3, 6, 8, 4)},
    "gated_delta_rule": {"query": (5, 2, 8), "key": (5, 2, 8), "value": (5, 4, 6), "decay": (5, 4), "beta": (5, 4)}
    | {"scale": None, "state_pool": (3, 4, 8, 6)},
    "linear_recurrence": {"decay": (5, 7), "update": (5, 7), "state_pool": (3, 7)},
    "wkv": {"time_decay": (7,), "time_first": (7,), "key": (5, 7), "value": (5, 7), "state_pool": (3, 7, 3)},
    "mlstm": {"query": (5, 2, 8), "key": (5, 2, 8), "value": (5, 2, 6), "input_gate": (5, 2), "decay": (5, 2)}
    | {"scale": None, "eps": None, "state_pool": (3, 2, 9, 7)},
}
WRONG = [
    ("causal_conv1d", {"x": (5, 7, 1)}, "x must be [T, C], got [5, 7, 1]"),
    ("causal_conv1d", {"weight": (6, 4)}, "weight must be [C, W] with [7, 4], got [6, 4]"),
    ("causal_conv1d", {"weight": (7,)}, "weight must be [C, W], got [7]"),
    ("causal_conv1d", {"bias": (1,)}, "bias must be [C] with [7], got [1]"),
    ("causal_conv1d", {"state_pool": (3, 7, 4)}, "state_pool must be [num_slots, C, W - 1] with [7, 3], got [3, 7, 4]"),
    ("selective_scan", {"dt": (5, 7)}, "dt must be [T, I] with [6], got [5, 7]"),
    ("selective_scan", {"A": (6,)}, "A must be [I, n], got [6]"),
    ("selective_scan", {"A": (7, 4)}, "A must be [I, n] with [6, 4], got [7, 4]"),
    ("selective_scan", {"B": (5, 3)}, "B must be [T, n] or [T, G, n] with G dividing 6 and n = 4"),
    ("selective_scan", {"C": (5, 4, 4)}, "C must be [T, n] or [T, G, n] with G dividing 6 and n = 4"),
    ("selective_scan", {"D": (4,)}, "D must be [I] with [6], got [4]"),
    ("selective_scan", {"state_pool": (3, 4, 6)}, "state_pool must be [num_slots, I, n] with [6, 4], got [3, 4, 6]"),
    ("ssd", {"x": (5, 48)}, "x must be [T, H, P], got [5, 48]"),
    ("ssd", {"dt": (5, 6, 1)}, "dt must be [T, H] with [6], got [5, 6, 1]"),
    ("ssd", {"A": (6, 4)}, "A must be [H] with [6], got [6, 4]"),
    ("ssd", {"B": (5, 4, 4)}, "B must be [T, G, n] with G dividing 6 and n = 4, got [5, 4, 4]"),
    ("ssd", {"C": (5, 2, 3)}, "C must be [T, G, n] with G dividing 6 and n = 4, got [5, 2, 3]"),
    ("ssd", {"state_pool": (3, 6, 4, 8)}, "state_pool must be [num_slots, H, P, n] with [6, 8, 4], got [3, 6, 4, 8]"),
    ("gated_delta_rule", {"query": (5, 4, 8)}, "query must be [T, Hk, D] with [2, 8], got [5, 4, 8]"),
    ("gated_delta_rule", {"value": (5, 5, 6)}, "value must have a multiple of 2 heads, got 5"),
    ("gated_delta_rule", {"decay": (5, 4, 6)}, "decay must be [T, H, D] with [4, 8], got [5, 4, 6]"),
    ("gated_delta_rule", {"decay": (5, 2)}, "decay must be [T, H] with [4], got [5, 2]"),
    ("gated_delta_rule", {"beta": (5, 2)}, "beta must be [T, H] with [4], got [5, 2]"),
    ("gated_delta_rule", {"state_pool": (3, 4, 6, 8)}, "[num_slots, H, D, Dv] with [4, 8, 6], got [3, 4, 6, 8]"),
    ("linear_recurrence", {"decay": (7,)}, "decay must be [T, C] with [7], got [7]"),
    ("linear_recurrence", {"state_pool": (3, 7, 1)}, "state_pool must be [num_slots, C] with [7], got [3, 7, 1]"),
    ("wkv", {"time_first": (5, 7)}, "time_first must be [C] with [7], got [5, 7]"),
    ("wkv", {"key": (5, 6)}, "key must be [T, C] with [7], got [5, 6]"),
    ("wkv", {"state_pool": (3, 3, 7)}, "state_pool must be [num_slots, C, 3] with [7, 3], got [3, 3, 7]"),
    ("mlstm", {"query": (5, 2, 6)}, "query must be [T, H, D] with [2, 8], got [5, 2, 6]"),
    ("mlstm", {"value": (5, 3, 6)}, "value must be [T, H, Dv] with [2, 6], got [5, 3, 6]"),
    ("mlstm", {"input_gate": (5,)}, "input_gate must be [T, H] with [2], got [5]"),
    ("mlstm", {"state_pool": (3, 2, 8, 6)}, "[num_slots, H, D + 1, Dv + 1] with [2, 9, 7], got [3, 2, 8, 6]"),
]
WRONG_DTYPES = [
    ("causal_conv1d", "state_pool", torch.bfloat16, "state_pool must be torch.float32, got torch.bfloat16"),
    ("causal_conv1d", "x", torch.int64, "x must be of a floating dtype, got torch.int64"),
    ("causal_conv1d", "bias", torch.int64, "bias must be of a floating dtype, got torch.int64"),
    ("ssd", "state_pool", torch.float16, "state_pool must be torch.float32, got torch.float16"),
    ("ssd", "dt", torch.int32, "dt must be of a floating dtype, got torch.int32"),
    ("ssd", "cu_seqlens_q", torch.int64, "cu_seqlens_q must be 1-dimensional torch.int32, got [3] torch.int64"),
    ("ssd", "context_lens", torch.int64, "context_lens must be 1-dimensional torch.int32, got [2] torch.int64"),
    ("ssd", "state_slots", torch.int32, "state_slots must be 1-dimensional torch.int64, got [2] torch.int32"),
    ("gated_delta_rule", "key", torch.float16, "key must be torch.float32, got torch.float16"),
    ("wkv", "key", torch.float16, "key must be torch.float32, got torch.float16"),
]


def traced(op: str, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]) -> Tensor:
    """The op on meta tensors of these shapes."""
    arguments = {
        name: 0.3 if size is None else torch.empty(size, dtype=dtypes.get(name, torch.float32), device="meta")
        for name, size in (META[op] | shapes).items()
    }
    metadata = {"cu_seqlens_q": (3, torch.int32), "context_lens": (2, torch.int32), "state_slots": (2, torch.int64)}
    for name, (size, dtype) in metadata.items():
        arguments[name] = torch.empty(size, dtype=dtypes.get(name, dtype), device="meta")
    options = (True,) if op == "causal_conv1d" else ()
    return getattr(state_ops, op)(*arguments.values(), *options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_result_has_the_shape_and_dtype_of_the_rows(op, dtype):
    named = {
        "causal_conv1d": ("x", "state_pool"),
        "gated_delta_rule": ("query", "key", "value"),
        "wkv": ("key", "value"),
        "mlstm": ("query", "key", "value"),
    }
    named |= {"linear_recurrence": ("update",)}
    names = named.get(op, ("x",))
    rows = next(name for name in ("x", "value", "update") if name in META[op])
    output = traced(op, {}, dict.fromkeys(names, dtype))
    assert (output.dtype, tuple(output.shape)) == (dtype, META[op][rows])


@pytest.mark.parametrize(("op", "shapes", "message"), WRONG, ids=str)
def test_wrong_shapes_are_refused_when_traced(op, shapes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        traced(op, shapes, {})


@pytest.mark.parametrize(("op", "name", "dtype", "message"), WRONG_DTYPES, ids=str)
def test_wrong_dtypes_are_refused_when_traced(op, name, dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        traced(op, {}, {name: dtype})


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_refused_and_not_lost(op):
    for name, value in finite(op).arguments.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        call = finite(op).replaced(**{name: value.clone().requires_grad_()})
        with forced_implementation("reference"):
            with pytest.raises(RuntimeError, match="no derivative"):
                getattr(state_ops, op)(*call.positional())
            with torch.no_grad():
                assert not getattr(state_ops, op)(*call.positional()).requires_grad


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_forced_implementation_runs(name, op, monkeypatch):
    """Each by another function, all with one result."""
    if name == "triton":
        pytest.importorskip("triton")
    call = finite(op)
    expected = finite(op).run(state_reference)
    with forced_implementation(name):
        try:
            output = getattr(state_ops, op)(*call.positional())
        except RuntimeError as error:
            pytest.skip(str(error))
        module = state_ops._kernel(op, name).__module__.rpartition(".")[2]
    assert module == {"reference": "state_reference", "cpu": "state_cpu", "triton": f"{op}_triton"}[name]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    with forced_implementation(name):
        torch.testing.assert_close(
            getattr(state_ops, f"varlen_{op}")(*call.varlen()), call.fresh().run(state_reference), rtol=1e-4, atol=1e-4
        )


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine on which the kernels with a state cannot be built, though those of attention can."""
    state_cpu = pytest.importorskip("selective_compile.kernels.state_cpu")
    monkeypatch.setattr(state_cpu, "available", lambda: False)
    state_ops._kernel.cache_clear()
    yield
    state_ops._kernel.cache_clear()


def test_without_a_compiler_the_reference_runs(no_compiler):
    call = finite("ssd")
    expected = finite("ssd").run(state_reference)
    assert torch.equal(state_ops.ssd(*call.positional()), expected)
