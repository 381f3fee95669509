"""Queries, keys and values before heads are repeated and dimensions moved about."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import Operand
from selective_compile.passes.axes import Axis
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
MOVES = (
    *(aten.reshape, aten.expand, aten.unsqueeze, aten.squeeze, aten.transpose, aten.permute, aten.slice, aten.select),
    *(aten.repeat_interleave, aten.clone, aten.contiguous, aten.repeat, aten.movedim, aten.t),
    *(aten.flatten, aten.unflatten),
)
CASTS = (aten.to, aten._to_copy, aten.type_as)
PROBE_TOKENS = 3


class Unreadable(Exception):
    """An attention that cannot be read; ``node`` is where the reading stops."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def operand_of(
    traced: TracedGraph,
    node: fx.Node,
    token: int,
    heads: tuple[int, ...],
    depth: int,
    *,
    shareable: bool = True,
    dtype: torch.dtype | None = None,
) -> Operand:
    """The earliest value that ``node`` only rearranges, read as ``[tokens, heads, head size]``.

    Also one of ``dtype`` that was cast to a type in which all its numbers are.

    ``node`` has its tokens, heads and head size at the given dimensions.  Each candidate further up the chain of data
    movements is checked by running the chain on element numbers: head h of ``node`` must be head ``h // group`` of
    it, with a group of 1 unless heads are ``shareable``.
    """
    head_size = int(node.meta["val"].shape[depth])
    heads = tuple(d for d in heads if not only_batch(traced, node, d))
    best = given = as_given(traced, node, token, heads, depth)
    source = node
    while isinstance(source.args[0] if source.args else None, fx.Node) and (
        getattr(source.target, "overloadpacket", None) in MOVES or widens(source, dtype)
    ):
        source = source.args[0]  # type: ignore[assignment]
        candidate = leading_tokens(traced, source, head_size)
        fits = candidate is not None and (shareable or candidate.heads == given.heads)
        if candidate is not None and fits and repeats(traced, candidate, node, (token, *heads, depth), given.heads):
            best = candidate
    return best


