"""The native CPU kernel against the exact result, for every layout, dtype, instruction set and number of threads."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile.kernels import native
from selective_compile.kernels import ragged_attention_cpu as launcher
from tests.kernels.instruction_sets import ARCHITECTURES, built_for, runs
from tests.kernels.ragged_cases import (
    CASES,
    COMBINATIONS,
    WITH_PREFIX,
    Case,
    Inputs,
    cases,
    exact_ragged,
    exact_varlen,
    make_inputs,
)

pytestmark = pytest.mark.skipif(not launcher.available(), reason=str(launcher.unavailable_reason()))

# bfloat16 and float16: half a unit in the last place of results up to 4, and the rounding of a weight.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# What the shared cases do not reach in this kernel: many tiles, splits over keys and their merging, every remainder.
LARGER = (
    Case(name="long_decode", requests=((1, 4999), (1, 1023), (1, 511), (1, 512)), key_size=64, value_size=64),
    Case(name="long_decode_windowed", requests=((1, 4999), (2, 1300)), window=1100, softcap=20.0),
    Case(name="long_decode_of_15", requests=((5, 1400),), query_heads=6, kv_heads=2, key_size=32, value_size=80),
    Case(name="long_chunk", requests=((9, 2600), (70, 1910)), key_size=32, value_size=48, block_size=32),
    Case(name="long_chunk_windowed", requests=((40, 4100),), window=2100, key_size=32, value_size=32),
    Case(name="many_tiles", requests=((301, 17), (97, 0)), query_heads=6, kv_heads=2, padding_rows=5),
    Case(name="group_of_71", requests=((1, 120), (3, 90)), query_heads=71, kv_heads=1, key_size=64, value_size=64),
    Case(name="few_of_every_count", requests=tuple((rows, 40) for rows in range(1, 9)), key_size=64, value_size=72),
    Case(name="odd_sizes", requests=((1, 50), (33, 5), (4, 9)), key_size=17, value_size=9),
    Case(name="head_size_256", requests=((1, 50), (33, 60)), key_size=256, value_size=256, scale=0.06),
    Case(name="long_decode_chunked", requests=((1, 4999), (2, 1300), (1, 1023)), chunk=1024, softcap=20.0),
    Case(name="long_decode_with_sinks", requests=((1, 2999), (3, 1300)), sinks=5.0, query_heads=10),
    Case(name="long_decode_with_slopes", requests=((1, 2999), (3, 1300)), slopes=True, query_heads=10),
    Case(name="long_chunk_of_everything", requests=((40, 4100),), chunk=4096, window=2100, sinks=3.0, slopes=True),
    Case(name="long_prefix", requests=((9, 1600), (1, 990), (700, 0)), prefix=2000, key_size=32, value_size=32),
    Case(name="many_tiles_with_a_prefix", requests=((301, 17), (97, 0)), query_heads=6, prefix=130, slopes=True),
    Case(name="many_tiles_chunked", requests=((301, 17), (97, 0)), query_heads=6, chunk=50, slopes=True, sinks=0.0),
    Case(
        name="group_of_71_with_sinks", requests=((1, 120), (3, 90)), query_heads=71, kv_heads=1, sinks=0.0, slopes=True
    ),
)
RUNS = [(case, dtype) for case in (*CASES, *LARGER, *WITH_PREFIX) for dtype in TOLERANCE]
KV_DTYPES = ("auto", "int8")


@pytest.fixture(params=(1, 2), ids=("one_thread", "two_threads"))
def threads(request):
    with running_on(request.param):
        yield request.param


@contextlib.contextmanager
def running_on(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def other_kernels(tmp_path_factory):
    """Of each instruction set that this processor has besides its own, by name."""
    cache = tmp_path_factory.mktemp("kernels")
    built = {each: built_for(each, launcher.__file__, cache) for each in ARCHITECTURES if runs(each)}
    return {architecture: library.selective_attention for architecture, library in built.items()}


@pytest.fixture
def nan_filled_outputs(monkeypatch):
    """What the launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: new_empty(self, *size).fill_(torch.nan))


def check_ragged(inputs: Inputs) -> None:
    compare_ragged(inputs, exact_ragged(inputs))


def compare_ragged(inputs: Inputs, exact: tuple[Tensor, Tensor, Tensor], how: str = "as it comes") -> None:
    """With what `exact_ragged` gives for the step; the step's pools stay as they are."""
    expected, *pools = exact
    own = dataclasses.replace(inputs, key_pool=inputs.key_pool.clone(), value_pool=inputs.value_pool.clone())
    output = launcher.ragged_attention(*own.ragged())
    assert (output.dtype, output.shape) == (inputs.query.dtype, expected.shape), how
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[output.dtype], msg=told(how))
    # Exactly: written slots are copies, all others (NaN among them) are as before.
    for pool, wanted in zip((own.key_pool, own.value_pool), pools, strict=True):
        torch.testing.assert_close(pool.double(), wanted.double(), rtol=0, atol=0, equal_nan=True, msg=told(how))


def told(how: str) -> Callable[[str], str]:
    return lambda message: f"{how}: {message}"


