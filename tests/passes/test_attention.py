"""Passes 3 and 5: every spelling of attention is found and replaced; what merely resembles one is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.flatten import flatten
from tests.passes.graphs import analysed, error_of, reasons

Function = Callable[..., Any]
SCALE = 8**-0.5
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.1])


def below(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE


def hide_future(scores: Tensor) -> Tensor:
    return scores.masked_fill(~below(scores.shape[-1]), -math.inf)


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return hide_future(scores_of(q, k)).softmax(-1)


def weigh(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(hide_future(scores_of(q, k)).softmax(-1), v)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return swapped(F.scaled_dot_product_attention(swapped(q), swapped(k), swapped(v), **options))


def merged(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B * H, S, D]"""
    return swapped(x).reshape(-1, x.shape[1], x.shape[3])


def split(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(like.shape[0], like.shape[2], like.shape[1], -1).transpose(1, 2)


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = hide_future(torch.bmm(merged(q), merged(k).transpose(1, 2)) * SCALE).softmax(-1)
    return split(torch.bmm(weights, merged(v)), q)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), merged(q), merged(k).transpose(1, 2), beta=0, alpha=SCALE)
    return split(torch.bmm(hide_future(scores).softmax(-1), merged(v)), q)


def by_other_names(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`x.mT` and `torch.where` with a number are operators of their own."""
    scores = swapped(q) @ swapped(k).mT * SCALE
    return swapped(torch.where(~below(q.shape[1]), -math.inf, scores).softmax(-1) @ swapped(v))


def heads_first_merge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H * B, S, D]"""
    q_, k_, v_ = (x.permute(2, 0, 1, 3).reshape(-1, x.shape[1], 8) for x in (q, k, v))
    mixed = torch.bmm(hide_future(torch.bmm(q_, k_.transpose(1, 2))).softmax(-1), v_)
    return mixed.reshape(4, q.shape[0], q.shape[1], 8).permute(1, 2, 0, 3)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The names of query and key swapped throughout is attention all the same."""
    scores = swapped(k) @ swapped(q).transpose(-1, -2) * SCALE
    return swapped(hide_future(scores).softmax(-1) @ swapped(v))


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(hide_future(torch.tanh(scores_of(q, k) * 3 / 5) * 5).softmax(-1), v)


def added_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.full((q.shape[1], q.shape[1]), -math.inf).triu(1)
    return weigh((hidden + scores_of(q, k)).softmax(-1), v)


def where_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh(torch.where(below(q.shape[1]), scores_of(q, k), torch.tensor(-math.inf)).softmax(-1), v)


def alibi(q: Tensor) -> Tensor:
    """[H, 1, S], as bloom adds it: a slope for each head times the position of the key."""
    slopes = torch.tensor([2.0**-i for i in (1, 2, 3, 5)])
    return slopes[:, None, None] * torch.arange(q.shape[1])[None, None]


def alibi_in_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = alibi(q)[None].expand(q.shape[0], -1, -1, -1).reshape(-1, 1, q.shape[1])
    scores = torch.baddbmm(bias, merged(q), merged(k).transpose(1, 2), beta=1.0, alpha=SCALE)
    return split(torch.bmm(hide_future(scores).softmax(-1), merged(v)), q)


def stable(scores: Tensor) -> Tensor:
    return scores - scores.max(dim=-1, keepdim=True)[0]


def less_largest(scores: Tensor, dim: int) -> Tensor:
    return scores - scores.amax(dim, keepdim=True)


def grouped(q: Tensor, kv: Tensor) -> Tensor:
    scores = torch.einsum("bqkgd,btkd->bkgqt", q.unflatten(2, (2, 2)), kv)
    return torch.einsum("bkgqt,btkd->bqkgd", hide_future(scores).softmax(-1), kv).flatten(2, 3)


def grouped_by_broadcast(q: Tensor, kv: Tensor) -> Tensor:
    q_, kv_ = q.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4), swapped(kv)[:, :, None]
    return (hide_future(q_ @ kv_.transpose(-1, -2)).softmax(-1) @ kv_).permute(0, 3, 1, 2, 4).flatten(2, 3)


def expanded(kv: Tensor) -> Tensor:
    return kv[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3)


def interleaved(kv: Tensor) -> Tensor:
    return kv[:, :, None].expand(-1, -1, 2, -1, -1).flatten(2, 3)


def after_one_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second attention reads the first one's result with nothing between them."""
    return attend(attend(q, k, v), k, v)


def with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """One more score, [1, H, 1, 1], for every query."""
    return torch.cat([scores, sinks.expand(scores.shape[0], -1, scores.shape[2], -1)], -1)


def sinking(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """As gpt_oss does it."""
    scores = stable(with_sinks(hide_future(scores_of(q, k)), w.reshape(1, -1, 1, 1)))
    return weigh(F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1], v)


# (function, heads of its keys and values as the KV cache keeps them)
EXACT: dict[str, tuple[Function, int]] = {
    "einsum": (attend, 4),
    "bmm of batch and heads merged": (by_bmm, 4),
    "baddbmm": (by_baddbmm, 4),
    "mT and where with a number": (by_other_names, 4),
    "heads and batch merged": (heads_first_merge, 4),
    "keys on the left": (keys_first, 4),
    "softcap": (softcapped, 4),
    "added mask": (added_mask, 4),
    "where": (where_mask, 4),
    "scaled after the mask": (lambda q, k, v: weigh((hide_future(scores_of(q, k)) * 0.7).softmax(-1), v), 4),
    "linear bias": (lambda q, k, v: weigh(hide_future(scores_of(q, k) + alibi(q)).softmax(-1), v), 4),
    "linear bias in baddbmm": (alibi_in_baddbmm, 4),
    "linear bias that is scaled": (
        lambda q, k, v: weigh(hide_future((scores_of(q, k) + alibi(q)) * 0.3).softmax(-1), v),
        4,
    ),
    "linear bias over grouped heads": (
        lambda q, kv: weigh(hide_future(scores_of(q, expanded(kv)) + alibi(q)).softmax(-1), expanded(kv)),
        2,
    ),
    "a constant added for each request": (
        lambda q, k, v: weigh(
            hide_future(scores_of(q, k) + 1.5 * torch.ones(q.shape[0])[:, None, None, None]).softmax(-1), v
        ),
        4,
    ),
    "scores kept finite": (
        lambda q, k, v: weigh(
            torch.max(hide_future(scores_of(q, k)), torch.tensor(torch.finfo(q.dtype).min)).softmax(-1), v
        ),
        4,
    ),
    "sinks": (sinking, 4),
    "sinks in another order": (lambda q, k, v, w: sinking(q, k, v, w.flip(0)), 4),
    "the maximum taken off": (
        lambda q, k, v: weigh(stable(hide_future(scores_of(q, k))).softmax(-1), v),
        4,
    ),
    "pre-scaled query": (lambda q, k, v: attend(q * 0.3, k, v), 4),
    "softmax in float32": (
        lambda q, k, v: weigh(F.softmax(hide_future(scores_of(q, k)), -1, dtype=torch.float32).to(q.dtype), v),
        4,
    ),
    "output with heads last": (
        lambda q, k, v: torch.einsum("bhqk,bkhd->bqdh", weights_of(q, k), v),
        4,
    ),
    "output with heads first": (
        lambda q, k, v: torch.einsum("bhqk,bkhd->hqbd", weights_of(q, k), v).permute(2, 1, 0, 3),
        4,
    ),
    "values of another size": (lambda q, k, v: attend(q, k, torch.cat([v, v[..., :3]], -1)), 4),
    "one tensor for all three": (lambda q: attend(q, q, q), 4),
    "two calls in a row": (after_one_another, 4),
    "sdpa": (lambda q, k, v: sdpa(q, k, v, is_causal=True), 4),
    "sdpa with a boolean mask": (lambda q, k, v: sdpa(q, k, v, attn_mask=below(q.shape[1])), 4),
    "sdpa with a scale": (lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.7), 4),
    "sdpa without heads": (lambda x, y: F.scaled_dot_product_attention(x, y, x, attn_mask=below(x.shape[1])), 1),
    "grouped sdpa": (lambda q, kv: sdpa(q, kv, kv, is_causal=True, enable_gqa=True), 2),
    "one key head": (lambda q, kv: sdpa(q, kv[:, :, :1], kv[:, :, :1], is_causal=True), 1),
    "repeat_interleave": (lambda q, kv: attend(q, kv.repeat_interleave(2, 2), kv.repeat_interleave(2, 2)), 2),
    "expand": (lambda q, kv: attend(q, expanded(kv), expanded(kv)), 2),
    "grouped einsum": (grouped, 2),
    "grouped by broadcasting": (grouped_by_broadcast, 2),
    "heads interleaved": (lambda q, kv: attend(q, interleaved(kv), interleaved(kv)), 4),
    "heads concatenated": (lambda q, kv: attend(q, torch.cat([kv, kv], 2), torch.cat([kv, kv], 2)), 4),
    "keys shared by more heads than values": (lambda q, kv, v: attend(q, expanded(kv), v), 4),
    "queries repeated": (lambda q, kv: attend(kv.repeat_interleave(2, 2), q, q), 4),
    "values with heads reversed": (lambda q, k, v: attend(q, k, v.flip(2)), 4),
}


