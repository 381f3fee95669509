"""A flat graph made callable: through Inductor, or as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx

from selective_compile.passes.flatten import FlatGraph


def compiled(flat: FlatGraph, *, inductor: bool) -> Callable[..., Any]:
    """A function of the flat graph's inputs that returns the tuple of its outputs."""
    if not inductor:
        return flat.module.forward
    # A context of our own: the caller may be inside Dynamo's, whose fake tensors must not meet ours.
    with tracing(TracingContext(flat.symbols.mode)), torch.no_grad():
        return compile_fx(flat.module, list(flat.example_inputs))  # type: ignore[return-value]


def compiled_as_it_came(module: fx.GraphModule, examples: Sequence[Any], *, inductor: bool) -> Callable[..., Any]:
    """Dynamo's own graph through Inductor, unchanged."""
    return compile_fx(module, list(examples)) if inductor else module.forward  # type: ignore[return-value]
