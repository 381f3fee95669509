"""What the peers of the attention kernels are given, and what is said of those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from benchmarks.gpu_parts import (
    attention_peers,
)
from benchmarks.gpu_parts.ragged_step import TINY, make_step
from benchmarks.gpu_parts.step_check import check
from selective_compile import reference

CPU = torch.device("cpu")


STEP = ((3, 40), (1, 33), (40, 40))


def paged(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """`varlen_attn` of a torch with block tables, by the reference."""
    assert (max_q, max_k) == (40, 40) and window_size == (-1, 0) and enable_gqa
    rows, pools = torch.zeros(len(query), *key.shape[2:]), (each.transpose(1, 2) for each in (key, value))
    slots = torch.full((len(query),), -1)
    return reference.ragged_attention(query, rows, rows, *pools, cu_seq_q, seqused_k, block_table, slots, scale, 0, 0.0)


def packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """That of torch 2.11, without, by the same: heads share keys as they have them, and nothing has to say so."""
    assert cu_seq_k[-1] == len(key)
    block, lengths = int(cu_seq_k.diff().max()), cu_seq_k.diff().tolist()
    pools = torch.zeros(2, len(lengths), block, *key.shape[1:])
    for pool, each in zip(pools, (key, value), strict=True):
        for n, own in enumerate(each.split(lengths)):
            pool[n, : len(own)] = own
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    seqused = cu_seq_k.diff()
    both = {"seqused_k": seqused, "block_table": table, "scale": scale, "window_size": window_size}
    return paged(query, *pools, cu_seq_q, None, max_q, max_k, enable_gqa=True, **both)


def apart(query: Tensor, key: Tensor, *rest: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """That of one which takes as many heads of keys only."""
    if key.shape[1] != query.shape[1]:
        raise RuntimeError("as many heads, please")
    return packed(query, key, *rest, scale=scale, window_size=window_size)


def mistaken(query: Tensor, key: Tensor, *rest: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """That of one which takes fewer, and gets them wrong."""
    found = packed(query, key, *rest, scale=scale, window_size=window_size)
    return found if key.shape[1] == query.shape[1] else found.flip(1)


@pytest.mark.parametrize(
    ("attend", "how"),
    [
        (paged, "blocks of 256"),
        (packed, "keys in one piece"),
        (apart, "keys in one piece, repeated for each head; in one piece RuntimeError: as many heads, please"),
        (mistaken, "keys in one piece, repeated for each head; in one piece ValueError: the error of a row"),
    ],
)
def test_varlen_attn_gets_what_it_takes(attend: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attend)
    step = make_step(STEP, TINY, CPU)
    step()
    made = attention_peers.varlen(step)
    assert made.how.startswith(how) and check(step, made.call()) < 1e-5
    assert ("repeated" in made.how) == ("repeated" in how)


def test_varlen_attn_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*what: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", refusing)
    with pytest.raises(RuntimeError, match="no such device"):
        attention_peers.varlen(make_step(STEP, TINY, CPU))


def test_flex_attention_gets_what_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.flex_attention as flex

    given: list[Tensor] = []
    attend = flex.flex_attention
    monkeypatch.setattr(flex, "flex_attention", lambda *what, **how: given.extend(what) or attend(*what, **how))
    step = make_step(((1, 40), (1, 40)), TINY, CPU)
    step()
    made = attention_peers.flex(step)
    assert check(step, made.as_rows(made.call())) < 1e-5
    assert len(given) == 3 and all(each.is_contiguous() for each in given)
