"""Whether two values of a graph are computed in the same way: layers make the same mask each for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.bias_lookups import lookups_behind
from selective_compile.passes.traced_graph import TracedGraph


class Fingerprints:
    """Numbers for values, equal only where the same operators are applied to the same inputs or equal constants."""

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        self._buffers = {given.node: given.example for given in traced.inputs if given.is_buffer}
        marks = {mark.node: mark for selection in traced.selections for mark in selection.marks}
        self._marks: dict[fx.Node, Hashable] = {
            node: (mark.marked, mark.unmarked, str(node.meta["val"])) for node, mark in marks.items()
        }
        for lookup in lookups_behind(traced, [term.node for call in traced.calls for term in call.masks]):
            self._marks[lookup.source] = "looked up", str(lookup.source.meta["val"])
        self._of: dict[fx.Node, int] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, node: fx.Node) -> int:
        stack = [node]
        while stack:
            current = stack[-1]
            parents = [] if current in self._marks else current.all_input_nodes
            missing = [parent for parent in parents if parent not in self._of]
            if missing and current not in self._of:
                stack += missing
                continue
            stack.pop()
            if current not in self._of:
                self._of[current] = self._numbers.setdefault(self._key(current), len(self._numbers))
        return self._of[node]

    def _key(self, node: fx.Node) -> Hashable:
        if is_symbolic(node.meta.get("val")):
            return "size", str(node.meta["val"])
        if node in self._marks:  # proofs look at no more of it
            return "marks", self._marks[node]
        if node in self._buffers:
            return "constant", digest(self._buffers[node])  # type: ignore[arg-type]
        if node.op == "get_attr":
            return "constant", digest(getattr(self._traced.module, str(node.target)))
        if node.op != "call_function":
            return node.name
        return node.target, self._arguments(node.args), self._arguments(node.kwargs)

    def _arguments(self, given: Any) -> Hashable:
        if isinstance(given, fx.Node):
            return "node", self._of[given]
        if isinstance(given, (tuple, list)):
            return tuple(self._arguments(part) for part in given)
        if isinstance(given, Mapping):
            return tuple((name, self._arguments(part)) for name, part in sorted(given.items()))
        return type(given).__name__, given


def digest(tensor: torch.Tensor) -> str:
    """Shape, type and bytes of a tensor, in one string."""
    if isinstance(tensor, FakeTensor):  # made in a trace of an unknown number, so that nobody knows its values
        return f"unknown {id(tensor)}"
    held = tensor.detach().cpu().contiguous()
    data = hashlib.sha256(held.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() if held.numel() else ""
    return f"{held.dtype} {tuple(held.shape)} {data}"