def step(case: Case, dtype: torch.dtype, kv_dtype: str, seed: int = 0) -> Inputs:
    inputs = make_inputs(case, dtype, seed)
    return inputs.with_int8_pools() if kv_dtype == "int8" else inputs


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_ragged_attention(case, dtype, kv_dtype, nan_filled_outputs, other_kernels, monkeypatch):
    """On one thread and two, and as built for every instruction set that is there."""
    inputs = step(case, dtype, kv_dtype)
    exact = exact_ragged(inputs)
    for threads in (1, 2):
        with running_on(threads):
            compare_ragged(inputs, exact, f"on {threads} threads")
    for architecture, function in other_kernels.items():
        monkeypatch.setitem(launcher._functions._functions, "selective_attention", function)
        compare_ragged(inputs, exact, architecture)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_varlen_attention(case, dtype, threads, nan_filled_outputs):
    inputs = make_inputs(case, dtype)
    output = launcher.varlen_attention(*inputs.varlen())
    torch.testing.assert_close(output.double(), exact_varlen(inputs), rtol=0, atol=TOLERANCE[dtype])


def test_a_matrix_unit_is_used_where_there_is_one(matrix_unit, monkeypatch):
    """By the last bits of many sums: nothing else would tell that the system has refused it."""
    rows, generator = 300, torch.Generator().manual_seed(0)
    step = [torch.randn(rows, 4, 64, generator=generator).bfloat16() for _ in range(3)]
    arguments = (*step, torch.tensor([0, rows], dtype=torch.int32), 0.125, 0, 0.0)
    found = launcher.varlen_attention(*arguments)
    monkeypatch.setattr(native, "MATRIX_UNIT", False)
    assert torch.equal(found, launcher.varlen_attention(*arguments)) is not matrix_unit


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_combination_of_features(dtype, nan_filled_outputs):
    for case in COMBINATIONS:
        inputs = make_inputs(case, dtype)
        check_ragged(inputs.with_int8_pools())
        check_ragged(inputs)
        output = launcher.varlen_attention(*inputs.varlen())
        torch.testing.assert_close(output.double(), exact_varlen(inputs), rtol=0, atol=TOLERANCE[dtype], msg=case.name)


@settings(max_examples=100, deadline=None)
@given(
    case=cases(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 9),
)
def test_any_step(case, dtype, kv_dtype, seed):
    check_ragged(step(case, dtype, kv_dtype, seed))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_sinks_of_every_dtype_and_strides(dtype):
    inputs = make_inputs(Case(name="", requests=((1, 40), (20, 5)), sinks=1.0, slopes=True), torch.float32)
    sinks = torch.stack([inputs.sinks.to(dtype), torch.full((4,), torch.nan, dtype=dtype)], dim=1)[:, 0]
    slopes = torch.stack([inputs.slopes, torch.full((4,), torch.nan)], dim=1)[:, 0]
    check_ragged(dataclasses.replace(inputs, sinks=sinks, slopes=slopes))


@pytest.mark.parametrize("requests", (((1, 40), (1, 1300)), ((20, 5), (9, 2000))), ids=("few", "tile"))
def test_a_sink_without_weight_changes_nothing(requests):
    inputs = make_inputs(Case(name="", requests=requests), torch.float32)
    with_sinks = dataclasses.replace(inputs, sinks=torch.full((4,), -torch.inf))
    expected = launcher.ragged_attention(*inputs.ragged())
    assert torch.equal(launcher.ragged_attention(*with_sinks.ragged()), expected)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_do_not_depend_on_threads_or_on_the_batch(dtype, kv_dtype):
    case = next(case for case in LARGER if case.name == "long_chunk")
    inputs = step(dataclasses.replace(case, requests=(*case.requests, (1, 700), (1, 1500))), dtype, kv_dtype)
    whole = launcher.ragged_attention(*inputs.ragged())
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    assert torch.equal(launcher.ragged_attention(*inputs.ragged()), whole)
    torch.set_num_threads(before)
    bounds = inputs.cu_seqlens_q.tolist()
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows, one = slice(begin, end), slice(n, n + 1)
        alone = dataclasses.replace(
            inputs,
            query=inputs.query[rows],
            key=inputs.key[rows],
            value=inputs.value[rows],
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=inputs.context_lens[one],
            block_table=inputs.block_table[one],
            slot_mapping=inputs.slot_mapping[rows],
        )
        assert torch.equal(launcher.ragged_attention(*alone.ragged()), whole[rows])


def test_calls_from_several_threads_at_once():
    steps = [make_inputs(case, torch.float32, seed) for case in (CASES[3], LARGER[0], LARGER[5]) for seed in range(4)]
    expected = [launcher.ragged_attention(*step.ragged()) for step in steps]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda step: launcher.ragged_attention(*step.ragged()), steps * 3))
    for output, exact in zip(outputs, expected * 3, strict=True):
        assert torch.equal(output, exact)


