"""Pass 10: linear layers on the CPU go to the kernel that reads a weight where it lies.

Before::  aten.linear(x, weight, bias); aten.addmm(bias, x, weight)
After::   selective.linear(x, weight, bias); selective.linear(x, aten.t(weight), bias)

ATen's own path reads weights at 1-2 GB/s for 8-32 rows, and a prepacked copy would double the memory and miss updates.
Declines on other devices, for weights that lie neither by rows nor by columns, and for those that are computed in the
graph, but for a cast, as of a router that is multiplied in float32; a weight of a class of its own, as a quantised
one, gets `torch.nn.functional.linear`, which asks the class. Ragged attention needs no lowering: its operator
dispatches to Triton on a GPU and to the native kernel on the CPU. Of products of rows in groups: `lower_grouped`, and
of how they are ordered: `lower_group_rows`.

For a batch-invariant engine it does so on a GPU too, whose libraries choose the order of sums by the number of rows,
and products that sum nothing, such as positions times frequencies, become what they are::

Before::  aten.matmul(frequencies [1, h, 1], positions [1, 1, T])
After::   aten.mul(frequencies [1, h, 1], positions [1, 1, T])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.grouped_ops import grouped_linear
from selective_compile.kernels.linear_call import TRITON_DTYPES, lie_by_columns
from selective_compile.passes.batch_dependence import sums_one_term
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.lower_group_rows import lower_group_rows
from selective_compile.passes.lower_grouped import (
    CASTS,
    is_grouped,
    kernel_takes,
    lower_grouped,
    lower_put_back,
    puts_back,
)

aten, ops = torch.ops.aten, torch.ops.selective
SCALES = ("beta", "alpha")  # of a sum with a product


def lower(flat: FlatGraph, *, batch_invariant: bool = False) -> int:
    """``batch_invariant``: for an engine that is; what it leaves, `batch_dependence.foreign_products` names."""
    weights = {node: given.example for node, given in zip(flat.module.graph.nodes, flat.weights, strict=False)}
    changed = ordered = 0
    for node in flat.module.graph.nodes:
        before = node.target
        if is_grouped(node) and lower_group_rows(flat, node.args[2]):
            ordered += 1
        if batch_invariant and sums_one_term(node):
            node.target = aten.mul.Tensor
        elif before is aten.linear.default and (weight := weight_of(node, weights)) is not None:
            if is_traceable_wrapper_subclass(weight):
                node.target = F.linear  # only this way is the weight's class asked: ATen's falls apart before
            elif takes_layers(flat.device, weight, batch_invariant=batch_invariant):
                node.target = ops.linear.default
                node.args = (*node.args, None)[:3]
        elif before is aten.addmm.default and (weight := weight_by_columns(node, weights)) is not None:
            if takes_layers(flat.device, weight, batch_invariant=batch_invariant):
                become_layer(node)
        elif is_grouped(node) and kernel_takes(node, flat.device, weights, batch_invariant=batch_invariant):
            lower_grouped(node)
        elif flat.device.type == "cpu" and puts_back(node):
            lower_put_back(node)
        if before is ops.ragged_attention.default and flat.device.type == "cpu":
            changed += widen_per_head(node)
        if batch_invariant and node.target is grouped_linear:
            node.args = (*node.args[:3], None, True)
        changed += node.target is not before
    if ordered:
        flat.module.graph.eliminate_dead_code()
    flat.module.recompile()
    return changed + ordered


def weight_of(node: fx.Node, weights: Mapping[Any, Any]) -> Any:
    """What a linear layer's weight is, or a plain one's is when it has been converted; None if it is computed."""
    given = node.args[1]
    if given in weights:
        return weights[given]
    assert isinstance(given, fx.Node)
    if given.target not in CASTS or is_traceable_wrapper_subclass(weights.get(given.args[0])):
        return None
    return given.meta["val"] if given.args[0] in weights else None


def weight_by_columns(node: fx.Node, weights: Mapping[Any, Any]) -> Any:
    """The plain weight [K, N] of a sum ``bias [N] + x [T, K] @ weight``, as GPT-2 has layers; None of other sums."""
    bias, _, given = node.args
    weight = weights.get(given)
    if weight is None or is_traceable_wrapper_subclass(weight) or any(node.kwargs.get(name, 1) != 1 for name in SCALES):
        return None
    value = bias.meta["val"]  # type: ignore[union-attr]
    return weight if value.dim() == 1 and value.shape[0] == weight.shape[1] else None


def become_layer(node: fx.Node) -> None:
    bias, x, given = node.args
    assert isinstance(given, fx.Node)
    with node.graph.inserting_before(node):
        weight = node.graph.call_function(aten.t.default, (given,))
    weight.meta["val"] = given.meta["val"].t()
    node.target, node.args, node.kwargs = ops.linear.default, (x, weight, bias), {}


def takes_layers(device: torch.device, weight: Any, *, batch_invariant: bool) -> bool:
    """On a CPU those that lie by rows or by columns: others are left to a library, by whose name they are known."""
    if device.type == "cpu":
        return weight.dim() == 2 and lie_by_columns([weight]) is not None
    return batch_invariant and has_kernel(weight)


def widen_per_head(node: fx.Node) -> bool:
    """Whether sinks, slopes or biases by distance of an attention had fewer bits than float32, in which its kernel for
    CPUs reads them."""
    names = [argument.name for argument in ops.ragged_attention.default._schema.arguments]
    places = map(names.index, ("sinks", "slopes", "distance_bias"))
    narrow = [place for place in places if is_narrow(node.args[place : place + 1])]
    for place in narrow:
        given = node.args[place]
        with node.graph.inserting_before(node):
            wide = node.graph.call_function(aten.to.dtype, (given, torch.float32))
        wide.meta["val"] = given.meta["val"].float()  # type: ignore[union-attr]
        node.update_arg(place, wide)
    return bool(narrow)


def is_narrow(given: Sequence[Any]) -> bool:
    return any(isinstance(each, fx.Node) and each.meta["val"].dtype is not torch.float32 for each in given)


def has_kernel(weight: Any) -> bool:
    """Whether the Triton kernel takes it."""
    return weight.dim() == 2 and weight.dtype in TRITON_DTYPES
