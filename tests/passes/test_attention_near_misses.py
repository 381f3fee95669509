"""Pass 3: what merely resembles an attention is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import reasons
from tests.passes.spellings import (
    Function,
    alibi,
    attend,
    below,
    heads_behind,
    hidden_behind,
    hide_future,
    less_largest,
    merged,
    scores_of,
    sdpa,
    swapped,
    weigh,
    weights_for,
    weights_of,
    with_sinks,
)


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
    "heads behind, softmax over queries": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(torch.lt), dim=0),
        "enumerates tokens",
    ),
    "heads behind, softmax over requests": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(torch.lt), dim=2),
        "enumerates requests",
    ),
    "heads behind keys to come": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(torch.gt)),
        "no mask family",
    ),
    "heads behind and one token ahead": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(lambda i, j: i + 1 < j)),
        "no mask family",
    ),
    "heads behind, the maximum of queries taken off": (
        lambda q, k, v: heads_behind(q, k, v, hide=lambda s: less_largest(hidden_behind(torch.lt)(s), 0)),
        "",
    ),
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
    "hidden by no number": (
        filled_with(lambda v: torch.tensor(math.nan)),
        "hidden scores must be at most",
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
    "keys rolled": (lambda q, k, v: attend(q, k.roll(1, 1), v), "enumerates tokens"),
    "values rolled": (lambda q, k, v: attend(q, k, v.roll(1, 1)), "enumerates tokens"),
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
    "two sinks of each query": (
        lambda q, k, v: weigh(
            torch.cat([hide_future(scores_of(q, k)), q.transpose(1, 2)[..., :2]], -1).softmax(-1)[..., :-2], v
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
