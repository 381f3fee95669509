"""The ops as PyTorch sees them: schemas, fakes, functionalisation, and the choice of implementation."""

from __future__ import annotations

import contextvars
import logging
import re
import threading

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from selective_compile import implementations, ops, reference
from selective_compile.implementations import forced_implementation, implementation_on
from tests.kernels.ragged_cases import CASES, Case, make_inputs

NAMES = ("prefill", "decode", "mixed", "no_request", "window_and_softcap", "chunk_and_window", "sinks", "everything")
SELECTED = [case for case in CASES if case.name in NAMES]
STEP = Case(name="step", requests=((3, 5), (1, 20), (0, 0)), padding_rows=1)
FEATURES = Case(name="features", requests=STEP.requests, padding_rows=1, chunk=4, sinks=0.0, slopes=True)


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine on which the native CPU kernels cannot be built."""
    monkeypatch.setattr(implementations, "native_cpu_available", lambda: False)
    implementations.resolved_name.cache_clear()
    ops._kernel.cache_clear()
    yield
    implementations.resolved_name.cache_clear()
    ops._kernel.cache_clear()


def finite(case: Case):
    """opcheck compares tensors without equal_nan."""
    inputs = make_inputs(case, torch.float32)
    for tensor in (inputs.key, inputs.value, inputs.query, inputs.key_pool, inputs.value_pool):
        tensor.nan_to_num_()
    return inputs


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_opcheck(case):
    with forced_implementation("reference"):
        opcheck(ops.ragged_attention, finite(case).ragged())
        opcheck(ops.ragged_attention, finite(case).with_int8_pools().ragged())
        # The others compare tensors by operators that torch does not have for e4m3.
        opcheck(ops.ragged_attention, finite(case).with_fp8_pools().ragged(), test_utils="test_faketensor")
        opcheck(ops.varlen_attention, finite(case).varlen())


def test_the_schema_declares_what_is_changed_in_place():
    schema = torch.ops.selective.ragged_attention.default._schema
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert written == ["key_pool", "value_pool"]
    assert not torch.ops.selective.varlen_attention.default._schema.is_mutable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_and_reference_agree_on_shape_strides_and_dtype(dtype):
    inputs = make_inputs(next(case for case in CASES if case.name == "wide_values"), dtype)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in inputs.ragged()]
        fake = ops.ragged_attention(*fakes)
    real = reference.ragged_attention(*inputs.ragged())
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (5, 3, 16)}, "query must have a multiple of 2 heads, got 3"),
        ({"key": (5, 2, 8)}, "key must have head size 16"),
        ({"value": (5, 1, 16)}, "value must have 2 heads"),
        ({"query": (1, 5, 4, 16)}, "query must be"),
        ({"key_pool": (4, 16, 2, 16)}, "key_pool must be"),
        ({"value_pool": (4, 2, 16, 8)}, "value_pool must be"),
    ],
    ids=str,
)
def test_wrong_shapes_are_refused_when_traced(change, message):
    shapes = {"query": (5, 4, 16), "key": (5, 2, 16), "value": (5, 2, 16)}
    shapes |= {"key_pool": (4, 2, 16, 16), "value_pool": (4, 2, 16, 16)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in (shapes | change).items()}
    metadata = [torch.empty(2, dtype=torch.int32, device="meta") for _ in range(4)]
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.ragged_attention(*tensors.values(), *metadata, 1.0, 0, 0.0)


def test_a_pool_of_another_dtype_is_refused_when_traced():
    rows = [torch.empty(5, heads, 16, device="meta") for heads in (4, 2, 2)]
    pool = torch.empty(4, 2, 16, 16, device="meta", dtype=torch.bfloat16)
    metadata = [torch.empty(2, dtype=torch.int32, device="meta") for _ in range(4)]
    with pytest.raises(ValueError, match=r"key_pool must be torch\.float32, got torch\.bfloat16"):
        ops.ragged_attention(*rows, pool, pool, *metadata, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("sinks", "slopes", "message"),
    [
        (torch.empty(3), None, "sinks must be [4] or [T, 4], got [3]"),
        (torch.empty(5, 4, 1), None, "sinks must be [4] or [T, 4], got [5, 4, 1]"),
        (torch.empty(4, dtype=torch.int32), None, "sinks must be of a floating dtype, got torch.int32"),
        (None, torch.empty(2), "slopes must be [4], got [2]"),
        (None, torch.empty(4, dtype=torch.bfloat16), "slopes must be torch.float32, got torch.bfloat16"),
    ],
    ids=("too_few", "three_dimensions", "integers", "one_per_group", "half_precision"),
)
def test_wrong_sinks_and_slopes_are_refused_when_traced(sinks, slopes, message):
    rows = [torch.empty(5, heads, 16, device="meta") for heads in (4, 2, 2)]
    bounds = torch.empty(2, dtype=torch.int32, device="meta")
    sinks, slopes = (None if tensor is None else tensor.to("meta") for tensor in (sinks, slopes))
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.varlen_attention(*rows, bounds, 1.0, 0, 0.0, 0, sinks, slopes)


def two_layers(query, key, value, pools, cu_seqlens_q, context_lens, block_table, slot_mapping, sinks, slopes):
    metadata = (cu_seqlens_q, context_lens, block_table, slot_mapping)
    hidden = ops.ragged_attention(query * 2, key + 1, value, *pools[0], *metadata, 0.3, 0, 0.0)
    features = (0.3, 4, 0.0, 8, sinks, slopes)
    return ops.ragged_attention(hidden + 1, key, value * 3, *pools[1], *metadata, *features) + hidden


def two_layers_arguments(case: Case, seed: int):
    """Arguments with four finite pools; the dimensions that change from step to step are marked dynamic."""
    inputs = finite(case)
    generator = torch.Generator().manual_seed(seed)
    pools = [torch.randn(2, 40, 2, 16, 16, generator=generator).unbind() for _ in range(2)]
    pools = [tuple(pool.clone() for pool in pair) for pair in pools]
    arguments = [inputs.query, inputs.key, inputs.value, inputs.cu_seqlens_q, inputs.context_lens]
    arguments += [inputs.block_table, inputs.slot_mapping]
    for tensor in arguments:
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(inputs.block_table, 1)
    per_head = torch.randn(2, 4, generator=generator).unbind()
    return (*arguments[:3], pools, *arguments[3:], *per_head)


def test_compiled_graph_writes_the_pools_in_place_without_copying_them():
    """Functionalisation makes the op pure; if Inductor did not undo that, each call would copy the pools."""
    torch._dynamo.reset()
    with torch.no_grad(), forced_implementation("reference"):
        expected_arguments = two_layers_arguments(STEP, seed=0)
        expected = two_layers(*expected_arguments)
        arguments = two_layers_arguments(STEP, seed=0)
        addresses = [pool.data_ptr() for pair in arguments[3] for pool in pair]
        result, (code,) = run_and_get_code(torch.compile(two_layers, fullgraph=True), *arguments)
    torch.testing.assert_close(result, expected)
    for pair, expected_pair, before in zip(arguments[3], expected_arguments[3], (0, 1), strict=True):
        fresh = two_layers_arguments(STEP, seed=0)[3][before]
        for pool, expected_pool, untouched in zip(pair, expected_pair, fresh, strict=True):
            torch.testing.assert_close(pool, expected_pool)
            assert not torch.equal(pool, untouched)
    assert [pool.data_ptr() for pair in arguments[3] for pool in pair] == addresses
    assert code.count("torch.ops.selective.ragged_attention.default(") == 2
    # Only a pool has a first dimension of 40: no buffer like it is allocated, and nothing is copied back.
    assert "(40, 2, 16, 16)" in code, "the next line means nothing when the size is not spelt out"
    assert not re.search(r"= empty_strided\w*\(\(40,", code)
    assert not re.search(r"\b(clone|copy_)\b", code)


def test_one_graph_serves_every_number_of_tokens_and_requests():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(two_layers, fullgraph=True, backend=counter)
    steps = ((3, 5), (1, 20)), ((2, 0), (4, 1), (1, 60)), ((30, 2), (0, 0), (1, 1), (5, 5))
    with torch.no_grad(), forced_implementation("reference"):
        for seed, requests in enumerate(steps):
            case = Case(name="step", requests=requests, padding_rows=seed)
            expected_arguments = two_layers_arguments(case, seed)
            result = compiled(*two_layers_arguments(case, seed))
            torch.testing.assert_close(result, two_layers(*expected_arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", [STEP, FEATURES], ids=str)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_forced_implementation_runs(name, case):
    if name == "triton":
        pytest.importorskip("triton")
    inputs = make_inputs(case, torch.float32)
    expected = reference.ragged_attention(*inputs.to(torch.float32).ragged())
    with forced_implementation(name):
        assert implementation_on("cpu") == name
        torch.testing.assert_close(ops.ragged_attention(*inputs.ragged()), expected, rtol=1e-4, atol=1e-5)


def test_forcing_nests_and_ends():
    before = implementation_on("cuda")
    with forced_implementation("reference"):
        with forced_implementation("triton"):
            assert implementation_on("cuda") == "triton"
        assert implementation_on("cuda") == "reference"
        with forced_implementation("auto"):
            assert implementation_on("cuda") == before
    assert implementation_on("cuda") == before == "triton"


def test_forcing_holds_for_one_thread_and_travels_with_a_copied_context():
    seen = []
    with forced_implementation("reference"):
        copied = contextvars.copy_context()
        for run in (lambda task: task(), copied.run):
            thread = threading.Thread(target=run, args=(lambda: seen.append(implementation_on("cuda")),))
            thread.start()
            thread.join()
    assert seen == ["triton", "reference"]


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="must be one of auto, reference, cpu, triton, got 'cuda'"):
        with forced_implementation("cuda"):
            pass


def test_impossible_combinations_are_refused():
    with (
        forced_implementation("cpu"),
        pytest.raises(ValueError, match="must be auto, reference or triton"),
    ):
        implementation_on("cuda")
    with pytest.raises(ValueError, match="must be cpu or cuda, got mps"):
        implementation_on("mps")


def test_without_a_compiler_the_reference_runs_and_one_warning_is_logged(no_compiler, caplog):
    inputs = make_inputs(STEP, torch.float32)
    expected = reference.ragged_attention(*inputs.to(torch.float32).ragged())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(ops.ragged_attention(*inputs.to(torch.float32).ragged()), expected)
            ops.varlen_attention(*inputs.varlen())
    assert implementation_on("cpu") == "reference"
    assert [record.message for record in caplog.records] == [
        "no native CPU kernel can be built here: attention runs in the slow eager reference"
    ]


def test_without_a_compiler_the_native_kernel_cannot_be_forced(no_compiler):
    with forced_implementation("cpu"), pytest.raises(RuntimeError, match="cannot be built here"):
        ops.ragged_attention(*make_inputs(STEP, torch.float32).ragged())


def test_with_a_compiler_the_native_kernel_is_the_default_on_the_cpu():
    cpu = pytest.importorskip("selective_compile.kernels.ragged_attention_cpu")
    if not cpu.available():
        pytest.skip("no C++ compiler")
    assert implementation_on("cpu") == "cpu"


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks", "slopes"])
def test_gradients_are_refused_and_not_lost(name):
    inputs = make_inputs(FEATURES, torch.float32)
    getattr(inputs, name).requires_grad_()
    with forced_implementation("reference"):
        for op, arguments in (
            (ops.ragged_attention, inputs.ragged()),
            (ops.varlen_attention, inputs.varlen()),
        ):
            with pytest.raises(RuntimeError, match="no derivative"):
                op(*arguments)
            with torch.no_grad():
                assert not op(*arguments).requires_grad
