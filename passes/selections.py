"""Pass 3: recognise how a sparse attention selects its keys.  An analysis: fills ``traced.selections``.

Before::  scores = sum over heads of weights * relu(scale * query @ key.T), masked;  topk(scores, min(k, S));
          ones.scatter(-1, numbers of the best, False), which hides all other keys from an attention
After::   one `KeySelection` for each ``topk``, with the tensors that hold its marks

Found from a ``topk`` over the key axis: backwards through masks to the sum over heads, on through relu to the product
of queries and keys, forwards to the marks.  What the scores are, and that the numbers of the selected keys go nowhere
else, is shown by structure; that heads and dimensions were read rightly is tried on random values.  Declines, with the
node, where an operator has no reading; equal scores are chosen from as `selective_compile.selection_ops` says.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention import letters_operand
from selective_compile.passes.attention_calls import KeyMarks, KeySelection, Operand
from selective_compile.passes.axes import Axis, Selected
from selective_compile.passes.contraction import Contraction, contraction_of
from selective_compile.passes.evaluate import SHAPED_LIKE, evaluate
from selective_compile.passes.heads import Unreadable, plain_size
from selective_compile.passes.refusals import module_path, source_line
from selective_compile.passes.score_chain import ScoreChain, step_back
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
SELECT, MARK = aten.topk.default, aten.scatter.value
CASTS = (aten.to, aten._to_copy, aten.clone, aten.contiguous)
FILLED = (
    *(aten.ones, aten.zeros, aten.full, aten.new_ones, aten.new_zeros, aten.new_full),
    *(aten.ones_like, aten.zeros_like, aten.full_like),
)
RESHAPED = (aten.reshape, aten.squeeze, aten.unsqueeze)
TRIED_TOKENS = 7


def recognise_selections(traced: TracedGraph) -> int:
    """Fill ``traced.selections``; refuse each selection that cannot be read.  Returns the number of selections."""
    for node in traced.graph.nodes:
        if node.target is SELECT and node in traced.sequence_nodes:
            try:
                traced.selections.append(read_selection(traced, node))
            except Unreadable as found:
                traced.refuse(found.node, f"part of a selection of keys that cannot be read: {found}")
    return len(traced.selections)


def read_selection(traced: TracedGraph, node: fx.Node) -> KeySelection:
    named = dict(zip(("dim", "largest", "sorted"), node.args[2:], strict=False)) | dict(node.kwargs)
    if not named.get("largest", True):
        raise Unreadable(node, "it selects the keys with the lowest scores")
    (selected,) = (f for dim in traced.axes[node].dims for f in dim if isinstance(f, Selected))
    chain, total = scores_before_masks(traced, node)
    query, key, weights, scale = read_index_scores(traced, chain, total)
    marks = marks_of(traced, node)
    selection = KeySelection(
        name=module_path(node) or "selection",
        output=node,
        query=query,
        key=key,
        weights=weights,
        scale=scale,
        count=selected.count,
        masks=tuple(chain.masks),
        marks=marks,
        source_line=source_line(node),
        covers=frozenset({node, *(mark.node for mark in marks), *chain.covers}),
    )
    try_scores(traced, selection, total, chain.scale)
    return selection


def scores_before_masks(traced: TracedGraph, selecting: fx.Node) -> tuple[ScoreChain, fx.Node]:
    """What is done to the scores between the sum over heads and the selection, and the sum itself."""
    node: Any = selecting.args[0]
    require_one_of_each_pair(traced, node)
    chain, reshaped = ScoreChain(), False
    while contraction_of(node) is None:
        if node in traced.axes and getattr(node.target, "overloadpacket", None) in RESHAPED:
            node, reshaped = node.args[0], True
            continue
        masks = len(chain.masks)
        node = step_back(traced, chain, node)
        if reshaped and len(chain.masks) > masks:
            raise Unreadable(node, "its mask is applied before its scores have the shape of queries and keys")
    if chain._after_tanh is not None or chain.sinks is not None:
        raise Unreadable(node, "its scores are capped, or compared with sinks")
    if chain.narrowest < 4:
        raise Unreadable(node, "its scores are rounded to less than float32, which makes many of them equal")
    return chain, node


def require_one_of_each_pair(traced: TracedGraph, node: fx.Node) -> None:
    if [d for d in traced.axes[node].dims if d not in ((), (Axis.BATCH,))] != [(Axis.TOKEN,)] * 2:
        raise Unreadable(node, "it must hold one number for each query and key")


@dataclass(kw_only=True)
class HeadScores:
    """``relu(inner * product) * outer``, for each head."""

    product: Contraction
    inner: float
    outer: float


def read_index_scores(
    traced: TracedGraph, chain: ScoreChain, total: fx.Node
) -> tuple[Operand, Operand, Operand, float]:
    """Query, key, weights and scale of the sum over heads ``total``."""
    summed = contraction_of(total)
    assert summed is not None
    sides = [traced.axes[side].is_pair for side in (summed.left, summed.right)]
    if sorted(sides) != [False, True] or len(summed.summed) != 1 or summed.bias is not None:
        raise Unreadable(total, "it must sum weights times scores over their heads")
    side = sides.index(True)
    scores, weights = (summed.left, summed.right) if side == 0 else (summed.right, summed.left)
    letters, own = (summed.left_letters, summed.right_letters)[side], (summed.right_letters, summed.left_letters)[side]
    head = summed.summed[0]
    first, second = (letters[dim] for dim in traced.axes[scores].holding(Axis.TOKEN))
    query_letter, key_letter = (first, second) if second not in own else (second, first)
    if key_letter in own or query_letter not in own or head not in own:
        raise Unreadable(total, "the weights of its heads must be those of the query")
    if summed.out.index(query_letter) > summed.out.index(key_letter):
        raise Unreadable(total, "its scores must have queries before keys")
    found = read_head_scores(traced, scores)
    if not found.outer * chain.scale > 0:
        raise Unreadable(scores, "its scores are negated")
    heads = plain_size(traced, scores, letters.index(head))
    query, key = operands_of(traced, found.product, *(letters.index(x) for x in (query_letter, key_letter, head)))
    return query, key, weights_operand(traced, weights, own.index(query_letter), own.index(head), heads), found.inner


def read_head_scores(traced: TracedGraph, node: Any) -> HeadScores:
    inner, outer, rectified, width = 1.0, 1.0, False, 8
    while True:
        width = min(width, node.meta["val"].dtype.itemsize)
        product = contraction_of(node)
        packet = getattr(node.target, "overloadpacket", None)
        if product is not None:
            break
        if packet in (aten.mul, aten.div) and isinstance(node.args[1], (int, float)) and not node.kwargs:
            factor = node.args[1] if packet is aten.mul else 1 / node.args[1]
            inner, outer = (inner * factor, outer) if rectified else (inner, outer * factor)
        elif packet is aten.relu and not rectified:
            rectified = True
        elif packet not in CASTS or not node.meta["val"].dtype.is_floating_point:
            raise Unreadable(node, f"no reading for {node.target} between queries, keys and the sum over heads")
        node = node.args[0]
    if not rectified or width < 4 or len(product.summed) != 1 or product.bias is not None:
        raise Unreadable(node, "it must be relu of queries times keys, in float32")
    return HeadScores(product=product, inner=inner, outer=outer)


def operands_of(traced: TracedGraph, product: Contraction, query: int, key: int, head: int) -> tuple[Operand, Operand]:
    """Query and key of a product whose result has queries, keys and heads at these dimensions."""
    of_query, of_key, of_head = (product.out[dim] for dim in (query, key, head))
    side = 1 if of_key in product.right_letters else 0
    if product.dim(1 - side, of_key) is not None or product.dim(1 - side, of_head) is None:
        node = (product.left, product.right)[1 - side]
        raise Unreadable(node, "its queries must have heads, and not the numbers of keys")
    heads = {of_head: plain_size(traced, (product.left, product.right)[1 - side], product.dim(1 - side, of_head) or 0)}
    (depth,) = product.summed
    found = (
        letters_operand(traced, product, 1 - side, of_query, heads, depth, shareable=False),
        letters_operand(traced, product, side, of_key, heads, depth, shareable=True),
    )
    uncast = (before_cast(found[0]), before_cast(found[1]))
    return uncast if uncast[0].node.meta["val"].dtype == uncast[1].node.meta["val"].dtype else found


def before_cast(operand: Operand) -> Operand:
    """A wider type holds the same numbers: what is kept is the narrower one."""
    node, source = operand.node, operand.node.args[0] if operand.node.args else None
    if getattr(node.target, "overloadpacket", None) not in CASTS or not isinstance(source, fx.Node):
        return operand
    was, is_ = source.meta["val"].dtype, node.meta["val"].dtype
    widened = was.is_floating_point and torch.promote_types(was, is_) == is_
    return replace(operand, node=source) if widened else operand


def weights_operand(traced: TracedGraph, node: fx.Node, token: int, head: int, heads: int) -> Operand:
    dims = traced.axes[node].dims
    rest = [d for d in range(len(dims)) if d not in (token, head)]
    if dims[token] != (Axis.TOKEN,) or any(dims[d] not in ((), (Axis.BATCH,)) for d in rest):
        raise Unreadable(node, "the weights of its heads must be those of one token")
    if plain_size(traced, node, head) != heads:
        raise Unreadable(node, f"it must have a weight for each of {heads} heads")
    return Operand(node=node, order=(*rest, token, head), heads=heads, head_size=1)


def marks_of(traced: TracedGraph, selecting: fx.Node) -> tuple[KeyMarks, ...]:
    """Everything that the numbers of the selected keys are written into; they may go nowhere else."""
    found, stack = [], list(selecting.users)
    while stack:
        node = stack.pop()
        packet = getattr(node.target, "overloadpacket", None)
        if node.target is operator.getitem and node.args[1] == 0 and node.users:
            raise Unreadable(node, "the scores of the selected keys are used")
        if node.target is operator.getitem or packet in CASTS:
            stack += node.users
        elif node.target is MARK and node in traced.sequence_nodes:
            found.append(read_marks(traced, node))
        elif packet not in SHAPED_LIKE or any(given is not node.args[0] for given in tensors_of(node)):
            raise Unreadable(node, f"no reading for {node.target} of the numbers of selected keys")
    if not found:
        raise Unreadable(selecting, "the selected keys are marked nowhere")
    return tuple(found)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    return [given for given in node.all_input_nodes if isinstance(given.meta.get("val"), torch.Tensor)]


def read_marks(traced: TracedGraph, node: fx.Node) -> KeyMarks:
    base, marked = node.args[0], node.args[3]
    require_one_of_each_pair(traced, node)
    if not isinstance(base, fx.Node) or getattr(base.target, "overloadpacket", None) not in FILLED:
        raise Unreadable(node, "it must mark keys in a tensor that holds one number")
    values = evaluate(traced, base, batch=1, tokens=2, given={})
    unmarked = values.flatten()[0].item()
    if not isinstance(marked, (bool, int, float)) or not bool((values == unmarked).all()):
        raise Unreadable(node, "it must mark keys by one number")
    return KeyMarks(node=node, marked=marked, unmarked=unmarked)


def try_scores(traced: TracedGraph, selection: KeySelection, total: fx.Node, times: float) -> None:
    """The scores of random queries, keys and weights, then scaled ``times``, must be those that were read, times one
    positive number."""
    generator = torch.Generator().manual_seed(0)
    given: dict[fx.Node, torch.Tensor] = {}
    rows = []
    for operand in (selection.query, selection.key, selection.weights):
        value = operand.node.meta["val"]
        shape = [
            TRIED_TOKENS if dim == (Axis.TOKEN,) else plain_size(traced, operand.node, i)
            for i, dim in enumerate(traced.axes[operand.node].dims)
        ]
        if operand.node not in given:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            given[operand.node] = drawn.to(value.dtype)
        moved = given[operand.node].permute(operand.order)
        rows.append(moved.reshape(TRIED_TOKENS, operand.heads, operand.head_size).double())
    query, key, weights = rows
    theirs = evaluate(traced, total, batch=1, tokens=TRIED_TOKENS, given=given).double().flatten()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    overlap = (torch.einsum("qhd,chd->qhc", query, key) * selection.scale).relu()
    ours = torch.einsum("qh,qhc->qc", weights[..., 0], overlap).flatten()
    ratio = float((ours @ theirs) / (ours @ ours)) if bool(ours.any()) else 0.0
    if not (ratio * times > 0 and math.isfinite(ratio)) or not torch.allclose(
        theirs, ratio * ours, rtol=1e-3, atol=1e-4
    ):
        raise Unreadable(total, "its scores are not the weighted sum of rectified products that it looks like")
