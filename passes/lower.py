"""Pass 10: linear layers on the CPU go to the kernel that reads a weight where it lies.

Before::  aten.linear(x, weight, bias)
          transformers.grouped_mm_fallback(rows, aten.transpose(experts, -2, -1), ends)
After::   selective.linear(x, weight, bias)
          selective.grouped_linear(rows, experts, ends)

ATen's own path reads weights at 1-2 GB/s for 8-32 rows, and a prepacked copy would double the memory and miss updates.
Declines on other devices and for weights that are computed in the graph; a weight of a class of its own, as a quantised
one, gets `torch.nn.functional.linear`, which asks the class.  Ragged attention needs no lowering: its operator
dispatches to Triton on a GPU and to the native kernel on the CPU.

For a batch-invariant engine it does so on a GPU too, whose libraries choose the order of sums by the number of rows,
and products that sum nothing, such as positions times frequencies, become what they are::

Before::  aten.matmul(frequencies [1, h, 1], positions [1, 1, T])
After::   aten.mul(frequencies [1, h, 1], positions [1, 1, T])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.grouped_ops import grouped_linear
from selective_compile.kernels.linear_call import GROUPED_DTYPES, TRITON_DTYPES
from selective_compile.passes.batch_dependence import sums_one_term
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.rules_order import GROUPED_PRODUCTS

aten = torch.ops.aten
TRANSPOSITIONS = (aten.transpose.int, aten.permute.default, aten.mT.default, aten.swapaxes.default)


def lower(flat: FlatGraph, *, batch_invariant: bool = False) -> int:
    """``batch_invariant``: for an engine that is; what it leaves, `batch_dependence.foreign_products` names."""
    weights = {node: given.example for node, given in zip(flat.module.graph.nodes, flat.weights, strict=False)}
    changed = 0
    for node in flat.module.graph.nodes:
        before = node.target
        if batch_invariant and sums_one_term(node):
            node.target = aten.mul.Tensor
        elif before is aten.linear.default and node.args[1] in weights:
            weight = weights[node.args[1]]
            if is_traceable_wrapper_subclass(weight):
                node.target = F.linear  # only this way is the weight's class asked: ATen's falls apart before
            elif flat.device.type == "cpu" or (batch_invariant and has_kernel(weight)):
                node.target = torch.ops.selective.linear.default
                node.args = (*node.args, None)[:3]
        elif flat.device.type == "cpu" and is_grouped(node):
            lower_grouped(node)
        elif batch_invariant and before is grouped_linear:
            node.args = (*node.args[:3], None, True)
        changed += node.target is not before
    flat.module.recompile()
    return changed


def is_grouped(node: fx.Node) -> bool:
    """Whether it is a product of rows in groups that the kernel takes: one by weights that lie as ``[E, N, K]``."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in GROUPED_PRODUCTS:
        return False
    if len(node.args) < 3 or any(other is not None for other in (*node.args[3:], *node.kwargs.values())):
        return False
    rows, weight, ends = operands(node)
    if ends is None:
        return False
    x, turned = rows.meta["val"], weight.meta["val"].transpose(-2, -1)
    return x.dim() == 2 and turned.dim() == 3 and turned.is_contiguous() and x.dtype in GROUPED_DTYPES


def lower_grouped(node: fx.Node) -> None:
    """``node``'s weight ``[E, K, N]`` becomes ``[E, N, K]``, of which it mostly is a view."""
    rows, weight, ends = operands(node)
    value = weight.meta["val"].transpose(-2, -1)
    turned = weight.args[0] if weight.target in TRANSPOSITIONS else None
    if turned is None or turned.meta["val"].shape != value.shape or not turned.meta["val"].is_contiguous():
        with node.graph.inserting_before(node):
            turned = node.graph.call_function(aten.transpose.int, (weight, -2, -1))
        turned.meta = {**node.meta, "val": value}
    node.target, node.args, node.kwargs = grouped_linear, (rows, turned, ends), {}


def operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Rows, weight and ends of a product of rows in groups."""
    return node.args[0], node.args[1], node.args[2]


def has_kernel(weight: Any) -> bool:
    """Whether the Triton kernel takes it."""
    return weight.dim() == 2 and weight.dtype in TRITON_DTYPES