def weights_for(function: Function) -> tuple[Tensor, ...]:
    """Sinks, for a function with the parameter ``w``."""
    return (SINKS,) if "w" in inspect.signature(function).parameters else ()


@pytest.mark.parametrize("name", EXACT)
def test_spelling_is_replaced_and_exact(name: str) -> None:
    function, kv_heads = EXACT[name]
    weights = weights_for(function)
    traced = analysed(function, *weights)
    assert {call.key.heads for call in traced.calls} == {call.value.heads for call in traced.calls} == {kv_heads}
    flat = flatten(traced, paged=False)
    assert error_of(flat, function, *weights) < 1e-5
    targets = [str(node.target) for node in flat.module.graph.nodes]
    assert targets.count("selective.varlen_attention.default") == len(flat.calls)
    assert not any("softmax" in target or "scaled_dot" in target for target in targets)


def test_paged_graph_has_a_pair_of_pools_per_call() -> None:
    flat = flatten(analysed(after_one_another), paged=True)
    placeholders = [node.name for node in flat.module.graph.nodes if node.op == "placeholder"]
    targets = [str(node.target) for node in flat.module.graph.nodes]
    assert targets.count("selective.ragged_attention.default") == 2
    assert len(placeholders) == 3 + len(flat.metadata) + 4


