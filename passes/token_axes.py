"""Pass 2: for every value, which dimension enumerates tokens.  An analysis: it changes no node.

Abstract interpretation over `Axes`: one transfer rule per operator (`rules_*`), looked up by the operator alone.
Pointwise operators are recognised by their tag.  A node whose rule raises `Mixes` and a node whose operator has no rule
are refused with their source line, unless they are part of an attention (`sequence_nodes`, which pass 3 must cover) or
lead to nothing but attention masks.  What depends on a refused node is unknown and not reported again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.function_op import function
from selective_compile.passes.axes import Axes, Axis, Mixes, Sizes, is_symbolic
from selective_compile.passes.contraction import contraction_axes
from selective_compile.passes.isolate import is_isolated, result_axes
from selective_compile.passes.positional import positional
from selective_compile.passes.rules_chosen import CHOICES
from selective_compile.passes.rules_create import CREATIONS
from selective_compile.passes.rules_lookup import LOOKUPS
from selective_compile.passes.rules_order import (
    GROUPED_PRODUCTS,
    NEVER_NEGATIVE,
    ORDERS,
    READ_NUMBERS,
    counted_groups,
    grouped_product,
    running_sum,
    tables_counted,
)
from selective_compile.passes.rules_parts import PARTS
from selective_compile.passes.rules_pointwise import UNTAGGED, pointwise
from selective_compile.passes.rules_reduce import REDUCTIONS
from selective_compile.passes.rules_views import VIEWS
from selective_compile.passes.traced_graph import Input, TracedGraph, is_lost, is_mutable, is_random

Rule = Callable[[fx.Node, Callable[[Any], Axes], Sizes], Axes]
aten = torch.ops.aten
RULES: dict[Any, Rule] = {**UNTAGGED, **VIEWS, **REDUCTIONS, **CREATIONS, **LOOKUPS, **ORDERS, **CHOICES, **PARTS}


# Their rules read what a number of requests or tokens does to the shape, and refuse it anywhere else.
SHAPED_BY_SIZES = (
    *(aten.view, aten.reshape, aten._unsafe_view, aten.unflatten, aten.expand, aten.slice, aten.arange, aten.zeros),
    *(aten.ones, aten.full, aten.empty, aten.new_ones, aten.new_zeros, aten.new_full, aten.new_empty),
    *(aten.slice_scatter, aten.split_with_sizes, aten.topk),
    *(torch.ops.selective.function, *PARTS),
)
HELD_TO_NO_DROPOUT = (aten.scaled_dot_product_attention.default,)  # pass 3 refuses it with a dropout other than 0


PUT_TOGETHER = (aten.cat, aten.stack, aten.broadcast_tensors)


class Unknown(Exception):
    """An input of the node is unknown already, and was reported where it became so."""


class SequenceNode(Exception):
    """Raised by a rule: the node mixes tokens as attention does; ``axes`` hold if pass 3 recognises it."""

    def __init__(self, kind: str, axes: Axes) -> None:
        self.kind, self.axes = kind, axes


def mark_token_axes(traced: TracedGraph) -> int:
    """Fill ``traced.axes``, ``sequence_nodes`` and ``refusals``; returns the number of values marked."""
    places = {given.node: given for given in traced.inputs}
    for given in traced.inputs:
        given.node.meta[NEVER_NEGATIVE] = given.is_buffer and holds_no_negative(given.example)
    for node in traced.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            traced.axes[node] = placeholder_axes(places[node], traced.sizes)
        elif node.op == "get_attr" and not is_graph(node) and not is_lost(traced, node):
            traced.axes[node] = Axes(dims=tuple((size,) if size != 1 else () for size in node.meta["val"].shape))
        elif node.op == "call_function":
            mark(traced, node)
    counted = {table for axes in traced.axes.values() for table in tables_counted(axes)}
    traced.proved_from += [given for given in traced.inputs if given.node in counted]
    return len(traced.axes)


def is_graph(node: Any) -> bool:
    """Whether it is a graph that an operator runs, as a branch of `torch.cond`, and no tensor."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and "val" not in node.meta


def holds_no_negative(table: Any) -> bool:
    """Of tables of whole numbers; what a large table of floats holds is not looked at."""
    if not isinstance(table, torch.Tensor) or table.is_floating_point() or table.is_complex():
        return False
    return not table.dtype.is_signed or not table.numel() or bool(table.amin() >= 0)  # no other memory is taken


def placeholder_axes(given: Input, sizes: Sizes) -> Axes:
    value = given.node.meta["val"]
    if given.place != "tokens":
        return Axes(dims=tuple((size,) if size != 1 else () for size in value.shape))
    batch = (Axis.BATCH,) if not isinstance(value.shape[0], int) else ()
    rest = tuple((size,) if size != 1 else () for size in value.shape[2:])
    return Axes(dims=(batch, (Axis.TOKEN,), *rest), inputs=frozenset({given.node}))