@pytest.mark.parametrize("rows", (1, 40), ids=("few", "tile"))
def test_a_nan_in_the_query_stays_in_its_row(rows):
    inputs = make_inputs(Case(name="", requests=((rows, 20), (rows, 30))), torch.float32)
    inputs.query[0, 1, 3] = torch.nan
    output = launcher.ragged_attention(*inputs.ragged())
    hit = torch.zeros(output.shape, dtype=torch.bool)
    hit[0, 1] = True
    assert torch.equal(output.isnan(), hit)


@pytest.mark.parametrize("softcap", (0.3, 5.0, 50.0))
def test_softcap_is_accurate_at_every_size_of_score(softcap):
    case = Case(name="", requests=((1, 999), (40, 960)), softcap=softcap, key_size=8)
    for scale in (1e-4, 0.3, 30.0):
        inputs = make_inputs(dataclasses.replace(case, scale=scale * softcap), torch.float32)
        output = launcher.ragged_attention(*inputs.ragged())
        torch.testing.assert_close(output.double(), exact_ragged(inputs)[0], rtol=0, atol=5e-6 * max(1, softcap / 5))


def test_half_precision_output_rounds_to_nearest():
    # One key: the result is the value, whatever it is; every finite number and the infinities must come back. The
    # product of bfloat16 that machines have takes numbers below 2^-126 for zero.
    for dtype, smallest, largest in ((torch.bfloat16, 0x80, 0x7F80), (torch.float16, 0, 0x7C00)):
        bits = torch.arange(smallest, largest + 1).to(torch.int16)
        bits = torch.cat([bits, bits.new_zeros(-len(bits) % 16)])
        value = torch.cat([bits, bits - 0x8000]).view(dtype).reshape(-1, 1, 16)
        query = torch.zeros(len(value), 1, 16, dtype=dtype)
        cu_seqlens_q = torch.arange(len(value) + 1, dtype=torch.int32)
        output = launcher.varlen_attention(query, query, value, cu_seqlens_q, 1.0, 0, 0.0)
        assert torch.equal(output.view(torch.int16) & 0x7FFF, value.view(torch.int16) & 0x7FFF)
        assert torch.equal(output, value)


def bad_arguments():
    good = make_inputs(CASES[3], torch.float32)
    last = int(good.context_lens[0] - 1) // 16
    table, far = good.block_table.clone(), good.slot_mapping.clone()
    table[0, last] = good.key_pool.shape[0]
    far[0] = good.key_pool.shape[0] * 16
    return {
        "query must be float32, bfloat16 or float16, got torch.float64": {"query": good.query.double()},
        "key and value must be torch.float32, got torch.bfloat16": {"key": good.key.bfloat16()},
        "pools must be torch.float32, or torch.int8 both of them, got torch.float16": {
            "key_pool": good.key_pool.half()
        },
        "pools must be [num_blocks, K, block_size, D]": {"value_pool": good.value_pool[..., :8]},
        "dimension of query, key and value must be contiguous": {"query": good.query.mT.contiguous().mT},
        "dimension of the pools must be contiguous": {"key_pool": good.key_pool.mT.contiguous().mT},
        "query, key, value must be [T, H, D]": {"value": good.value[1:]},
        "slot mapping int64": {"slot_mapping": good.slot_mapping.int()},
        "must be contiguous and int32": {"context_lens": good.context_lens.long()},
        "must have N + 1, N, N and T entries": {"context_lens": good.context_lens[1:]},
        "cu_seqlens_q must start at 0": {"cu_seqlens_q": good.cu_seqlens_q + 4},
        "context_lens must be at least the request's rows": {"context_lens": good.context_lens - 30},
        "at most max_blocks": {"context_lens": good.context_lens + 500},
        "block_table must name blocks of the pool": {"block_table": table},
        "slot_mapping must name slots of the pool": {"slot_mapping": far},
        "sinks must be [4] or [69, 4] of a floating dtype, got [3] torch.float32": {"sinks": torch.zeros(3)},
        "sinks must be [4] or [69, 4] of a floating dtype, got [4] torch.int64": {"sinks": torch.zeros(4).long()},
        "slopes must be [4] of a floating dtype, got [4, 1] torch.float32": {"slopes": torch.zeros(4, 1)},
    }


@pytest.mark.parametrize("message", bad_arguments())
def test_bad_arguments_are_refused_and_nothing_is_written(message):
    inputs = dataclasses.replace(make_inputs(CASES[3], torch.float32), **bad_arguments()[message])
    pools = inputs.key_pool.clone(), inputs.value_pool.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        launcher.ragged_attention(*inputs.ragged())
    for pool, before in zip((inputs.key_pool, inputs.value_pool), pools, strict=True):
        torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


def test_varlen_refuses_rows_outside_the_tensors():
    inputs = make_inputs(CASES[0], torch.float32)
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0"):
        launcher.varlen_attention(*dataclasses.replace(inputs, cu_seqlens_q=inputs.cu_seqlens_q * 2).varlen())


def test_the_launchers_have_no_loop():
    # Their time must not grow with the tokens, requests or blocks of a step.
    for function in (launcher.ragged_attention, launcher.varlen_attention, launcher._launch):
        assert not re.search(r"^ +(for|while)\b", inspect.getsource(function), re.MULTILINE)
