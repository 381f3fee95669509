"""Recognise latents: keys and values of many heads that are linear maps of a few numbers.  Fills ``call.latent``.

Before::  key[h] = cat(W_k[h] @ c, r), value[h] = W_v[h] @ c           heads * (D + Dv) numbers a token are kept
After::   the same call, which names c, r, W_k and W_v (`Latent`)      len(c) + len(r) numbers a token can be

`flatten` then keeps the row ``cat(c, r)`` alone, and moves the maps to the other side of the products::

    q . cat(W_k[h] @ c, r) = cat(W_k[h].T @ q', q'') . cat(c, r)       the query of head h, by the columns it meets
    sum_j p_j * (W_v[h] @ c_j) = W_v[h] @ (sum_j p_j * c_j)            so the values are the first columns of the rows

Both are equal for any scores and weights, whatever masks, softcap, sinks or selected keys do to them in between.

How it is proved: no operator between the linear layer and the attention may compute; each element of a key or value
must be one of the layer's results, or of another tensor, of the same token.  Which one it is, is found by running that
data movement on element numbers, as in `heads`.  A weight's rows must then lie in the same way for every head, the
columns that are made of it side by side, and all others must be the same for all heads.

Declines, leaving the call as it is: maps with a bias; weights that are computed, or of a class of their own; keys that
several query heads share; on a GPU, rows of which no tile fits into shared memory; and what does not pay.  Decoding
reads all that is kept for few products, so that it takes less time by as much as less is kept; products with rows are
longer than those with keys and values, by which prompts take more.  It pays where the first factor is at least the
second: 71 and 3.4 for DeepSeek-V3, and not for ordinary keys and values, which are maps of the whole hidden state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.passes.attention_calls import AttentionCall, Columns, Latent, Operand, PerHead
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.heads import MOVES, PROBE_TOKENS, Unreadable, leading_tokens, sizes_of
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
# They only put elements of tensors somewhere else.
MOVERS = {
    *(*MOVES, aten.cat, aten.stack, aten.copy, aten.slice_scatter, aten.select_scatter),
    *(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind),
}
# What is made to be written over: an element that is left of it is no element of a layer's result.
CREATORS = {aten.new_empty, aten.new_zeros, aten.empty, aten.zeros, aten.empty_like, aten.zeros_like}
# Numbers that a tile on a GPU has room for, of the latent and beside it; of float32 half as many beside it.
MOST_IN_LATENT, MOST_BESIDE = 512, 256
TENSOR = 2**40  # elements of one tensor are numbered from a multiple of this


def recognise_latents(traced: TracedGraph) -> int:
    """Returns the number of calls that are known to have one."""
    for call in traced.calls:
        try:
            found = latent_of(traced, call)
        except Unreadable:  # a dimension of something on the way has no reading
            continue
        if found is not None and fits_a_tile(found, call.query.node.meta["val"]) and pays(call, found):
            call.latent = found
    return sum(call.latent is not None for call in traced.calls)


def fits_a_tile(latent: Latent, query: Tensor) -> bool:
    """Whether there is a kernel for its rows: without one, keys and values are kept."""
    if query.device.type == "cpu":
        return True
    most_beside = MOST_BESIDE // 2 if query.dtype == torch.float32 else MOST_BESIDE  # more would spill
    return latent.size <= MOST_IN_LATENT and latent.row_size - latent.size <= most_beside


def pays(call: AttentionCall, latent: Latent) -> bool:
    """Whether as much less is kept of a token as there is more to multiply for a query and a key."""
    expanded = call.key.head_size + call.value.head_size
    return call.key.heads * expanded * expanded >= latent.row_size * (latent.row_size + latent.size)


def latent_of(traced: TracedGraph, call: AttentionCall) -> Latent | None:
    if call.lookup is not None or isinstance(call.sinks, Operand):  # which no kernel has beside a latent
        return None
    if not call.query.heads == call.key.heads == call.value.heads:
        return None
    weights = {given.node for given in traced.inputs if given.place == "weight" and is_plain(given.example)}
    of_value, beside = parts_of(call.value.node, lambda node: is_layer(node, weights))
    if len(of_value) != 1 or beside:
        return None
    source: Any = of_value[0].args[0]
    of_key, beside = parts_of(call.key.node, lambda node: is_layer(node, weights) and node.args[0] is source)
    rows = leading_tokens(traced, source, int(source.meta["val"].shape[-1]))
    if len(of_key) != 1 or rows is None or rows.heads != 1:
        return None
    nodes = dict.fromkeys((of_key[0], *(furthest(traced, node) for node in beside)))
    tensors = [per_token(traced, node) for node in nodes]
    key, value = places(traced, call.key, tensors), places(traced, call.value, [per_token(traced, of_value[0])])
    if key is None or value is None:
        return None
    return assembled(rows, tensors, key, (of_key[0], of_value[0]), value)


def is_plain(example: Any) -> bool:
    return isinstance(example, Tensor) and example.dim() == 2 and not is_traceable_wrapper_subclass(example)


def is_layer(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether it is a linear layer on a weight of the model, without a bias."""
    if node.target is not aten.linear.default or node.kwargs or node.args[1] not in weights:
        return False
    return len(node.args) < 3 or node.args[2] is None


