"""Part of pass 5: what is left in the flat graph, once masks have gone, must be token-wise."""

from __future__ import annotations

from selective_compile.passes.axes import Axis
from selective_compile.passes.refusals import RefusedError
from selective_compile.passes.rules_lookup import reads_own_index
from selective_compile.passes.table_rows import table_rows
from selective_compile.passes.traced_graph import TracedGraph


def refuse_survivors(traced: TracedGraph) -> None:
    """Reads at a token's own index and pairs of tokens belong to masks only.  Raises `RefusedError` for them."""
    for node in traced.graph.nodes:
        axes = traced.axes.get(node)
        if axes is None or node.op != "call_function":
            continue
        if reads_own_index(node, traced.axes):
            traced.refuse(node, "it reads tokens at their own index, outside a mask")
        elif axes.is_pair:
            traced.refuse(node, "it holds a value for each pair of tokens, outside an attention")
        elif axes.numbers == (Axis.BATCH,):
            traced.refuse(node, "it numbers requests, outside a mask")
        elif table_rows(node, traced.axes, traced.sizes) is not None:
            traced.refuse(node, "it reads a table by the length of the request, outside a mask")
    if traced.refusals:
        raise RefusedError(traced.refusals)
