"""What a graph writes to: tried on tensors without numbers, of which each says how often it was written to.

By names alone it is not known: `relu` may write to its argument, an operator of another library to any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from selective_compile.passes.evaluate import leaves
from selective_compile.passes.vmapped import interpreter_of
from selective_compile.tensor_state import version_of


class GraphWrites:
    """``writing``: the nodes that write to an argument; ``values``: what nodes give, on memory of that run alone."""

    @torch.no_grad()
    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """``inputs``: of one length; nothing is written to these.  Raises whatever an operator raises."""
        self.writing: set[fx.Node] = set()
        self.values: dict[fx.Node, Any] = {}
        self._writers: dict[int, set[fx.Node]] = {}  # of each memory
        # Sizes that values tell, as how many tokens an expert has, are symbols.
        mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=ShapeEnv())
        given = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in inputs]
        interpreter = interpreter_of(module)
        run_node = interpreter.run_node

        def noted(node: fx.Node) -> Any:
            read = [value for each in node.all_input_nodes for value in tensors_of(self.values[each])]
            before = list(map(state_of, read))
            result = self.values[node] = run_node(node)
            changed = [value for value, state in zip(read, before, strict=True) if state_of(value) != state]
            if changed:
                self.writing.add(node)
                for memory in map(memory_of, changed):
                    self._writers.setdefault(memory, set()).add(node)
            return result

        setattr(interpreter, "run_node", noted)  # noqa: B010 - a method to mypy
        with mode:
            interpreter.run(*given)

    def is_written(self, node: fx.Node, *, but: Sequence[fx.Node] = ()) -> bool:
        """Whether what it gives, or what it is a view of, is written to by any node, ``but`` by these."""
        memories = map(memory_of, tensors_of(self.values[node]))
        return any(not self._writers.get(memory, set()) <= set(but) for memory in memories)

    def inputs_written(self) -> list[int]:
        """The places of the graph's inputs that it writes to, by whatever name."""
        inputs = [node for node in self.values if node.op == "placeholder"]
        return [place for place, node in enumerate(inputs) if self.is_written(node)]


def tensors_of(value: Any) -> Iterator[Tensor]:
    return (each for each in leaves((value,)) if isinstance(each, Tensor))


def state_of(value: Tensor) -> tuple[int, int]:
    """Other memory tells that a tensor was given some by ``.data``, which torch 2.15 does not count as a write."""
    return version_of(value), memory_of(value)


def memory_of(value: Tensor) -> int:
    return value.untyped_storage()._cdata
