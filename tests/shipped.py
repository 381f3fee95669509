"""The model that ships and its program, proved once for all the tests of a process: none of them changes it."""

from __future__ import annotations

import functools
from typing import Any

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.backend import Program, compile_step_program


@functools.cache
def shipped(attention: str | None = None) -> tuple[Any, Any, Program]:
    """The model, its tokenizer and its program without Inductor; ``attention``: ``"eager"``, or None: the model's own.

    The program fits engines of any sizes.
    """
    model, tokenizer = tiny_model.load()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model, tokenizer, compile_step_program(model, sc.EngineConfig(compile=False))
