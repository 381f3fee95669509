"""Pass 1 for linear attention with a decay: the one block that a graph writes out becomes a recurrence.

Before::  q, k, v ``[B, H, S, .]``: (q @ k^T * decay) @ v, decay[h, i, j] = exp(-slope[h] * (i - j)), 0 where j > i
          and q' @ zeros added to it, for what a state holds in front of the first token
After::   selective.function([q, k, v, slopes], "linear attention", [B, H, S, P])

A model cuts a request into blocks with a state between them (Lightning Attention: Qin et al. 2024, section 3.2), and
Dynamo traces as many as there are; so that a graph of one block bounds requests.  That longer ones go on as the
recurrence does is tried on the model itself (`selective_compile.block_loops`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from selective_compile.passes.evaluate import ancestors, constants_in, evaluate
from selective_compile.passes.lengths import SHORTEST
from selective_compile.passes.recurrence_families import LINEAR_ATTENTION
from selective_compile.passes.recurrences import register, whole
from selective_compile.passes.traced_graph import Input, TracedGraph, arguments_of, is_lost, is_mutable

aten = torch.ops.aten
TRIED, LONGEST_TABLE = (2, 12, 65, 521), 1024  # tokens; of a table all rows are looked at, or it is left
AROUND = (-1, 0, 1, 2)  # numbers in the graph, where something may happen to a distance
CANNOT_EVALUATE = (RuntimeError, ValueError, IndexError, TypeError)
SMALLEST = 1e-30  # factors below tell nothing of a slope
ROUNDINGS = 8  # of a factor, in its own type


def whole_linear_attention(traced: TracedGraph) -> int:
    """Replaces each by one node; returns how many."""
    drop_whole_slices(traced)
    found = 0
    for node in list(traced.graph.nodes):
        parts = parts_of(node)
        if parts is None:
            continue
        *rows, decay = parts
        slopes = slopes_of(traced, decay)
        if slopes is None or len(slopes) != rows[0].meta["val"].shape[1]:
            continue
        with traced.graph.inserting_before(node):
            constant, last = register(traced, f"slopes_{node.name}", slopes), with_nothing_added(node)
            written = whole(traced, [*rows, constant], LINEAR_ATTENTION.name, shaped=last, like=node)
        traced.proved_from += [given for given in weights_of(traced, decay) if given not in traced.proved_from]
        last.replace_all_uses_with(written)
        found += 1
    if found:
        traced.graph.eliminate_dead_code()
        traced.module.recompile()
    return found


def drop_whole_slices(traced: TracedGraph) -> None:
    """Of what is cut to ``min(256, S)`` tokens, in a graph for no more, nothing is cut."""
    for node in list(traced.graph.nodes):
        if node.target is aten.slice.Tensor:
            before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
            if list(map(traced.sizes.expression, before)) == list(map(traced.sizes.expression, after)):
                node.replace_all_uses_with(node.args[0])
                traced.graph.erase_node(node)


def parts_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """Query, key and value ``[B, H, S, .]`` and the decay, where ``node`` is such an attention."""
    if node.target is not aten.matmul.default or node.meta["val"].dim() != 4:
        return None
    weighted, value = arguments_of(node)
    if weighted.target is not aten.mul.Tensor or not all(isinstance(each, fx.Node) for each in weighted.args):
        return None
    for scores, decay in (weighted.args, weighted.args[::-1]):
        if scores.target is aten.matmul.default and scores.meta["val"].shape == weighted.meta["val"].shape:
            query, turned = scores.args
            if turned.target is aten.transpose.int and {dim % 4 for dim in turned.args[1:]} == {2, 3}:
                found = (query, turned.args[0], value)
                return (*found, decay) if alike(found) else None
    return None


def alike(rows: Sequence[fx.Node]) -> bool:
    """Whether all are of as many requests and heads."""
    shapes = [row.meta["val"].shape for row in rows]
    return all(len(shape) == 4 and list(map(str, shape[:2])) == list(map(str, shapes[0][:2])) for shape in shapes)


def with_nothing_added(node: fx.Node) -> fx.Node:
    """The sum of ``node`` and a product with zeros, where that is what reads it; else the node itself."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return node
    (other,) = [each for each in users[0].all_input_nodes if each is not node] or [node]
    empty = other.target is aten.matmul.default and arguments_of(other)[1].target is aten.zeros.default
    return users[0] if empty and other.meta["val"].shape == node.meta["val"].shape else node


def slopes_of(traced: TracedGraph, decay: fx.Node) -> Tensor | None:
    """``[H]`` float32; None if it is no such decay, or not one for all lengths that the graph is for.

    Tried on lengths, not proved, where it is no table: around every constant that it is computed with.
    """
    weights = weights_of(traced, decay)
    if not all(given.is_buffer for given in weights):
        return None  # what is trained is another tomorrow
    if any(is_lost(traced, node) or is_mutable(node) for node in ancestors(decay)):
        return None
    values = {given.node: given.example for given in weights if isinstance(given.example, Tensor)}
    numbers = set(constants_in(decay, values))
    limit, end = traced.max_tokens, max((*TRIED, *numbers))
    if max(end, limit or 0) > LONGEST_TABLE:
        return None
    around = {number + more for number in numbers for more in AROUND} | {end + 1}
    if limit is not None:  # a table ends there, or behind one token more, and is large
        around = around - set(range(limit, limit + len(AROUND))) | {limit}
    tables = [factors_of(traced, decay, length) for length in sorted({*TRIED, *around}) if length >= SHORTEST]
    known = [table for table in tables if table is not None]
    if not known or (limit is not None and known[-1].shape[-1] < limit):
        return None
    slopes = fitted(known[-1].double())
    fits = all(decays_by(slopes, table) for table in known)
    return slopes.float().to(decay.meta["val"].device) if fits else None


def weights_of(traced: TracedGraph, decay: fx.Node) -> list[Input]:
    """The inputs that it is computed from, but for sizes."""
    needed = set(ancestors(decay))
    return [given for given in traced.inputs if given.node in needed and given.place != "size"]


def factors_of(traced: TracedGraph, decay: fx.Node, length: int) -> Tensor | None:
    """``[H, length, length]``; None where the graph has none of so many tokens, as behind the end of a table."""
    try:
        table = evaluate(traced, decay, batch=1, tokens=length, given={})
    except CANNOT_EVALUATE:
        return None
    square = table.dim() in (3, 4) and table.shape[-2:] == (length, length) and table.shape[:-3].numel() == 1
    return table.reshape(-1, length, length) if square and table.is_floating_point() else None


def fitted(table: Tensor) -> Tensor:
    """``[H]`` from ``[H, S, S]``: by what is left of the first token for all those behind it, by least squares."""
    left = table[:, :, 0]
    distance = torch.arange(left.shape[1], dtype=left.dtype, device=left.device) * (left > SMALLEST)
    return -(distance * left.clamp(min=SMALLEST).log()).sum(1) / (distance * distance).sum(1).clamp(min=1)


def decays_by(slopes: Tensor, table: Tensor) -> bool:
    distance = torch.arange(table.shape[-1], dtype=slopes.dtype, device=slopes.device)
    distance = distance[:, None] - distance
    exponent = slopes[:, None, None] * distance
    expected = torch.exp(-exponent).where(distance >= 0, 0.0)
    # The exponent is rounded, too, and the factor so much the more.
    rounding = ROUNDINGS * (1 + exponent.abs()) * torch.finfo(table.dtype).eps * expected + SMALLEST
    return bool(((table - expected).abs() <= rounding).all() and (slopes >= 0).all())