def moved(node: fx.Node) -> list[fx.Node]:
    """The tensors whose elements ``node`` puts in other places; none if it computes anything."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in MOVERS and node.target is not operator.getitem:
        return []
    found = [given for given in node.all_input_nodes if isinstance(given.meta.get("val"), (Tensor, list, tuple))]
    return found if len({dtype_of(each) for each in (node, *found)}) == 1 else []


def dtype_of(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    found: torch.dtype = (value if isinstance(value, Tensor) else value[0]).dtype
    return found


def is_created(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in CREATORS


def is_blank(node: fx.Node) -> bool:
    """Whether nothing was written into it, or into what it is a part of."""
    return is_created(node) or (bool(moved(node)) and all(map(is_blank, moved(node))))


def parts_of(node: fx.Node, is_made: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the elements of ``node`` are taken from: nodes that are made as asked for, and others beside them.

    Of the others, the last node before elements of both come together.
    """
    leads: dict[fx.Node, bool] = {}

    def leads_to_made(current: fx.Node) -> bool:
        if current not in leads:
            leads[current] = is_made(current) or any(leads_to_made(each) for each in moved(current))
        return leads[current]

    made: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if is_made(current):
            made[current] = None
        elif leads_to_made(current):
            stack += moved(current)
        elif not is_blank(current):
            others[current] = None
    return list(made), list(others)


