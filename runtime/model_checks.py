"""Whether an engine's model and its program are what the engine takes them for."""

from __future__ import annotations

from typing import Any

from torch import nn

from selective_compile.backend import Program, StepProgram
from selective_compile.model_facts import why_no_head
from selective_compile.options import EngineConfig
from selective_compile.sequential_program import SequentialProgram


def check_compiled_for(program: Program, config: EngineConfig, model: nn.Module) -> None:
    """Refuse a program of another model, or for another window, other pools or other weights: all are in its graph."""
    if not hasattr(program, "call_sites"):
        raise ValueError(f"program must be one of compile_step_program(model, config), got {program!r}")
    if isinstance(program, (StepProgram, SequentialProgram)) and not program.serves(model):
        raise ValueError(f"program must be that of the model, got one of another {type(model).__name__}")
    if isinstance(program, StepProgram):
        for name in ("max_attention_window", "kv_dtype", "latents", "weights", "join_weights"):
            wanted, got = getattr(program.config, name), getattr(config, name)
            if wanted != got:
                raise ValueError(f"{name} must be that which the program was compiled for, {wanted!r}, got {got!r}")
    elif isinstance(program, SequentialProgram):
        for name, wanted in (("kv_dtype", "auto"), ("weights", "model")):
            if (got := getattr(config, name)) != wanted:
                raise ValueError(
                    f"{name} must be {wanted!r} for a program that runs one request after another, got {got!r}"
                )


def check_head(model: Any) -> None:
    """Refuse what transformers makes without one, as `AutoModel` does: hidden states would be taken for logits."""
    if reason := why_no_head(model):
        raise ValueError(reason)


def check_dtype(model: nn.Module, config: EngineConfig) -> None:
    if config.dtype is not None:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if dtypes != {config.dtype}:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise ValueError(f"dtype must be that of the model's weights ({found}), got {config.dtype}")
