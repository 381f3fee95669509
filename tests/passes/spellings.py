"""Attention spelled in many ways: functions of queries, keys and values [B, S, H, D]."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


def heads_behind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    hide: Function,
    dim: int = 1,
) -> Tensor:
    """As labml has it: tokens first, requests and heads behind queries and keys."""
    scores = torch.einsum("ibhd,jbhd->ijbh", q.transpose(0, 1), k.transpose(0, 1)) * SCALE
    return torch.einsum("ijbh,jbhd->ibhd", hide(scores).softmax(dim), v.transpose(0, 1)).transpose(0, 1)


def hidden_behind(hidden: Function) -> Function:
    """``hidden``: of positions of queries and keys."""

    def hide(scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[0])
        return scores.masked_fill(hidden(places[:, None], places)[:, :, None, None], -math.inf)

    return hide


def slopes_behind(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[0])
    bias = (places[None, :] - places[:, None])[:, :, None, None] * torch.tensor([0.5, 0.25, 0.1, 0.0])
    return hidden_behind(torch.lt)(scores + bias)


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


def written_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place, and with zeros for rows that would see nothing."""
    scores = scores_of(q, k)
    scores[..., ~below(q.shape[1])] = -math.inf
    return weigh(torch.nan_to_num(scores.softmax(-1), nan=0.0), v)


def written_mask_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    scores[~below(q.shape[1]).expand(q.shape[0], 4, -1, -1)] = -math.inf
    return weigh(scores.softmax(-1), v)


def triangle_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.ones(1, 1, q.shape[1], q.shape[1])
    kept.tril_()
    return weigh(scores_of(q, k).masked_fill(~(kept > 0.5), -math.inf).softmax(-1), v)


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


def broadcast(kv: Tensor, q: Tensor) -> Tensor:
    """As Falcon's with few key and value heads."""
    groups = q.unflatten(2, (kv.shape[2], -1))
    return torch.broadcast_to(kv[:, :, :, None], groups.shape).flatten(2, 3)


def turned(x: Tensor) -> Tensor:
    """A rotary embedding of [B, S, H, D]."""
    one, other = x.chunk(2, -1)
    angles = torch.arange(x.shape[1])[:, None, None] * torch.linspace(0.1, 1, x.shape[3])
    return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()


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


def weights_for(function: Function) -> tuple[Tensor, ...]:
    """Sinks, for a function with the parameter ``w``."""
    return (SINKS,) if "w" in inspect.signature(function).parameters else ()