def furthest(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """The earliest tensor of tokens that ``node`` alone, and nothing else, is taken from."""
    found = node
    while getattr(node.target, "overloadpacket", None) in MOVES and len(moved(node)) == 1:
        node = node.args[0]  # type: ignore[assignment]
        if leading_tokens(traced, node, 1) is not None:
            found = node
    return found


def per_token(traced: TracedGraph, node: fx.Node) -> Operand:
    """As heads of size 1, in their order."""
    found = leading_tokens(traced, node, 1)
    if found is None:
        raise Unreadable(node, "its tokens must be a dimension of their own")
    return found


def numbered(traced: TracedGraph, operand: Operand, first: int) -> Tensor:
    """The operand's node with numbers in place of its elements: ``first + token * heads + head``."""
    sizes = sizes_of(traced, operand.node)
    numbers = torch.arange(first, first + PROBE_TOKENS * operand.heads, device="cpu")
    back = torch.tensor(operand.order, device="cpu").argsort().tolist()
    return numbers.reshape([sizes[d] for d in operand.order]).permute(back)


def places(traced: TracedGraph, operand: Operand, tensors: list[Operand]) -> tuple[Tensor, Tensor] | None:
    """Of each element [heads, head size] of a token, which of the tensors it is taken from, and which element there."""
    given = {tensor.node: numbered(traced, tensor, i * TENSOR) for i, tensor in enumerate(tensors)}
    given |= unwritten(traced, operand.node, given)
    found = evaluate(traced, operand.node, batch=1, tokens=PROBE_TOKENS, given=given)
    found = found.permute(*operand.order).reshape(PROBE_TOKENS, operand.heads, operand.head_size)
    if bool((found < 0).any()):
        return None
    tensor, element = found // TENSOR, found % TENSOR
    width = torch.tensor([each.heads for each in tensors], device="cpu")[tensor]
    token, column = element // width, element % width
    if not torch.equal(token, torch.arange(PROBE_TOKENS, device="cpu")[:, None, None].expand_as(token)):
        return None  # of another token
    if not all(torch.equal(x, x[:1].expand_as(x)) for x in (tensor, column)):
        return None
    return tensor[0], column[0]


def unwritten(traced: TracedGraph, node: fx.Node, given: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """For each new tensor that ``node`` is written into: a number that is no element's."""
    found: dict[fx.Node, Tensor] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if is_created(current):
            found[current] = torch.full(sizes_of(traced, current), -1, device="cpu")
        elif current not in given:
            stack += moved(current)
    return found


def assembled(
    rows: Operand,
    tensors: list[Operand],
    key: tuple[Tensor, Tensor],
    layers: tuple[fx.Node, fx.Node],
    value: tuple[Tensor, Tensor],
) -> Latent | None:
    """The first of the tensors is the keys' layer, and the only one of the values is theirs."""
    tensor, column = key
    own = (tensor == 0).all(dim=0).nonzero().flatten().tolist()
    of_others = (tensor != 0).all(dim=0) & (tensor == tensor[:1]).all(dim=0) & (column == column[:1]).all(dim=0)
    at, size = (own[0], len(own)) if own else (0, 0)
    side_by_side = bool(own) and own == list(range(at, at + size))
    if not side_by_side or size + int(of_others.sum()) != tensor.shape[1]:
        return None
    keys, values = per_head(layers[0], column[:, at : at + size]), per_head(layers[1], value[1])
    if keys is None or values is None:
        return None
    shared: list[Columns] = []
    for j in of_others.nonzero().flatten().tolist():
        operand, first = tensors[int(tensor[0, j])], int(column[0, j])
        last = shared[-1] if shared else None
        if last is not None and last.operand is operand and first == last.first + last.size:
            shared[-1] = Columns(operand=operand, first=last.first, size=last.size + 1)
        else:
            shared.append(Columns(operand=operand, first=first, size=1))
    return Latent(rows=rows, key=keys, at=at, value=values, shared=tuple(shared))


def per_head(layer: fx.Node, rows: Tensor) -> PerHead | None:
    """The rows [heads, size] of a layer's weight, if they are runs that lie equally far apart."""
    heads, size = rows.shape
    first, step = int(rows[0, 0]), int(rows[1, 0] - rows[0, 0]) if heads > 1 else size
    expected = first + step * torch.arange(heads, device="cpu")[:, None] + torch.arange(size, device="cpu")
    found = PerHead(weight=layer.args[1], first=first, step=step, size=size)  # type: ignore[arg-type]
    return found if torch.equal(rows, expected) and fits(found, heads) else None


def fits(found: PerHead, heads: int) -> bool:
    """Whether the weight's rows can be cut into one piece for each head that has all of the head's in it."""
    begin = begin_of(found, heads)
    return begin >= 0 and found.first - begin + found.size <= found.step


def begin_of(found: PerHead, heads: int) -> int:
    """The first of ``heads * step`` rows of the weight, a head's own in each ``step`` of them."""
    return min(found.first, int(found.weight.meta["val"].shape[0]) - heads * found.step)
