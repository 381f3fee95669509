"""Which nodes of a flat graph may give a row other last bits where other rows are computed with it."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from selective_compile.grouped_ops import group_rows, take_rows
from selective_compile.isolated_op import isolated_rows
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.refusals import source_line

# Matrix products by libraries that choose how to sum by the number of rows.
PRODUCTS = frozenset(
    {
        "addmm",
        "baddbmm",
        "bmm",
        "mm",
        "mv",
        "matmul",
        "linear",
        "einsum",
        "convolution",
        "_grouped_mm",
        "grouped_mm_fallback",
        "scaled_dot_product_attention",
    }
)
# On a GPU, whatever comes first is added first.
RACES = frozenset({"index_add", "scatter_add", "scatter_reduce"})


def batch_dependent(flat: FlatGraph) -> tuple[str, ...]:
    """A line for each such node: its name, its operator and where it was written.

    Of the operators of ours, `linear` sums few rows in another order than many, `grouped_linear` those of a group, and
    attention those of a request; all are told here, and none depends on the batch in a batch-invariant engine.
    `head_products` sums every row alike, and those that order rows sum nothing.
    """
    return tuple(map(_line, _dependent(flat)))


def foreign_products(flat: FlatGraph) -> tuple[str, ...]:
    """Of these, those by libraries and by modules of the model, which depend on the batch whatever the engine does."""
    return tuple(_line(node) for node in _dependent(flat) if not _is_ours(node))


def sums_one_term(node: fx.Node) -> bool:
    """Whether a product of matrices is an outer one, such as positions times frequencies, which sums nothing."""
    if _name(node) not in ("mm", "bmm", "matmul"):
        return False
    left, right = (arg.meta.get("val") if isinstance(arg, fx.Node) else None for arg in node.args[:2])
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and min(left.dim(), right.dim()) >= 2):
        return False
    return isinstance(left.shape[-1], int) and left.shape[-1] == 1


def is_kernel(node: fx.Node) -> bool:
    """Whether it is a product or an operator of ours, for which Inductor makes no kernel and with which it fuses
    nothing."""
    return _name(node) in PRODUCTS or getattr(node.target, "namespace", "") == "selective"


def product_types(flat: FlatGraph) -> frozenset[torch.dtype]:
    """Of what such kernels give, which need not be the weights' where these are cast."""
    values = tree_leaves([node.meta.get("val") for node in flat.module.graph.nodes if is_kernel(node)])
    return frozenset(value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())


def _dependent(flat: FlatGraph) -> list[fx.Node]:
    names = PRODUCTS if flat.device.type == "cpu" else PRODUCTS | RACES
    called = (node for node in flat.module.graph.nodes if node.op == "call_function")
    return [
        node
        for node in called
        if _is_ours(node) or node.target is isolated_rows or (_name(node) in names and not sums_one_term(node))
    ]


def _line(node: fx.Node) -> str:
    return f"{node.name}: {_shown(node)}, {source_line(node)}"


def _shown(node: fx.Node) -> str:
    """The operator, or a function of torch that asks a weight's class what it is."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else _name(node)


def _is_ours(node: fx.Node) -> bool:
    others = (isolated_rows, torch.ops.selective.head_products.default, group_rows, take_rows)
    return str(node.target).startswith("selective.") and node.target not in others


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]
