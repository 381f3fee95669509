"""Pass 3: recognise attention by its structure.  An analysis: fills ``traced.calls``.

Two forms end in the same `AttentionCall`.  A call of ``scaled_dot_product_attention`` says everything itself.  An
eager chain is found from its softmax over the key axis: backwards through scaling, softcap and masks to the product of
queries and keys, forwards to the product with the values.  Declines, with the node, when the chain has an operator it
has no reading for; then the sequence nodes stay uncovered and are refused.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, MaskTerm, Operand
from selective_compile.passes.axes import Axis, Extended
from selective_compile.passes.contraction import Contraction, contraction_of
from selective_compile.passes.equal_heads import equal_heads
from selective_compile.passes.gated_output import gated_output
from selective_compile.passes.heads import Unreadable, operand_of, plain_size, require_grouped, sinks_of
from selective_compile.passes.refusals import module_path, source_line
from selective_compile.passes.score_chain import ScoreChain, pair_of, passes_through, read_scores, require_width
from selective_compile.passes.traced_graph import DTYPES, TracedGraph

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
    for call in traced.calls:
        dtypes = {operand.node.meta["val"].dtype for operand in (call.query, call.key, call.value)}
        if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
            traced.refuse(call.output, f"queries, keys and values must be of one of {DTYPES}, got {dtypes}")
    read = [*(call.covers for call in traced.calls), *(call.covers for call in traced.selections)]
    covered = {node for nodes in read for node in nodes}
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
    if not rank(query) == rank(key) == rank(value):
        raise Unreadable(node, "its queries, keys and values must have the same number of dimensions")
    sizes = [[plain_size(traced, operand, d) for d in heads] for operand in (query, key, value)]
    for operand, own in zip((key, value), sizes[1:], strict=True):
        require_grouped(operand, own, sizes[0])
    places = (rank(query) - 2, heads, rank(query) - 1)
    query_operand = operand_of(traced, query, *places, shareable=False)
    key_operand, value_operand = alike(
        traced,
        node,
        *([operand_of(traced, x, *places, shareable=shareable) for x in (key, value)] for shareable in (True, False)),
    )
    mask = given.get("attn_mask")
    scale = given.get("scale")
    if scale is not None and not isinstance(scale, float):
        raise Unreadable(node, f"its scale must be a constant, got {scale}")
    return AttentionCall(
        name=call_name(traced, node),
        form="sdpa",
        output=node,
        output_order=(*heads, rank(query) - 2, rank(query) - 1),
        query=query_operand,
        key=key_operand,
        value=value_operand,
        scale=scale if isinstance(scale, float) else 1 / math.sqrt(query.meta["val"].shape[-1]),
        softcap=0.0,
        causal_flag=bool(given.get("is_causal")),
        masks=() if mask is None else (mask_term(mask),),
        source_line=source_line(node),
        covers=frozenset({node}),
    )


def alike(traced: TracedGraph, node: fx.Node, *choices: list[Operand]) -> list[Operand]:
    """The first choice of a key and a value that have the same number of heads, if equal ones are taken for one."""
    for choice in choices:
        fewest = min(operand.heads for operand in choice)
        found = [equal_heads(traced, operand, fewest) for operand in choice]
        if None not in found:
            return [operand for operand in found if operand is not None]
    raise Unreadable(node, "its keys and values must have the same number of heads")


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
    score_heads = head_sizes(traced, chain.product_node, scores.out, (query_letter, key_letter))
    weight_heads = head_sizes(traced, weights.left, weights.left_letters, (mixing.query_letter, mixing.key_letter))
    if math.prod(weight_heads.values()) != math.prod(score_heads.values()):
        raise Unreadable(mixing.node, "its weights are shared by heads: every head must have weights of its own")
    (depth,) = scores.summed
    query_side, key_side = (1, 0) if query_letter in scores.right_letters else (0, 1)
    # Scores may be computed in a wider type than values are in: queries and keys are then those of the values' type.
    narrow = partial(letters_operand, traced, scores, dtype=weights.right.meta["val"].dtype)
    query = narrow(query_side, query_letter, score_heads, depth, shareable=False)
    if query.heads != math.prod(score_heads.values()):
        raise Unreadable(query.node, "its heads are shared by keys: every head must have a query of its own")
    key, value = alike(
        traced,
        softmax,
        *(
            [
                narrow(key_side, key_letter, score_heads, depth, shareable=shareable),
                letters_operand(
                    traced, weights, 1, mixing.key_letter, weight_heads, mixing.value_letter, shareable=shareable
                ),
            ]
            for shareable in (True, False)
        ),
    )
    order = output_order(weights, mixing.value_letter, mixing.query_letter)
    gated = gated_output(traced, softmax, mixing.node) if order == tuple(range(len(order))) else None
    if gated is not None and chain.sinks is not None:
        raise Unreadable(gated.node, "it has sinks among its scores and another on its output")
    sinks = chain.sinks if gated is None else gated.sinks
    return AttentionCall(
        name=call_name(traced, softmax),
        form="eager",
        output=mixing.node if gated is None else gated.node,
        output_order=order,
        query=query,
        key=key,
        value=value,
        scale=chain.scale,
        softcap=chain.softcap,
        causal_flag=False,
        masks=tuple(chain.masks),
        source_line=source_line(softmax),
        covers=frozenset({softmax, mixing.node, *chain.covers, *(gated.covers if gated is not None else ())}),
        sinks=None if sinks is None else read_sinks(traced, softmax, sinks, query.heads),
    )


def read_sinks(traced: TracedGraph, softmax: fx.Node, sinks: fx.Node, heads: int) -> fx.Node | Operand:
    """One number for each head, or for each head of each token: as scores [..., heads, tokens, 1]."""
    query, key = pair_of(traced, softmax)
    axes, rank = traced.axes.get(sinks), len(traced.axes[softmax].dims)
    try:
        return sinks_of(traced, sinks, heads)  # also where they are repeated for each token
    except Unreadable:
        if axes is None or len(axes.dims) != rank or axes.key_dims != (rank + query,):
            raise
    others = tuple(dim for dim in range(rank) if dim not in (rank + query, rank + key))
    found = operand_of(traced, sinks, rank + query, others, rank + key, shareable=False)
    if found.heads != heads or found.head_size != 1:
        raise Unreadable(sinks, "its sinks are not one number for each head of each token")
    return found


class ValuesProduct:
    """The product of attention weights and values that a softmax leads to: a sum over the keys and nothing else."""

    def __init__(self, traced: TracedGraph, node: fx.Node, contraction: Contraction) -> None:
        self.node, self.contraction = node, contraction
        dims = traced.axes[contraction.left].dims
        tokens = traced.axes[contraction.left].holding(Axis.TOKEN)
        if any(dims[dim] != (Axis.TOKEN,) for dim in tokens):
            raise Unreadable(node, "the tokens of its weights must be dimensions of their own")
        self.query_letter, self.key_letter = (contraction.left_letters[dim] for dim in tokens)
        free = [letter for letter in contraction.right_letters if letter not in contraction.left_letters]
        lost = [letter for letter in (*contraction.left_letters, *free) if letter not in contraction.out]
        if lost != [self.key_letter] or len(free) != 1:
            raise Unreadable(node, "it must sum weights times values over the axis of the softmax alone")
        (self.value_letter,) = free


PASSED_THROUGH = (aten.to, aten.reshape, aten._to_copy, aten.clone, aten.contiguous, aten.type_as, aten.expand)


def values_product(traced: TracedGraph, softmax: fx.Node) -> ValuesProduct:
    node, narrowest = softmax, softmax.meta["val"].dtype.itemsize
    while True:
        users = [user for user in node.users if user in traced.axes]
        if len(users) != 1:
            raise Unreadable(node, f"its weights must go to one product with the values, they go to {len(users)} nodes")
        (user,) = users
        found = contraction_of(user)
        if found is not None and user in traced.sequence_nodes and found.left is node and found.bias is None:
            require_width(found.right, narrowest)
            return ValuesProduct(traced, user, found)
        moves = passes_through(user, PASSED_THROUGH) or cuts_sinks(traced, user) or is_for_no_keys(user)
        if not moves or not traced.axes[user].is_pair:
            raise Unreadable(user, f"no reading for {user.target} between the softmax and the product with the values")
        node, narrowest = user, min(narrowest, user.meta["val"].dtype.itemsize)


def is_for_no_keys(node: fx.Node) -> bool:
    """Whether it makes zeros of the weights of a row that sees no key, which are NaN, as kernels do."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("nan")
    return node.target is aten.nan_to_num.default and given in (None, 0.0)