def test_scale_and_softcap_are_collected() -> None:
    (call,) = analysed(softcapped).calls
    assert call.softcap == 5.0
    assert call.scale == pytest.approx(SCALE * 3)
    (call,) = analysed(EXACT["sdpa with a scale"][0]).calls
    assert (call.scale, call.softcap, call.causal_flag) == (0.7, 0.0, True)


def interleaved_einsum(q: Tensor, kv: Tensor) -> Tensor:
    scores = torch.einsum("bqgkd,btkd->bgkqt", q.unflatten(2, (2, 2)), kv)
    return torch.einsum("bgkqt,btkd->bqgkd", hide_future(scores).softmax(-1), kv).flatten(2, 3)


def interleaved_broadcast(q: Tensor, kv: Tensor) -> Tensor:
    q_, kv_ = q.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4), swapped(kv)[:, None]
    return (hide_future(q_ @ kv_.transpose(-1, -2)).softmax(-1) @ kv_).permute(0, 3, 1, 2, 4).flatten(2, 3)


def interleaved_sdpa(q: Tensor, kv: Tensor) -> Tensor:
    q_, kv_ = q.unflatten(2, (2, 2)).permute(0, 2, 3, 1, 4), swapped(kv)[:, None]
    return F.scaled_dot_product_attention(q_, kv_, kv_, is_causal=True).permute(0, 3, 1, 2, 4).flatten(2, 3)


def wrongly_unmerged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = torch.bmm(hide_future(torch.bmm(merged(q), merged(k).transpose(1, 2))).softmax(-1), merged(v))
    return mixed.reshape(4, q.shape[0], q.shape[1], 8).permute(1, 2, 0, 3)


def residual_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weights_of(q, k)
    return weigh(weights + weights * weights, v)


def positional_query(k: Tensor, v: Tensor) -> Tensor:
    """A query that is the same for all requests, and then a mean over them."""
    q = torch.arange(k.shape[1])[None, None, :, None] * torch.ones(1, 4, 1, 8)
    return k + swapped(F.scaled_dot_product_attention(q, swapped(k), swapped(v), is_causal=True)).mean(0, keepdim=True)


def tokens_and_heads_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (x.reshape(x.shape[0], -1, 8) for x in (q, k, v))
    return F.scaled_dot_product_attention(*flat, is_causal=True).reshape(q.shape)


def requests_and_tokens_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (x.reshape(1, -1, 4, 8).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*flat, is_causal=True).transpose(1, 2).reshape(q.shape)


def filled_with(fill: Function) -> Function:
    return lambda q, k, v: weigh(torch.where(below(q.shape[1]), scores_of(q, k), fill(v)).softmax(-1), v)


