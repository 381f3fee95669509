"""Which nodes of a flat graph may give a row other last bits where other rows are computed with it."""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.isolated_op import isolated_rows
from selective_compile.passes.flatten import FlatGraph
from selective_compile.passes.traced_graph import source_line

aten = torch.ops.aten

# Matrix products by libraries that choose how to sum by the number of rows.
PRODUCTS = frozenset(
    {
        "addmm",
        "baddbmm",
        "bmm",
        "mm",
        "matmul",
        "linear",
        "einsum",
        "convolution",
        "_grouped_mm",
        "scaled_dot_product_attention",
    }
)


def batch_dependent(flat: FlatGraph) -> tuple[str, ...]:
    """A line for each such node: its name, its operator and where it was written.

    Of the operators of ours, `linear` sums few rows in another order than many, and attention does so for a request
    with few rows and one with many; both are told here, and neither depends on the batch in a batch-invariant engine.
    """
    named = (node for node in flat.module.graph.nodes if node.op == "call_function")
    return tuple(f"{node.name}: {node.target}, {source_line(node)}" for node in named if _depends(node))


def foreign_products(flat: FlatGraph) -> tuple[str, ...]:
    """Of these, those by libraries and by modules of the model, which depend on the batch whatever the engine does."""
    nodes = (node for node in flat.module.graph.nodes if node.op == "call_function" and not _is_ours(node))
    return tuple(f"{node.name}: {node.target}, {source_line(node)}" for node in nodes if _depends(node))


def _is_ours(node: fx.Node) -> bool:
    return str(node.target).startswith("selective.") and node.target is not isolated_rows


def _depends(node: fx.Node) -> bool:
    if _is_ours(node) or node.target is isolated_rows:
        return True
    name = str(node.target).partition(".")[2].partition(".")[0]
    return name in PRODUCTS and not _sums_one_term(node)


def _sums_one_term(node: fx.Node) -> bool:
    """Outer products, such as positions times frequencies, sum nothing."""
    first = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
    value = first.meta.get("val") if first is not None else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or "addmm" in str(node.target):
        return False
    return isinstance(value.shape[-1], int) and value.shape[-1] == 1
