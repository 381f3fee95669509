"""What calls give for tensors that have sizes and no numbers, asked once of calls that are alike, as in each layer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from selective_compile.passes.evaluate import traced_value
from selective_compile.passes.repeats import spelled
from selective_compile.passes.retrace import kind_of


class KnownValues:
    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """Of nodes that call the same on tensors of one kind and equal constants it is the same object."""
        read: list[Any] = []
        fx.node.map_arg((node.args, node.kwargs), lambda given: read.append(given.meta["val"]))
        call = spelled(node), tuple(map(kind_of, tree_leaves(read)))
        if call not in self._known:
            self._known[call] = traced_value(node, self._mode, lambda given: given.meta["val"])
        return self._known[call]
