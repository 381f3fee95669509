"""Products of rows in groups, as those of experts, go to kernels of ours where a library has none that is as good.

Before::  transformers.grouped_mm_fallback(rows, aten.transpose(experts, -2, -1), ends)
          aten.index(results * weights, [places])
After::   selective.grouped_linear(rows, experts, ends)
          selective.take_rows(results * weights, places)      (on a CPU)

On a CPU libraries multiply group by group; on a GPU they have a kernel for bfloat16 alone, not on all, and elsewhere
the host reads where groups end, so that no step can be captured.  Declines on a CPU for experts that lie neither row by
row nor column by column, and for float16; and for weights of a class of its own.

On a CPU rows are put back into their order by themselves: Inductor would compute the sum over a token's experts element
by element, with the place and weight of each anew, which took 28 ms of a layer's 59 (512 tokens with 8 of 32 experts,
1,024 wide, two threads of a Xeon).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.grouped_ops import grouped_linear, take_rows
from selective_compile.int8_ops import DTYPES
from selective_compile.kernels.linear_call import TRITON_DTYPES, lie_by_columns
from selective_compile.passes.host_reads import has_grouped_launch
from selective_compile.passes.rules_order import GROUPED_PRODUCTS

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
TRANSPOSITIONS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.mT.default, aten.swapaxes.default)


def is_grouped(node: fx.Node) -> bool:
    """Whether it is a product of rows ``[S, K]`` in groups by a weight ``[E, K, N]``, and nothing more."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in GROUPED_PRODUCTS:
        return False
    if len(node.args) < 3 or any(other is not None for other in (*node.args[3:], *node.kwargs.values())):
        return False
    rows, weight, ends = operands(node)
    return ends is not None and rows.meta["val"].dim() == 2 and weight.meta["val"].dim() == 3


def kernel_takes(node: fx.Node, device: torch.device, weights: Mapping[fx.Node, Any], *, batch_invariant: bool) -> bool:
    """Whether a kernel of ours is there for it, and none of a library's as good."""
    rows, weight, _ = operands(node)
    if is_of_a_class(weight, weights):
        return False
    dtype = rows.meta["val"].dtype
    if device.type == "cpu":
        return dtype in DTYPES and lie_by_columns([weight.meta["val"]]) is not None
    return dtype in TRITON_DTYPES and (batch_invariant or not has_grouped_launch(node, device))


def operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Rows, weight and ends."""
    return node.args[0], node.args[1], node.args[2]


def is_of_a_class(node: Any, weights: Mapping[fx.Node, Any]) -> bool:
    """Whether it is a weight of a class of its own, or made of one: none of our kernels knows it."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        node = left.pop()
        if is_traceable_wrapper_subclass(weights.get(node)):
            return True
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return False


def lower_grouped(node: fx.Node) -> None:
    """``node``'s weight ``[E, K, N]`` becomes ``[E, N, K]``, of which it mostly is a view."""
    rows, weight, ends = operands(node)
    value = weight.meta["val"].transpose(-2, -1)
    turned = weight.args[0] if weight.target in TRANSPOSITIONS else None
    if turned is None or not alike(turned.meta["val"], value):
        with node.graph.inserting_before(node):
            turned = node.graph.call_function(aten.transpose.int, (weight, -2, -1))
        turned.meta = {**node.meta, "val": value}
    node.target, node.args, node.kwargs = grouped_linear, (rows, turned, ends), {}


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether views of the same memory are the same: permuted otherwise, a cube has the same shape."""
    return one.shape == other.shape and one.stride() == other.stride()


def puts_back(node: fx.Node) -> bool:
    """Whether it takes rows, in another order, of what is computed from products of rows in groups."""
    if node.target is not aten.index.Tensor:
        return False
    rows: Any
    indices: Any
    rows, indices = node.args
    if len(indices) != 1 or indices[0] is None or not is_table(rows) or not comes_of_groups(rows):
        return False
    index = indices[0].meta["val"]
    return bool(index.dim() == 1 and index.dtype == torch.int64)


def comes_of_groups(node: fx.Node) -> bool:
    """By operators on each element, such as weights of experts."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        node = left.pop()
        if node.target is grouped_linear:
            return True
        if node not in seen and is_pointwise(node):
            seen.add(node)
            left += filter(is_table, node.all_input_nodes)
    return False


def is_table(node: fx.Node) -> bool:
    value = node.meta.get("val")  # what flattening has made has none
    return isinstance(value, torch.Tensor) and value.dim() == 2


def is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in CASTS)


def lower_put_back(node: fx.Node) -> None:
    node.target, node.args = take_rows, (node.args[0], node.args[1][0])  # type: ignore[index]
