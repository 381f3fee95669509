"""The Triton kernels of the ops with a state: in Triton's interpreter, and compiled for four targets without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from tests.kernels.state_cases import CASES, MIXED, OPS, SIZES, Call, StateCase, exact, make_call

triton = pytest.importorskip("triton")
shared = pytest.importorskip("selective_compile.kernels.state_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
LAUNCHERS = {op: importlib.import_module(f"selective_compile.kernels.{op}_triton") for op in OPS}
compiling = pytest.mark.skipif(
    not isinstance(LAUNCHERS["ssd"]._kernel, triton.JITFunction),
    reason="TRITON_INTERPRET is set: kernels cannot be compiled",
)

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# The interpreter takes a millisecond for a row of a block: shorter requests, but two tiles of the convolution.
SHORTER = ((1, 30), (3, 9), (0, 12), (1, 0), (18, 0), (0, 0))
SHORT = [dataclasses.replace(case, requests=SHORTER) if case.requests == MIXED else case for case in CASES]
RUNS = [(case, torch.float32) for case in SHORT if case.name != "strided"]
RUNS += [(case, dtype) for case in SHORT if case.name == "plain" for dtype in (torch.bfloat16, torch.float16)]
KEPT = ("plain", "decode", "no_request")


@pytest.fixture
def nan_filled_outputs(monkeypatch):
    """What a launcher allocates holds NaN, so that an element the kernel leaves out shows."""
    new_empty = torch.Tensor.new_empty

    def filled(self, *size, **options):
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def check(call: Call, device: str = "cpu") -> None:
    expected, pool = exact(call)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.arguments.items()
    }
    there = call.replaced(**arguments)
    output = there.run(LAUNCHERS[call.op]).cpu()
    assert output.shape == expected.shape
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    if pool is None:
        return
    # Slots that nobody writes hold what they held, NaN among it.
    bound = 0 if call.op == "causal_conv1d" else 3e-5
    torch.testing.assert_close(there.pool.cpu().double(), pool, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_a_step(case, dtype, nan_filled_outputs):
    check(make_call(case, dtype))


@pytest.mark.parametrize("case", [case for case in SHORT if case.name in KEPT], ids=str)
def test_a_step_without_a_pool(case, nan_filled_outputs):
    check(make_call(case, torch.float32).fresh())


@pytest.mark.parametrize("op", OPS)
def test_a_pool_may_be_part_of_a_larger_buffer_and_rows_of_any_layout(op):
    call = make_call(StateCase(op=op, name="", sizes=SIZES[op][0], requests=SHORTER), torch.float32)
    buffer = torch.full((len(call.pool), 3, *call.pool.shape[1:]), 7.0)
    buffer[:, 1] = call.pool
    turned = {
        name: value.mT.contiguous().mT
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor) and value.dim() > 1 and name != "state_pool"
    }
    check(call.replaced(state_pool=buffer[:, 1], **turned))
    assert buffer[:, [0, 2]].eq(7.0).all()


class Recorder:
    """Stands in for a kernel: what `launch(kernel, grid, args, options)` returns is appended to `seen`."""

    def __init__(self, launch):
        self.seen, self.launch = [], launch

    def __call__(self, kernel, tensor):
        self.kernel = kernel
        return self

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(self.launch(self.kernel, grid, args, options))


@pytest.mark.parametrize("op", OPS)
def test_the_grid_does_not_depend_on_lengths(op, monkeypatch):
    recorder = Recorder(lambda kernel, grid, args, options: grid)
    monkeypatch.setattr(shared, "on_device", recorder)
    for requests in (((40, 0), (1, 3), (1, 90)), ((1, 0), (1, 3), (40, 9))):
        make_call(StateCase(op=op, name="", sizes=SIZES[op][0], requests=requests), torch.float32).run(LAUNCHERS[op])
    launches = len(recorder.seen) // 2
    assert launches == (2 if op == "mlstm" else 1)
    assert recorder.seen[:launches] == recorder.seen[launches:]


@compiling
@pytest.mark.parametrize("op", OPS)
def test_steps_of_every_shape_share_the_compiled_kernels(op, monkeypatch):
    """T, N and the alignment of the metadata may not cause a recompile."""
    monkeypatch.setattr(triton.runtime.driver, "_active", ahead.NoDevice())
    recorder = Recorder(lambda kernel, grid, args, rest: kernel.warmup(*args, grid=grid, **rest).hash)
    monkeypatch.setattr(shared, "on_device", recorder)
    shapes = (((3, 5), (1, 20)), ((64, 0),), ((16, 0),) * 16, ((1, 0),) * 16, ((1, 0),), ((1, 97), (0, 0), (8, 300)))
    for requests in shapes:
        case = StateCase(op=op, name="", sizes=SIZES[op][1], requests=requests, padding_rows=0)
        call = make_call(case, torch.bfloat16)
        call.run(LAUNCHERS[op])
        metadata = {name: call.arguments[name] for name in ("cu_seqlens_q", "context_lens", "state_slots")}
        shifted = {name: torch.cat([tensor[:1], tensor])[1:] for name, tensor in metadata.items()}
        call.replaced(**shifted).run(LAUNCHERS[op])
    # The convolution has a kernel for decode beside the one for any step, mlstm one for its normaliser.
    assert len(set(recorder.seen)) == (2 if op in ("causal_conv1d", "mlstm") else 1)


@pytest.fixture(autouse=True)
def triton_cache(tmp_path_factory, monkeypatch):
    """Of the test alone: whatever is compiled is compiled by it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def launches(call: Call, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launcher runs: kernels, arguments, options."""
    recorder = Recorder(lambda kernel, grid, args, options: (kernel, args, options))
    with monkeypatch.context() as patch:
        patch.setattr(shared, "on_device", recorder)
        call.run(LAUNCHERS[call.op])
    return recorder.seen


def compile_launch(kernel: Any, args: tuple[Any, ...], options: dict[str, int], target: Any) -> Any:
    by_name = dict(zip((parameter.name for parameter in kernel.params), args, strict=True))
    constants = {
        parameter.name: by_name[parameter.name]
        for parameter in kernel.params
        if parameter.is_constexpr or by_name[parameter.name] is None
    }
    elements = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    elements |= {torch.int32: "i32", torch.int64: "i64"}
    types = {
        name: "*" + elements[value.dtype]
        for name, value in by_name.items()
        if isinstance(value, torch.Tensor) and name not in constants
    }
    return ahead.compile_ahead(kernel, target, types, constants, num_warps=options["num_warps"])


DECODE, PREFILL = ((1, 9),) * 4, ((9, 9),)
# As in Mamba-2, falcon_mamba, Qwen3-Next, Kimi Linear, RecurrentGemma, RWKV and xLSTM, with fewer heads or channels.
SHIPPED = {
    "conv_decode": StateCase(op="causal_conv1d", name="", sizes=(512, 4), requests=DECODE),
    "conv_prefill": StateCase(op="causal_conv1d", name="", sizes=(512, 4), requests=PREFILL),
    "scan": StateCase(op="selective_scan", name="", sizes=(256, 0, 16), requests=DECODE),
    "ssd": StateCase(op="ssd", name="", sizes=(8, 1, 64, 128), requests=DECODE),
    "delta": StateCase(op="gated_delta_rule", name="", sizes=(2, 4, 128, 128, 0), requests=DECODE),
    "delta_per_channel": StateCase(op="gated_delta_rule", name="", sizes=(2, 2, 128, 128, 1), requests=DECODE),
    "linear_recurrence": StateCase(op="linear_recurrence", name="", sizes=(512,), requests=DECODE),
    "wkv": StateCase(op="wkv", name="", sizes=(512,), requests=DECODE),
    "mlstm": StateCase(op="mlstm", name="", sizes=(2, 256, 512), requests=DECODE),
}


@compiling
@pytest.mark.parametrize("shipped", SHIPPED)
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_kernels_compile_ahead_of_time_without_spills(target, shipped, tmp_path, monkeypatch):
    for launch in launches(make_call(SHIPPED[shipped], torch.bfloat16), monkeypatch):
        ahead.assert_ships(compile_launch(*launch, target), tmp_path)


WIDE = {
    "scan_of_64": StateCase(op="selective_scan", name="", sizes=(256, 2, 64), requests=DECODE),
    "ssd_of_256": StateCase(op="ssd", name="", sizes=(8, 1, 128, 256), requests=DECODE),
    "delta_of_256": StateCase(op="gated_delta_rule", name="", sizes=(2, 2, 256, 256, 1), requests=DECODE),
}


@compiling
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("target", (ahead.TARGETS[0], ahead.TARGETS[-1]), ids=str)
def test_wide_states_compile_without_a_pool_and_without_spills(target, wide, tmp_path, monkeypatch):
    for launch in launches(make_call(WIDE[wide], torch.float32).fresh(), monkeypatch):
        ahead.assert_ships(compile_launch(*launch, target), tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_on_a_gpu(case, dtype, nan_filled_outputs):
    check(make_call(case, dtype), "cuda")