def widens(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether it is a cast of numbers of ``dtype``, 16 bits of floats, that changes none of them."""
    if dtype not in (torch.bfloat16, torch.float16) or getattr(node.target, "overloadpacket", None) not in CASTS:
        return False
    source: Any = node.args[0]
    return source.meta["val"].dtype == dtype and node.meta["val"].dtype in (torch.float32, torch.float64)


def require_grouped(node: fx.Node, sizes: list[int], full: list[int]) -> None:
    """Head h of all must read head ``h // group`` of ``node``, whose sizes (1: broadcast) stand beside the full ones.

    Heads are numbered row-major, so once a dimension is shared, every later one must be shared as a whole.
    """
    shared = False
    for size, all_heads in zip(sizes, full, strict=True):
        if all_heads % size or (shared and size != 1):
            raise Unreadable(node, f"its heads {sizes} are not shared by consecutive heads of {full}")
        shared = shared or size != all_heads


def only_batch(traced: TracedGraph, node: fx.Node, dim: int) -> bool:
    return traced.axes[node].dims[dim] == (Axis.BATCH,)


def as_given(traced: TracedGraph, node: fx.Node, token: int, heads: tuple[int, ...], depth: int) -> Operand:
    rest = [d for d in range(node.meta["val"].dim()) if d not in (token, *heads, depth)]
    if any(traced.axes[node].dims[d] not in ((), (Axis.BATCH,)) for d in rest):
        raise Unreadable(node, "it has a dimension that is neither batch, heads, tokens nor head size")
    count = 1
    for d in heads:
        count *= plain_size(traced, node, d)
    return Operand(
        node=node, order=(*rest, token, *heads, depth), heads=count, head_size=int(node.meta["val"].shape[depth])
    )


def plain_size(traced: TracedGraph, node: fx.Node, dim: int) -> int:
    """Heads in a dimension, also where they are merged with the batch (``B * H``)."""
    factors = traced.axes[node].dims[dim]
    if Axis.TOKEN in factors:
        raise Unreadable(node, f"its dimension {dim} must be heads, and it enumerates tokens")
    size = 1
    for factor in factors:
        size *= factor if isinstance(factor, int) else 1
    return size


def leading_tokens(traced: TracedGraph, source: fx.Node, head_size: int) -> Operand | None:
    """``source`` as an operand with its tokens first and its other dimensions in order, if that has whole heads."""
    axes = traced.axes.get(source)
    if axes is None:
        return None
    tokens = axes.holding(Axis.TOKEN)
    if len(tokens) != 1 or axes.dims[tokens[0]] != (Axis.TOKEN,):
        return None
    rest = [d for d in range(len(axes.dims)) if d != tokens[0]]
    width = 1
    for d in rest:
        width *= plain_size(traced, source, d)
    if width % head_size:
        return None
    return Operand(node=source, order=(tokens[0], *rest), heads=width // head_size, head_size=head_size)


def repeats(traced: TracedGraph, candidate: Operand, node: fx.Node, order: tuple[int, ...], heads: int) -> bool:
    """Whether head h of ``node`` is head ``h // (heads // candidate.heads)`` of the candidate, for every element."""
    if heads % candidate.heads:
        return False
    shape = [
        PROBE_TOKENS if dim == (Axis.TOKEN,) else plain_size(traced, candidate.node, i)
        for i, dim in enumerate(traced.axes[candidate.node].dims)
    ]
    numbers = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").reshape(shape)
    moved = evaluate(traced, node, batch=1, tokens=PROBE_TOKENS, given={candidate.node: numbers})
    rest = [d for d in range(moved.dim()) if d not in order]
    seen = moved.permute(*rest, *order).reshape(PROBE_TOKENS, heads, candidate.head_size)
    expected = numbers.permute(*candidate.order).reshape(PROBE_TOKENS, candidate.heads, candidate.head_size)
    return torch.equal(seen.long(), expected.repeat_interleave(heads // candidate.heads, dim=1))


def sizes_of(traced: TracedGraph, node: fx.Node) -> list[int]:
    """Of one request of as many tokens as are tried."""
    if node not in traced.axes:
        raise Unreadable(node, "which of its dimensions enumerate tokens is not known")
    sizes = []
    for dim in traced.axes[node].dims:
        if not all(isinstance(factor, (int, Axis)) for factor in dim):
            raise Unreadable(node, "it has a dimension that is neither batch, tokens nor a constant")
        constant = math.prod(factor for factor in dim if isinstance(factor, int))
        sizes.append(constant * PROBE_TOKENS ** dim.count(Axis.TOKEN))
    return sizes


def sinks_of(traced: TracedGraph, node: fx.Node, heads: int) -> fx.Node:
    """The value with one number for each head that ``node`` ``[..., heads, tokens or 1, 1]`` only repeats."""
    source = node
    while plain_count(traced, source) != heads or not traced.axes[source].is_constant:
        if getattr(source.target, "overloadpacket", None) not in MOVES or not isinstance(source.args[0], fx.Node):
            raise Unreadable(node, "its sinks are not one number for each head")
        source = source.args[0]
    sizes = [int(size) for size in source.meta["val"].shape]
    numbers = torch.arange(heads, dtype=torch.int64, device="cpu").reshape(sizes)
    moved = evaluate(traced, node, batch=1, tokens=PROBE_TOKENS, given={source: numbers}).reshape(heads, -1)
    if (
        node.meta["val"].dim() < 3
        or node.meta["val"].shape[-1] != 1
        or not torch.equal(moved, numbers.reshape(heads, 1).expand_as(moved))
    ):
        raise Unreadable(node, "its sinks are not those of the heads in their order")
    return source


def plain_count(traced: TracedGraph, node: fx.Node) -> int:
    """Elements for one token of one request."""
    count = 1
    for dim in traced.axes[node].dims:
        for factor in dim:
            count *= factor if isinstance(factor, int) else 1
    return count
