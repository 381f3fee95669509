"""Passes 3 and 5: every spelling of attention is found and replaced."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from selective_compile.passes.flatten import flatten
from tests.passes.graphs import analysed, error_of
from tests.passes.spellings import (
    SCALE,
    Function,
    added_mask,
    after_one_another,
    alibi,
    alibi_in_baddbmm,
    attend,
    below,
    broadcast,
    by_baddbmm,
    by_bmm,
    by_other_names,
    expanded,
    grouped,
    grouped_by_broadcast,
    heads_behind,
    heads_first_merge,
    hidden_behind,
    hide_future,
    interleaved,
    keys_first,
    less_largest,
    scores_of,
    sdpa,
    sinking,
    slopes_behind,
    softcapped,
    stable,
    triangle_in_place,
    weigh,
    weights_for,
    weights_of,
    where_mask,
    written_mask,
    written_mask_of_scores,
)

# (function, heads of its keys and values as the KV cache keeps them)
EXACT: dict[str, tuple[Function, int]] = {
    "einsum": (attend, 4),
    "bmm of batch and heads merged": (by_bmm, 4),
    "baddbmm": (by_baddbmm, 4),
    "mT and where with a number": (by_other_names, 4),
    "heads and batch merged": (heads_first_merge, 4),
    "keys on the left": (keys_first, 4),
    "heads behind": (lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(torch.lt)), 4),
    "heads behind, the dimension by its other name": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(torch.lt), dim=-3),
        4,
    ),
    "heads behind a window": (
        lambda q, k, v: heads_behind(q, k, v, hide=hidden_behind(lambda i, j: (i < j) | (i - j > 3))),
        4,
    ),
    "heads behind slopes": (lambda q, k, v: heads_behind(q, k, v, hide=slopes_behind), 4),
    "heads behind, the maximum taken off": (
        lambda q, k, v: heads_behind(q, k, v, hide=lambda s: less_largest(hidden_behind(torch.lt)(s), 1)),
        4,
    ),
    "heads behind, keys before padding": (
        lambda mask, q, k, v: heads_behind(
            q, k, v, hide=lambda s: hidden_behind(torch.lt)(s).masked_fill(mask.T[None, :, :, None] == 0, -math.inf)
        ),
        4,
    ),
    "softcap": (softcapped, 4),
    "added mask": (added_mask, 4),
    "where": (where_mask, 4),
    "written in place": (written_mask, 4),
    "written in place of all scores": (written_mask_of_scores, 4),
    "a triangle in place": (triangle_in_place, 4),
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
    "broadcast_to": (lambda q, kv: attend(q, broadcast(kv, q), broadcast(kv, q)), 2),
    "broadcast_to one key head": (lambda q, kv: attend(q, *[broadcast(kv[:, :, :1], q)] * 2), 1),
    "sdpa of broadcast_to": (lambda q, kv: sdpa(q, broadcast(kv, q), broadcast(kv, q), is_causal=True), 2),
    "grouped einsum": (grouped, 2),
    "grouped by broadcasting": (grouped_by_broadcast, 2),
    "heads interleaved": (lambda q, kv: attend(q, interleaved(kv), interleaved(kv)), 4),
    "heads concatenated": (lambda q, kv: attend(q, torch.cat([kv, kv], 2), torch.cat([kv, kv], 2)), 4),
    "keys shared by more heads than values": (lambda q, kv, v: attend(q, expanded(kv), v), 4),
    "queries repeated": (lambda q, kv: attend(kv.repeat_interleave(2, 2), q, q), 4),
    "values with heads reversed": (lambda q, k, v: attend(q, k, v.flip(2)), 4),
}


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
