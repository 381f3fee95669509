"""The custom operators that stand for a module that runs by itself, request after request.

    selective::isolated       in a traced graph over [1, S]: the module called with these tensors; run in trials alone
    selective::isolated_rows  in a flat graph over [1, T]: the module run for each request on the request's own rows

What runs is chosen around the call of the graph, by a program through `running` and by a trial through
`running_whole`: the operators know no model.

    values    tensors; those over tokens have them in one dimension, of S or T
    outputs   one (dtype name, sizes) for each result as a Python literal, where the size "S" is that of the tokens
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

TOKENS = "S"
Run = Callable[[int, list[Tensor]], list[Tensor]]
RunWhole = Callable[[str, Any, list[Tensor]], list[Tensor]]
OutputSizes = list[tuple[str, list[int | str]]]

_running: ContextVar[Run] = ContextVar("selective_isolated")
_running_whole: ContextVar[RunWhole | None] = ContextVar("selective_isolated_whole", default=None)


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Within, ``selective::isolated_rows`` calls ``run`` with its call's number and its values."""
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


@contextlib.contextmanager
def running_whole(run: RunWhole | None) -> Iterator[None]:
    """Within, ``selective::isolated`` calls ``run`` with its module's path, the structure of its arguments and its
    values; None: it may not be run."""
    token = _running_whole.set(run)
    try:
        yield
    finally:
        _running_whole.reset(token)


def _isolated(values: Sequence[Tensor], module: str, arguments: str, outputs: str) -> list[Tensor]:
    run = _running_whole.get()
    if run is None:
        raise RuntimeError("selective::isolated must not be run: it stands for a module in a traced graph")
    return run(module, ast.literal_eval(arguments), list(values))


def _fake_isolated(values: Sequence[Tensor], module: str, arguments: str, outputs: str) -> list[Tensor]:
    return _empty(outputs, _symbolic_size(values), values[0].device)


def _isolated_rows(values: Sequence[Tensor], call: int, first: int, dim: int, outputs: str) -> list[Tensor]:
    return _running.get()(call, list(values))


def _fake_isolated_rows(values: Sequence[Tensor], call: int, first: int, dim: int, outputs: str) -> list[Tensor]:
    return _empty(outputs, values[first].shape[dim], values[first].device)


def _symbolic_size(values: Sequence[Tensor]) -> Any:
    shapes: list[Any] = [size for value in values for size in value.shape]
    sizes = [size for size in shapes if isinstance(size, torch.SymInt)]
    plain = [size for size in sizes if size.node.expr.is_Symbol]
    return plain[0] if plain else values[0].shape[min(1, values[0].dim() - 1)]


def _empty(outputs: str, tokens: Any, device: torch.device) -> list[Tensor]:
    shapes: list[tuple[str, Any]] = [
        (dtype, [tokens if n == TOKENS else n for n in sizes]) for dtype, sizes in sizes_of(outputs)
    ]
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in shapes]


def sizes_of(outputs: str) -> OutputSizes:
    return ast.literal_eval(outputs)


_library = torch.library.Library("selective", "FRAGMENT")


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"selective::{name}", fake, lib=_library)
    return getattr(torch.ops.selective, name).default


isolated = _register(
    "isolated(Tensor[] values, str module, str arguments, str outputs) -> Tensor[]", _isolated, _fake_isolated
)
isolated_rows = _register(
    "isolated_rows(Tensor[] values, int call, int first, int dim, str outputs) -> Tensor[]",
    _isolated_rows,
    _fake_isolated_rows,
)
