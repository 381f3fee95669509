"""Before pass 2: slices that end in an output are taken off, to be applied to the padded result instead.

Before::  output(slice(keys [B, K, S, D], 2, -7, end))      (a sliding-window cache keeps its last columns)
After::   output(keys)  and the tail ``(dim 2, start -7, end, step 1)`` of that output

A slice of columns mixes nothing, but it has no meaning on the ragged batch.  Declines where a bound is not a constant
or the dimension is (logits cut to the vocabulary, say): that is token-wise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import is_symbolic

aten = torch.ops.aten
EVERYTHING = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Slices to apply to one output, in order: (dimension, start, end, step)."""

    slices: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def keeps_last(self) -> bool:
        """Whether the last column stays the last."""
        return all(end == EVERYTHING and step == 1 for _, _, end, step in self.slices)

    def __call__(self, value: Any) -> Any:
        for dim, start, end, step in self.slices:
            value = aten.slice.Tensor(value, dim, start, end, step)
        return value


def take_off_tails(module: fx.GraphModule) -> tuple[Tail, ...]:
    """One `Tail` per output; the graph's outputs become what the tails are applied to."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    results = output.args[0]
    listed = list(results) if isinstance(results, (tuple, list)) else [results]
    tails = []
    for position, value in enumerate(listed):
        slices: list[tuple[int, int, int, int]] = []
        while (bounds := constant_slice(value)) is not None:
            slices.insert(0, bounds)
            value = value.args[0]
        listed[position] = value
        tails.append(Tail(slices=tuple(slices)))
    output.args = (tuple(listed),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return tuple(tails)


def constant_slice(value: Any) -> tuple[int, int, int, int] | None:
    """(dimension, start, end, step) of a slice along requests or tokens; None for anything else."""
    if not isinstance(value, fx.Node) or value.target is not aten.slice.Tensor:
        return None
    given: list[Any] = [*value.args[1:]]
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    if not is_symbolic(value.args[0].meta["val"].shape[dim]):  # type: ignore[union-attr]
        return None
    bounds = (dim, 0 if start is None else start, EVERYTHING if end is None else end, step)
    return bounds if all(isinstance(bound, int) for bound in bounds) else None
