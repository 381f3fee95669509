"""Pass 5 for token numbers: what numbers tokens, or reads a table by their numbers, goes by the positions input."""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.passes.flat_inputs import FlatInputs
from selective_compile.passes.positional import is_positional_root, straight_line
from selective_compile.passes.rules_order import is_inverse
from selective_compile.passes.table_rows import table_rows

aten = torch.ops.aten


def replace_numbers(inputs: FlatInputs) -> None:
    numbers = FlatNumbers(inputs)
    numbers.replace_rows()
    numbers.replace_positions()


class FlatNumbers:
    """Reads positions in the graph of ``inputs``, whose tokens are no longer in the order of one request."""

    def __init__(self, inputs: FlatInputs) -> None:
        self.inputs, self.traced, self.graph = inputs, inputs.traced, inputs.graph

    def replace_rows(self) -> None:
        """A table's rows read in the order of a request's tokens are read at their positions."""
        for node in [node for node in self.graph.nodes if node in self.traced.axes]:  # others were made here
            rows = table_rows(node, self.traced.axes, self.traced.sizes)
            if rows is None or rows.from_end or self.traced.axes[node].is_pair:
                continue
            with self.graph.inserting_before(node):
                index = self.graph.call_function(aten.add.Tensor, (self.inputs.positions(), rows.start))
                chosen = self.graph.call_function(aten.index_select.default, (node.args[0], rows.dim, index))
            node.replace_all_uses_with(chosen)
            self.graph.erase_node(node)

    def replace_positions(self) -> None:
        """Whatever numbers tokens and is still needed becomes ``first + step * positions``."""
        for node in reversed(list(self.graph.nodes)):
            axes = self.traced.axes.get(node)
            if axes is None or not node.users or not is_positional_root(axes, node):
                continue
            line = (0, 1) if node is self.traced.long_numbers else straight_line(self.traced, node)
            if line is None:
                self.traced.refuse(node, "its values by position are no straight line, and no table of them is kept")
                continue
            with self.graph.inserting_before(node):
                new = self.numbered(node, *line)
            node.replace_all_uses_with(new, delete_user_cb=lambda user: not is_inverse(self.traced.axes, user))
        self.graph.eliminate_dead_code()

    def numbered(self, node: fx.Node, first: int, step: int) -> fx.Node:
        call = self.graph.call_function
        numbers = self.inputs.nodes["positions"] if node is self.traced.long_numbers else self.inputs.positions()
        scaled = call(aten.mul.Tensor, (numbers, step)) if step != 1 else numbers
        moved = call(aten.add.Tensor, (scaled, first)) if first else scaled
        cast = call(aten.to.dtype, (moved, node.meta["val"].dtype))
        sizes = self.traced.axes[node].flat_sizes
        column = call(aten.reshape.default, (cast, [size if size == -1 else 1 for size in sizes]))
        if all(abs(size) == 1 for size in sizes):
            return column
        return call(aten.expand.default, (column, sizes))