def mark(traced: TracedGraph, node: fx.Node) -> None:
    def axes_of(value: Any) -> Axes:
        if not isinstance(value, fx.Node):
            return Axes(dims=())
        if value not in traced.axes:
            raise Unknown
        return traced.axes[value]

    if not has_tensor(node.meta.get("val")) or is_isolated(node):
        return  # a symbolic size, or what pass 6 looks at
    if node.args and is_isolated(node.args[0]):
        axes = result_axes(traced, node)
        if axes is None and all(map(is_isolated, node.users)):
            return  # pass 6 hands it on
        if axes is None:
            traced.refuse(node, "this result of an isolated module does not have tokens in exactly one dimension")
        else:
            traced.axes[node] = axes
        return
    if any(is_lost(traced, given) for given in node.all_input_nodes):
        traced.refuse(node, "it reads a constant that the trace does not hold")
        return
    if any(map(is_graph, node.all_input_nodes)):
        traced.refuse(node, "it runs graphs of its own, which no rule reads")
        return
    try:
        traced.axes[node] = transfer(node, axes_of, traced.sizes)
    except Unknown:
        return
    except SequenceNode as found:
        traced.sequence_nodes[node] = found.kind
        traced.axes[node] = found.axes
    except Mixes as reason:
        axes = positional(traced, node)
        if axes is None:
            traced.refuse(node, str(reason))
        else:
            traced.axes[node] = axes


def has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(has_tensor, value)))


def transfer(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
    """The rule for ``node``'s operator applied.  Raises `Mixes`, `Unknown` or `SequenceNode`."""
    if is_random(node) and node.target not in HELD_TO_NO_DROPOUT:
        raise Mixes("draws random numbers (is the model in training mode?)")
    if is_mutable(node):
        raise Mixes("changes a tensor in place, and who else reads that tensor is not followed")
    if getattr(node.target, "overloadpacket", None) not in SHAPED_BY_SIZES and takes_size(node):
        raise Mixes("computes with the number of tokens or requests, which is not known of one token")
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.target is function:
        raise SequenceNode("a function that mixes tokens", shaped_like(node, axes_of, sizes))
    axes = grouped_or_ended(node, axes_of, sizes)
    if axes is None:
        refuse_opaque(node, packet, axes_of)
        axes = contraction_axes(node, axes_of)
    if axes is None:
        rule = RULES.get(packet)
        if rule is not None:
            axes = rule(node, axes_of, sizes)
        elif is_pointwise(node):
            axes = pointwise(node, axes_of, sizes)
        else:
            every_input_constant(node, axes_of)
            axes = constant_like(node)
    if not isinstance(axes, Axes):
        raise SequenceNode(*axes)
    return axes


def shaped_like(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
    """Its result has the axes that its shape says: which token an element belongs to, pass 3 has to prove."""
    tensors = [axes_of(argument) for argument in node.args[0]]  # type: ignore[union-attr]
    inputs = frozenset(given for axes in tensors for given in axes.inputs)
    return Axes(dims=tuple(sizes.dim(size) for size in node.meta["val"].shape), inputs=inputs)


def grouped_or_ended(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes | None:
    """What reads the groups of sorted tokens; None for all else."""
    if node.target is aten.cumsum.default:
        return running_sum(node, axes_of, sizes)
    if node.target is aten.sum.dim_IntList:
        return counted_groups(node, axes_of, sizes)
    schema = getattr(node.target, "_schema", None)
    return grouped_product(node, axes_of, sizes) if schema is not None and schema.name in GROUPED_PRODUCTS else None


def refuse_opaque(node: fx.Node, packet: Any, axes_of: Callable[[Any], Axes]) -> None:
    """Numbers by which tokens are reordered go through views, pointwise operators that keep them, and index operators.

    Those rules say themselves how they read them; any other would take them for values.
    """
    reads_views = packet in VIEWS and packet not in PUT_TOGETHER
    if (
        reads_views
        or packet in READ_NUMBERS
        or packet in PARTS
        or packet in CREATIONS
        or packet in UNTAGGED
        or is_pointwise(node)
    ):
        return
    if any(axes_of(argument).opaque for argument in node.all_input_nodes if has_tensor(argument.meta.get("val"))):
        raise Mixes("computes with the numbers by which tokens are reordered")


def takes_size(node: fx.Node) -> bool:
    return any(is_symbolic(argument.meta.get("val")) for argument in node.all_input_nodes)


def is_pointwise(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def every_input_constant(node: fx.Node, axes_of: Callable[[Any], Axes]) -> None:
    """An operator without a rule keeps constants constant; on tokens it is unknown."""
    if any(
        not axes_of(argument).is_constant for argument in node.all_input_nodes if has_tensor(argument.meta.get("val"))
    ):
        raise Mixes(f"no transfer rule for {node.target}: whether it treats tokens independently is unknown")


def constant_like(node: fx.Node) -> Axes:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or any(not isinstance(size, int) for size in value.shape):
        raise Mixes(f"no transfer rule for {node.target}, and its result has a symbolic size")
    return Axes(dims=tuple((size,) if size != 1 else () for size in value.shape))
