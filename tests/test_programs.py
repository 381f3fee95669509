"""What a start does beside its tracing."""

from __future__ import annotations

from typing import Any

import pytest

import selective_compile as sc
from selective_compile import programs
from selective_compile.compiled_step import NATIVE_KERNELS
from selective_compile.kernels import ragged_attention_cpu
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


def test_what_is_no_model_is_told_as_ever() -> None:
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        programs.compile_step_program("gpt2", sc.EngineConfig())  # type: ignore[arg-type]
