"""A flat graph whose layers are alike as three compiled pieces, of which one runs for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.layer_cut import LayerCut, Part

Run = Callable[..., Any]


class Layered:
    """Callable on the inputs of the graph that was cut; returns the tuple of its outputs.

    Values lie in a list, each at a place of its own, and leave it with the last piece that reads them.
    """

    def __init__(self, flat: FlatGraph, pieces: LayerCut, compiled: Callable[[Part, list[Any]], Run]) -> None:
        """
        Args:
            compiled: makes a part callable; it is given examples of its inputs.
        """
        placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
        examples = dict(zip(placeholders, flat.example_inputs, strict=True))
        first, layer, last = (
            compiled(part, [examples[node] if node in examples else apart(node.meta["val"]) for node in part.inputs])
            for part in (pieces.first, pieces.layer, pieces.last)
        )
        calls = [(first, pieces.first.inputs, pieces.first.outputs)]
        calls += [(layer, given, left) for given, left in pieces.calls]
        calls.append((last, pieces.last.inputs, []))
        places = {node: place for place, node in enumerate(placeholders)}
        for _, _, left in calls:
            for node in left:
                places.setdefault(node, len(places))
        self._num_values = len(places) - len(placeholders)
        latest = {node: i for i, (_, given, _) in enumerate(calls) for node in given if node not in examples}
        self._calls = [
            (
                run,
                [places[node] for node in given],
                [places[node] for node in left],
                [places[node] for node in given if latest.get(node) == i],
            )
            for i, (run, given, left) in enumerate(calls)
        ]

    def __call__(self, *arguments: Any) -> Any:
        return self.through(lambda run, number, given: run(*given), arguments)

    def through(self, call: Callable[[Run, int, list[Any]], Any], arguments: Sequence[Any]) -> Any:
        """``call`` is given each piece in turn, its number, and its inputs, and returns its outputs."""
        values = [*arguments, *(None for _ in range(self._num_values))]
        results: Any = ()
        for number, (run, given, left, done) in enumerate(self._calls):
            results = call(run, number, [values[place] for place in given])
            for place in done:
                values[place] = None  # its memory is for the next one to use
            for place, result in zip(left, results, strict=False):  # the last one leaves nothing to others
                values[place] = result
        return results


def apart(value: Any) -> Any:
    """An example like ``value``, of memory that it has for itself: values that are alike may share theirs."""
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        memory = torch.empty(0, dtype=value.dtype, device=value.device)
        return memory.set_(memory.untyped_storage(), value.storage_offset(), value.shape, value.stride())
