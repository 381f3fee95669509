"""Which values of a traced graph share memory, and how a view is taken once more, or put back.

A value lies in its own memory, or is a view: a `View` says which part of its source it is, so that it can be taken of
another source, and the source be made anew around another part.  What may or may not be a view, as ``contiguous``, or
is one that is not told here, is `linked` to its source, no more.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from selective_compile.passes.traced_graph import is_mutable

aten = torch.ops.aten
# They may return their first argument, one of its tensors or a part of it, which their schemas do not say.
UNDECLARED_ALIASES = (
    *(aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.type_as, aten.cat, aten.lift, aten._unsafe_view),
    *(aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes),
)
TAKEN = "taken_anew"  # in the meta of a reshape that stands for a view
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
RESHAPES = (aten.view.default, aten.view_as.default, aten.unflatten.int, aten.squeeze.dim, aten.squeeze.dims)

Call = tuple[Any, tuple[Any, ...]]  # an operator and its arguments


@dataclass(frozen=True)
class View:
    """``take(other)`` is the same part of another source; ``put(part)`` the source with another part, None where that
    is the part itself."""

    source: fx.Node
    take: Callable[[fx.Node], Call]
    put: Callable[[fx.Node], Call | None]


def view_of(node: fx.Node) -> View | None:
    """None if the node is no view, or one that is not told."""
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node) or node.kwargs:
        return None
    if node.target is operator.getitem:
        return result_of(source, node.args[1])
    put = inverse(node, source)
    # What is made anew may lie otherwise in memory, so that there is no view of that shape.
    target = aten.reshape.default if node.target is aten.view.default else node.target
    return None if put is None else View(source, lambda other: (target, (other, *node.args[1:])), put)


def inverse(node: fx.Node, source: fx.Node) -> Callable[[fx.Node], Call | None] | None:
    """What puts another part where that of ``node`` was."""
    target, rest = node.target, node.args[1:]
    if target is aten.slice.Tensor:
        return lambda part: None if takes_all(rest) else (aten.slice_scatter.default, (source, part, *rest))
    if target is aten.select.int:
        return lambda part: (aten.select_scatter.default, (source, part, *rest))
    if target in (aten.transpose.int, aten.t.default, aten.numpy_T.default):
        return lambda part: (target, (part, *rest))
    if target is aten.unsqueeze.default:
        return lambda part: (aten.squeeze.dim, (part, *rest))
    if target is aten.permute.default:
        rank = source.meta["val"].dim()
        order = [dim % rank for dim in rest[0]]  # type: ignore[union-attr]
        return lambda part: (aten.permute.default, (part, [order.index(dim) for dim in range(rank)]))
    if target in RESHAPES or TAKEN in node.meta:
        return lambda part: (aten.reshape_as.default, (part, source))
    return None


def takes_all(given: tuple[Any, ...]) -> bool:
    """Whether a slice (dimension, start, end, step) is the whole of its source, as of tokens in ``x[:, :, :4] = 0``."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    _, start, end, step = *given, *defaults[len(given) :]
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end == sys.maxsize))


def result_of(several: fx.Node, index: Any) -> View | None:
    """One of the parts that a split makes, as the slice that it is."""
    source = several.args[0] if several.args else None
    if several.target not in SPLITS or several.kwargs or not isinstance(source, fx.Node):
        return None
    dim = several.args[2] if len(several.args) > 2 else 0
    sizes = [part.shape[dim] for part in several.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    begin = sum(sizes[:index])
    rest = (dim, begin, begin + sizes[index])
    return View(
        source,
        lambda other: (aten.slice.Tensor, (other, *rest)),
        lambda part: (aten.slice_scatter.default, (source, part, *rest)),
    )


def may_alias(node: fx.Node) -> bool:
    """Whether a value of ``node`` may share memory with one of its arguments."""
    return bool(sources(node))


def sources(node: fx.Node) -> list[fx.Node]:
    """The arguments that a value of ``node`` may share memory with; of what is no operator, all."""
    if node.op == "output":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        several = node.all_input_nodes
        return several if node.target is not operator.getitem or may_alias(several[0]) else []
    if node.target.overloadpacket in UNDECLARED_ALIASES:
        return [one for one in tree_leaves(node.args[0]) if isinstance(one, fx.Node)]
    schema = node.target._schema
    if not any(returned.alias_info is not None for returned in schema.returns):
        return []
    value = node.meta.get("val")
    if node.target.overloadpacket is aten.to and node.args[0].meta["val"].dtype != value.dtype:  # type: ignore[union-attr]
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    aliased = [given.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    return [one for one in tree_leaves(aliased) if isinstance(one, fx.Node)]


def allocates(node: fx.Node) -> bool:
    """Whether it lies in memory of its own, which is nobody else's before."""
    return node.op == "call_function" and not may_alias(node) and not is_mutable(node)


def overlaps(value: torch.Tensor) -> bool:
    """Whether several elements are one, as those of an expanded dimension."""
    return any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def linked(node: fx.Node) -> list[fx.Node]:
    """Every value that may share memory with ``node``, itself included: what it may be made of, and what may be made of
    those.  What else such a value may be made of lies elsewhere, as another part of a ``cat``."""
    found = reached([node], sources)
    return reached(found, lambda one: [user for user in one.users if one in sources(user)])


def reached(start: Sequence[fx.Node], near: Callable[[fx.Node], Sequence[fx.Node]]) -> list[fx.Node]:
    found, stack = dict.fromkeys(start), [*start]
    while stack:
        fresh = [other for other in near(stack.pop()) if other not in found]
        found.update(dict.fromkeys(fresh))
        stack += fresh
    return list(found)
