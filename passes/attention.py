"""Pass 3: recognise attention by its structure.  An analysis: fills ``traced.calls``.

Two forms end in the same `AttentionCall`.  A call of ``scaled_dot_product_attention`` says everything itself.  An
eager chain is found from its softmax over the key axis: backwards through scaling, softcap and masks to the product of
queries and keys, forwards to the product with the values.  Declines, with the node, when the chain has an operator it
has no reading for; then the sequence nodes stay uncovered and are refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axis
from selective_compile.passes.contraction import Contraction, contraction_of
from selective_compile.passes.heads import Unreadable, operand_of
from selective_compile.passes.score_chain import ScoreChain, read_scores
from selective_compile.passes.traced_graph import AttentionCall, MaskTerm, TracedGraph, module_path, source_line

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
SOFTMAX = (aten.softmax.int, aten._softmax.default)


def recognise_attention(traced: TracedGraph) -> int:
    """Fill ``traced.calls``; refuse every sequence node that no call covers.  Returns the number of calls."""
    for node in traced.graph.nodes:
        try:
            if node.target is SDPA and node in traced.axes:
                traced.calls.append(read_sdpa(traced, node))
            elif node.target in SOFTMAX and node in traced.sequence_nodes:
                traced.calls.append(read_eager(traced, node))
        except Unreadable as found:
            traced.refuse(found.node, f"part of an attention that cannot be read: {found}")
    covered = {node for call in traced.calls for node in call.covers}
    for node, kind in traced.sequence_nodes.items():
        if node not in covered and not traced.refusals:
            traced.refuse(node, f"{kind}, and it is not part of an attention that is recognised")
    return len(traced.calls)


def read_sdpa(traced: TracedGraph, node: fx.Node) -> AttentionCall:
    query, key, value = node.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
    if given.get("dropout_p"):
        raise Unreadable(node, "it drops out weights, so the model is not in evaluation mode")
    for operand in (query, key, value):
        require_token_dimension(traced, operand, rank(operand) - 2)
    heads = tuple(range(rank(query) - 2))
    mask = given.get("attn_mask")
    scale = given.get("scale")
    if scale is not None and not isinstance(scale, float):
        raise Unreadable(node, f"its scale must be a constant, got {scale}")
    return AttentionCall(
        name=call_name(traced, node),
        form="sdpa",
        output=node,
        output_order=(*heads, rank(query) - 2, rank(query) - 1),
        query=operand_of(traced, query, rank(query) - 2, heads, rank(query) - 1),
        key=operand_of(traced, key, rank(key) - 2, heads, rank(key) - 1),
        value=operand_of(traced, value, rank(value) - 2, heads, rank(value) - 1),
        scale=scale if isinstance(scale, float) else 1 / math.sqrt(query.meta["val"].shape[-1]),
        softcap=0.0,
        causal_flag=bool(given.get("is_causal")),
        masks=() if mask is None else (mask_term(mask),),
        source_line=source_line(node),
        covers=frozenset({node}),
    )


def mask_term(mask: Any) -> MaskTerm:
    assert isinstance(mask, fx.Node)
    return MaskTerm(node=mask, kind="keep" if mask.meta["val"].dtype == torch.bool else "add")


def require_token_dimension(traced: TracedGraph, node: fx.Node, dim: int) -> None:
    axes = traced.axes.get(node)
    if axes is None or axes.holding(Axis.TOKEN) != (dim,) or axes.dims[dim] != (Axis.TOKEN,):
        raise Unreadable(node, f"its dimension {dim} must enumerate the tokens of one request, and no other may")


def read_eager(traced: TracedGraph, softmax: fx.Node) -> AttentionCall:
    chain = read_scores(traced, softmax)
    mixing = values_product(traced, softmax)
    scores, weights = chain.product, mixing.contraction
    assert scores is not None
    query_letter, key_letter = pair_letters(traced, chain)
    heads = tuple(letter for letter in scores.out if letter not in (query_letter, key_letter))
    (depth,) = scores.summed
    value_letter = next(x for x in weights.right_letters if x not in weights.left_letters)
    swapped = query_letter in scores.right_letters
    query_side, key_side = (1, 0) if swapped else (0, 1)
    return AttentionCall(
        name=call_name(traced, softmax),
        form="eager",
        output=mixing.node,
        output_order=output_order(weights, value_letter, mixing.query_letter),
        query=letters_operand(traced, scores, query_side, query_letter, heads, depth),
        key=letters_operand(traced, scores, key_side, key_letter, heads, depth),
        value=letters_operand(traced, weights, 1, weights.summed[0], mixing.heads, value_letter),
        scale=chain.scale,
        softcap=chain.softcap,
        causal_flag=False,
        masks=tuple(chain.masks),
        source_line=source_line(softmax),
        covers=frozenset({softmax, mixing.node}),
    )


class ValuesProduct:
    """The product of attention weights and values that a softmax leads to."""

    def __init__(self, node: fx.Node, contraction: Contraction) -> None:
        self.node, self.contraction = node, contraction
        free = [x for x in contraction.left_letters if x in contraction.out]
        self.query_letter = free[-1]
        self.heads = tuple(x for x in free if x != self.query_letter)


PASSED_THROUGH = (aten.to, aten.reshape, aten._to_copy, aten.clone, aten.contiguous, aten.type_as, aten.expand)


def values_product(traced: TracedGraph, softmax: fx.Node) -> ValuesProduct:
    node = softmax
    while True:
        users = [user for user in node.users if user in traced.axes]
        if len(users) != 1:
            raise Unreadable(node, f"its weights must go to one product with the values, they go to {len(users)} nodes")
        (user,) = users
        found = contraction_of(user)
        if found is not None and user in traced.sequence_nodes and found.left is node and found.bias is None:
            return ValuesProduct(user, found)
        if getattr(user.target, "overloadpacket", None) not in PASSED_THROUGH or not traced.axes[user].is_pair:
            raise Unreadable(user, f"no reading for {user.target} between the softmax and the product with the values")
        node = user


def pair_letters(traced: TracedGraph, chain: ScoreChain) -> tuple[str, str]:
    """The letters of the query and the key dimension of the scores: the softmax runs along the key's, which is last."""
    scores = chain.product
    assert scores is not None
    dims = traced.axes[chain.product_node].holding(Axis.TOKEN)
    query, key = (scores.out[dim] for dim in dims)
    return query, key


def letters_operand(
    traced: TracedGraph, product: Contraction, side: int, token: str, heads: tuple[str, ...], depth: str
) -> Any:
    node = (product.left, product.right)[side]
    token_dim, depth_dim = product.dim(side, token), product.dim(side, depth)
    if token_dim is None or depth_dim is None:
        raise Unreadable(node, "its tokens and its head size must be dimensions of their own")
    require_token_dimension(traced, node, token_dim)
    head_dims = tuple(d for letter in heads if (d := product.dim(side, letter)) is not None)
    return operand_of(traced, node, token_dim, head_dims, depth_dim)


def output_order(weights: Contraction, value: str, query: str) -> tuple[int, ...]:
    """For each dimension of the output: its place in (heads ..., tokens, value size)."""
    heads = [letter for letter in weights.left_letters if letter in weights.out and letter != query]
    source = [*heads, query, value]
    return tuple(source.index(letter) for letter in weights.out)


def rank(node: fx.Node) -> int:
    return node.meta["val"].dim()


def call_name(traced: TracedGraph, node: fx.Node) -> str:
    path = module_path(node) or "attention"
    taken = sum(call.name.split("#")[0] == path for call in traced.calls)
    return f"{path}#{taken + 1}" if taken else path
