"""Heads that were repeated before they were computed with are kept once; those that only look like it are all kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.attention import recognise_attention
from selective_compile.passes.flatten import flatten
from tests.passes.graphs import analysed, error_of
from tests.passes.spellings import Function, attend, broadcast, expanded, interleaved, sdpa, swapped, turned

SIGNS = torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None]  # [H, 1]


def stacked(one: Tensor, other: Tensor) -> Tensor:
    """[B, S, K, D] each, as heads that follow one another."""
    return torch.stack([one, other], 3).flatten(2, 3)


def turned_heads_first(x: Tensor) -> Tensor:
    """[B, H, S, D], as most models have it; by angles that are made of positions."""
    heads = swapped(x)
    angles = torch.arange(x.shape[1])[:, None] * torch.linspace(0.1, 1, x.shape[3])
    even, odd = heads.unflatten(-1, (-1, 2)).unbind(-1)
    return swapped(heads * angles.cos() + torch.stack([-odd, even], -1).flatten(-2) * angles.sin())


# Functions of queries [B, S, 4, D] and keys and values [B, S, 2, D].
ONCE: dict[str, Function] = {
    "keys": lambda q, kv: attend(q, turned(expanded(kv)), expanded(kv)),
    "keys heads first": lambda q, kv: attend(q, turned_heads_first(expanded(kv)), expanded(kv)),
    "values": lambda q, kv: attend(q, expanded(kv), torch.tanh(expanded(kv)) * 0.5),
    "sdpa": lambda q, kv: sdpa(turned(q), turned(broadcast(kv, q)), broadcast(kv, q), is_causal=True),
    "repeat_interleave": lambda q, kv: attend(q, turned(kv.repeat_interleave(2, 2)), expanded(kv)),
    "stacked": lambda q, kv: attend(q, turned(stacked(kv, kv)), expanded(kv)),
    "rounded": lambda q, kv: attend(q, expanded(kv).bfloat16().float(), expanded(kv)),
    "chosen by position": lambda q, kv: attend(
        q, torch.where(torch.arange(kv.shape[1])[:, None, None] % 3 == 0, expanded(kv), -expanded(kv)), expanded(kv)
    ),
    "by themselves": lambda q, kv: attend(q, expanded(kv) * expanded(kv.exp()), expanded(kv)),
}
ALL: dict[str, Function] = {
    "another sign for one head": lambda q, kv: attend(q, turned(expanded(kv)) * SIGNS.to(q.dtype), expanded(kv)),
    "another sign for one head of values": lambda q, kv: attend(q, expanded(kv), expanded(kv) * SIGNS),
    "other neighbours": lambda q, kv: attend(q, turned(interleaved(kv)), expanded(kv)),
    "one of two negated": lambda q, kv: attend(q, turned(stacked(kv, -kv)), expanded(kv)),
    "one of two rounded": lambda q, kv: attend(q, stacked(kv, kv.bfloat16().float()), expanded(kv)),
    "one of two exchanged": lambda q, kv: attend(q, turned(stacked(kv, kv.flip(2))), expanded(kv)),
    "two different sums": lambda q, kv: attend(q, stacked(kv, kv) + stacked(kv, 2 * kv), expanded(kv)),
    "heads that are multiplied": lambda q, kv: attend(q, expanded(kv) * q, expanded(kv)),
    "a norm of each": lambda q, kv: attend(q, F.layer_norm(expanded(kv), (8,)), expanded(kv)),
    "a norm of pairs": lambda q, kv: attend(
        q, F.layer_norm(expanded(kv).flatten(2), (32,)).unflatten(2, (4, 8)), expanded(kv)
    ),
}


@pytest.mark.parametrize("name", ONCE)
def test_each_head_is_kept_once(name: str) -> None:
    kept_and_exact(ONCE[name], heads=2, every=2)


@pytest.mark.parametrize("name", ALL)
def test_heads_that_are_not_known_to_be_equal_are_all_kept(name: str) -> None:
    kept_and_exact(ALL[name], heads=4, every=1)


def kept_and_exact(function: Function, *, heads: int, every: int) -> None:
    traced = analysed(function)
    (call,) = traced.calls
    assert call.key.heads == call.value.heads == heads
    assert max(call.key.every, call.value.every) == every
    for paged in (False, True):
        flat = flatten(analysed(function), paged=paged)
        assert len([n for n in flat.module.graph.nodes if "attention" in str(n.target)]) == 1
    assert error_of(flatten(traced, paged=False), function) < 1e-5


def test_one_head_of_all() -> None:
    kept_and_exact(lambda q, kv: attend(q, turned(broadcast(kv[:, :, :1], q)), kv[:, :, :1]), heads=1, every=4)


def test_a_second_look_finds_the_same() -> None:
    traced = analysed(ONCE["keys"])
    (first,) = traced.calls
    traced.calls.clear()
    assert recognise_attention(traced) == 1
    assert traced.calls[0].key == first.key