def cuts_sinks(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether a slice takes the weights of sinks off, which no values stand for, and leaves those of all keys."""
    if node.target is not aten.slice.Tensor:
        return False
    before, after = (traced.axes[x].dims[-1] for x in (node.args[0], node))  # type: ignore[index]
    return bool(before) and isinstance(before[0], Extended) and after == (Axis.TOKEN,)


def pair_letters(traced: TracedGraph, chain: ScoreChain) -> tuple[str, str]:
    """The letters of the query and the key dimension of the scores: the softmax runs along the key's."""
    scores = chain.product
    assert scores is not None
    dims = traced.axes[chain.product_node].holding(Axis.TOKEN)
    query, key = (scores.out[dim] for dim in dims)
    return query, key


def head_sizes(traced: TracedGraph, node: fx.Node, letters: tuple[str, ...], tokens: tuple[str, str]) -> dict[str, int]:
    """The letters of a pair's other dimensions, with the heads in each."""
    return {x: plain_size(traced, node, dim) for dim, x in enumerate(letters) if x not in tokens}


def letters_operand(
    traced: TracedGraph,
    product: Contraction,
    side: int,
    token: str,
    heads: dict[str, int],
    depth: str,
    *,
    shareable: bool,
    dtype: torch.dtype | None = None,
) -> Operand:
    node = (product.left, product.right)[side]
    token_dim, depth_dim = product.dim(side, token), product.dim(side, depth)
    if token_dim is None or depth_dim is None:
        raise Unreadable(node, "its tokens and its head size must be dimensions of their own")
    require_token_dimension(traced, node, token_dim)
    dims = [product.dim(side, letter) for letter in heads]
    require_grouped(node, [1 if d is None else plain_size(traced, node, d) for d in dims], list(heads.values()))
    head_dims = tuple(d for d in dims if d is not None)
    return operand_of(traced, node, token_dim, head_dims, depth_dim, shareable=shareable, dtype=dtype)


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