REFUSED: dict[str, tuple[Function, str]] = {
    "softmax over queries": (
        lambda q, k, v: weigh(hide_future(scores_of(q, k)).softmax(-2), v),
        "enumerates tokens",
    ),
    "softmax over heads": (lambda q, k, v: weigh(hide_future(scores_of(q, k)).softmax(1), v), "sum over the key axis"),
    "sum over queries": (
        lambda q, k, v: torch.einsum("bhqk,bqhd->bkhd", weights_of(q, k), v),
        "over the axis of the softmax alone",
    ),
    "weights transposed": (
        lambda q, k, v: swapped(weights_of(q, k).transpose(-1, -2) @ swapped(v)),
        "no reading for aten.transpose",
    ),
    "softmax twice": (lambda q, k, v: weigh(weights_of(q, k).softmax(-1), v), "no reading for aten.softmax"),
    "weights squared": (residual_weights, "they go to 2 nodes"),
    "weights averaged over heads": (
        lambda q, k, v: torch.einsum("bqk,bkhd->bqhd", weights_of(q, k).mean(1), v),
        "no reading for aten.mean",
    ),
    "weights among the outputs": (
        lambda q, k, v: (weigh(w := weights_of(q, k), v), w),
        "tokens in one dimension",
    ),
    "heads summed": (
        lambda q, k, v: torch.einsum("bhqk,bkhd->bqd", weights_of(q, k), v),
        "over the axis of the softmax alone",
    ),
    "all heads of values for each head": (
        lambda q, k, v: torch.einsum("bhqk,bkgd->bqhgd", weights_of(q, k), v),
        "over the axis of the softmax alone",
    ),
    "no softmax": (
        lambda q, k, v: weigh(scores_of(q, k).relu().masked_fill(~below(q.shape[1]), 0.0), v),
        "not part of an attention",
    ),
    "no mask": (lambda q, k, v: sdpa(q, k, v), "sees the one at"),
    "linear attention": (
        lambda q, k, v: torch.einsum("bqhd,bhde->bqhe", q, torch.einsum("bkhd,bkhe->bhde", k, v)),
        "not part of an attention",
    ),
    "interleaved groups by einsum": (interleaved_einsum, "not shared by consecutive heads"),
    "interleaved groups by broadcasting": (interleaved_broadcast, "not shared by consecutive heads"),
    "interleaved groups by sdpa": (interleaved_sdpa, "not shared by consecutive heads"),
    "keys of another request": (lambda q, k, v: attend(q, k.flip(0), v), "enumerates requests"),
    "keys of all requests": (
        lambda q, k, v: weigh(hide_future(torch.einsum("bqhd,ckhd->bhqk", q, k)).softmax(-1), v),
        "sums over a dimension",
    ),
    "keys rolled": (lambda q, k, v: attend(q, k.roll(1, 1), v), "no transfer rule for aten.roll"),
    "values rolled": (lambda q, k, v: attend(q, k, v.roll(1, 1)), "no transfer rule for aten.roll"),
    "output in another token order": (lambda q, k, v: swapped(attend(q, k, v)).reshape(q.shape), "cuts across"),
    "heads taken for requests": (wrongly_unmerged, "cuts across"),
    "tokens and heads merged": (tokens_and_heads_merged, "must enumerate the tokens of one request"),
    "requests and tokens merged": (requests_and_tokens_merged, "must enumerate the tokens of one request"),
    "attention between heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        "must enumerate the tokens of one request",
    ),
    "mean over requests behind a shared query": (positional_query, "enumerates requests"),
    "shrunk after the mask": (
        lambda q, k, v: weigh((scores_of(q, k).masked_fill(~below(q.shape[1]), -1e10) * 1e-9).softmax(-1), v),
        "its hidden scores must be at most",
    ),
    "negated after the mask": (
        lambda q, k, v: weigh((scores_of(q, k).masked_fill(below(q.shape[1]), -1e10) * -1.0).softmax(-1), v),
        "its hidden scores must be at most",
    ),
    "capped after the mask": (
        lambda q, k, v: weigh((hide_future(scores_of(q, k)).tanh() * 5).softmax(-1), v),
        "before the scores are capped",
    ),
    "capped twice": (lambda q, k, v: weigh(hide_future(scores_of(q, k).tanh().tanh()).softmax(-1), v), "two tanh"),
    "floor division": (
        lambda q, k, v: weigh(hide_future(torch.div(scores_of(q, k), 0.5, rounding_mode="floor")).softmax(-1), v),
        "no reading for aten.div.Tensor_mode",
    ),
    "scores as integers": (
        lambda q, k, v: weigh(hide_future((scores_of(q, k) * 4).to(torch.int64).to(torch.float32)).softmax(-1), v),
        "no reading for aten.to",
    ),
    "filled with zero": (filled_with(lambda v: torch.zeros(()) * -1e10), "must be at most"),
    "filled with what tokens are": (filled_with(lambda v: v.sum((2, 3))[:, None, :, None] * -1e10), "must be at most"),
    "filled with little": (
        lambda q, k, v: weigh(scores_of(q, k).masked_fill(~below(q.shape[1]), -5.0).softmax(-1), v),
        "must be at most",
    ),
    "dropout": (lambda q, k, v: sdpa(q, k, v, is_causal=True, dropout_p=0.3), "drops out weights"),
    "scale by the length": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=1 / q.shape[1]),
        "used as a number",
    ),
    "double precision": (lambda q, k, v: attend(*(x.double() for x in (q, k, v))).float(), "must be of one of"),
    "maximum of other scores": (
        lambda q, k, v: weigh((scores_of(q, k) - scores_of(k, q).amax(-1, keepdim=True)).softmax(-1), v),
        "not their own maximum",
    ),
    "maximum over heads": (
        lambda q, k, v: weigh(hide_future(less_largest(scores_of(q, k), 1)).softmax(-1), v),
        "not one number for each query",
    ),
    "maximum over queries": (
        lambda q, k, v: weigh(hide_future(less_largest(scores_of(q, k), 2)).softmax(-1), v),
        "enumerates tokens",
    ),
    "maximum taken off before a softcap": (
        lambda q, k, v: weigh(hide_future(less_largest(hide_future(scores_of(q, k)), -1).tanh()).softmax(-1), v),
        "before they are capped",
    ),
    "maximum taken off beside sinks": (
        lambda q, k, v: weigh(
            with_sinks(less_largest(hide_future(scores_of(q, k)), -1), torch.ones(1, 4, 1, 1)).softmax(-1)[..., :-1], v
        ),
        "beside its sinks",
    ),
    "bias that is no line": (
        lambda q, k, v: weigh(hide_future(scores_of(q, k) + alibi(q) ** 2).softmax(-1), v),
        "no linear function of the distance",
    ),
    "bias that bends far away": (
        lambda q, k, v: weigh(hide_future(scores_of(q, k) + alibi(q).clamp(max=600.0)).softmax(-1), v),
        "no linear function of the distance",
    ),
    "bias that counts from the end": (
        lambda q, k, v: weigh(hide_future(scores_of(q, k) + alibi(q).flip(2)).softmax(-1), v),
        "enumerates tokens",
    ),
    "bias before a softcap": (
        lambda q, k, v: weigh(hide_future((scores_of(q, k) + alibi(q)).tanh()).softmax(-1), v),
        "before the scores are capped",
    ),
    "scores cut off from below": (
        lambda q, k, v: weigh(torch.max(hide_future(scores_of(q, k)), torch.tensor(-3.0)).softmax(-1), v),
        "cut off from below",
    ),
    "rounded scores": (
        lambda q, k, v: weigh(hide_future(scores_of(q, k).half().float()).softmax(-1), v),
        "rounded to a narrower type",
    ),
    "rounded weights": (
        lambda q, k, v: weigh(weights_of(q, k).bfloat16().float(), v),
        "rounded to a narrower type",
    ),
    "two numbers behind the scores": (
        lambda q, k, v, w: weigh(
            with_sinks(hide_future(scores_of(q, k)), w.reshape(1, -1, 1, 1).repeat(1, 1, 1, 2)).softmax(-1)[..., :-2], v
        ),
        "sink",
    ),
    "sinks that are kept": (
        lambda q, k, v, w: weigh(
            with_sinks(hide_future(scores_of(q, k)), w.reshape(1, -1, 1, 1)).softmax(-1)[..., 1:], v
        ),
        "",
    ),
    "a sink made of scores": (
        lambda q, k, v: weigh(
            torch.cat([hide_future(scores_of(q, k)), torch.zeros_like(scores_of(q, k)[..., :1])], -1).softmax(-1)[
                ..., :-1
            ],
            v,
        ),
        "enumerates tokens",
    ),
    "sinks of the queries": (
        lambda q, k, v: weigh(
            torch.cat([hide_future(scores_of(q, k)), q.transpose(1, 2)[..., :1]], -1).softmax(-1)[..., :-1], v
        ),
        "sinks",
    ),
    "sinks that are scaled": (
        lambda q, k, v, w: weigh(
            (with_sinks(hide_future(scores_of(q, k)), w.reshape(1, -1, 1, 1)) * 2).softmax(-1)[..., :-1], v
        ),
        "sinks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_near_miss_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    given = reasons(function, *weights_for(function))
    assert given and any(reason in text for text in given), given
