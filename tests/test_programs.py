"""What a start does beside its tracing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._dynamo.convert_frame import compile_lock

import selective_compile as sc
from selective_compile import backend, programs
from selective_compile.compiled_step import NATIVE_KERNELS
from selective_compile.kernels import ragged_attention_cpu
from selective_compile.module_state import lock_of
from selective_compile.passes import Refusal
from tests.models import tiny


@pytest.mark.parametrize(
    ("options", "built"),
    [
        ({}, NATIVE_KERNELS),
        ({"implementation": "cpu"}, NATIVE_KERNELS),
        ({"compile": False}, (ragged_attention_cpu,)),
        ({"implementation": "reference"}, ()),
        ({"implementation": "triton"}, ()),
    ],
    ids=str,
)
def test_native_kernels_are_built_beside_it_where_they_run(
    options: Any, built: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    for kernels in NATIVE_KERNELS:
        monkeypatch.setattr(kernels, "build_beside", lambda name=kernels.__name__: begun.append(name))

    def prove(*_: object, **__: object) -> None:
        assert begun == [kernels.__name__ for kernels in built]
        raise InterruptedError

    monkeypatch.setattr(programs, "prove", prove)
    with pytest.raises(InterruptedError):
        programs.compile_step_program(tiny("llama", num_hidden_layers=1), sc.EngineConfig(**options))


def test_nobody_else_traces_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch traces by is the process's: another thread's `torch.compile` failed, or got our symbols."""
    free: list[bool] = []

    def prove(*_: object, **__: object) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(compile_lock.acquire, blocking=False).result())
        raise InterruptedError

    model = tiny("llama", num_hidden_layers=1)
    for module, make in (
        (programs, lambda: programs.compile_step_program(model, sc.EngineConfig(compile=False))),
        (backend, lambda: sc.explain(model)),
    ):
        monkeypatch.setattr(module, "prove", prove)
        with pytest.raises(InterruptedError):
            make()
    assert free == [False, False]


def test_who_runs_the_model_may_trace_while_others_wait_to_prove_it() -> None:
    """A step that comes to something compiled would wait for who makes an engine, and that for the step."""
    model, config = tiny("llama", num_hidden_layers=1), sc.EngineConfig(compile=False)
    with ThreadPoolExecutor(1) as other:
        for make in (lambda: programs.compile_step_program(model, config), lambda: sc.explain(model)):
            with lock_of(model):
                made = other.submit(make)
                time.sleep(0.5)
                assert compile_lock.acquire(timeout=10)
                compile_lock.release()
                assert not made.done()
            made.result(timeout=120)


def test_what_is_no_model_is_told_as_ever() -> None:
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        programs.compile_step_program("gpt2", sc.EngineConfig())  # type: ignore[arg-type]


def test_modules_of_layers_that_are_alike_are_told_together() -> None:
    first, second = (
        Refusal(node=node, operator="aten.cummax", reason="mixes", source_line="model.py:3", module=f"layers.0.{node}")
        for node in ("mixer", "gate")
    )
    apart = {f"layers.{layer}.mixer": first for layer in range(3)} | {"layers.0.gate": second}
    lines = programs.slow_modules("Model", apart).splitlines()
    assert lines[0].startswith("4 modules of Model run for one request after another")
    assert lines[1] == "  layers.0.mixer, layers.1.mixer, layers.2.mixer: aten.cummax (mixer) in layers.0.mixer: mixes"
    assert lines[3] == "  layers.0.gate: aten.cummax (gate) in layers.0.gate: mixes" and len(lines) == 5
