"""Rows in the order of their groups in Triton, for CUDA and ROCm, in one launch where there are few.

A row's place is how many rows come before it: those of groups in front of its own, and those of its own that stand
before it. Each row, and each end of a group, counts them for itself, so that no program waits for another: S * (S + E)
comparisons, which a GPU makes of some thousand rows in the time of a launch or two. More rows are sorted by PyTorch, in
some launches.

Legend
    MOST      rows up to which they are counted
    key       choice * S + row: what rows are ordered by
    asked     what a program counts the keys below of: BLOCK_ASKED keys, or ends of groups

The kernel is compiled for sm_80, sm_90, sm_100 and gfx942 in `tests/kernels`, and fails there on a spill.
It has not run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device

MOST = 8192
BLOCK_ASKED, BLOCK_ROWS, NUM_WARPS = 16, 256, 4


@triton.jit
def _choice_of(choice, row, used, rows, groups, EACH: tl.constexpr):
    """Of nobody's tokens that of the last one in front of them; the number of groups, if it is none."""
    theirs = tl.minimum(row // EACH, used - 1) * EACH + row % EACH
    found = tl.load(choice + theirs, mask=row < rows, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(found, 0), groups)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _group_rows_kernel(
    order,  # [S] int64
    places,  # [S] int64
    ends,  # [groups] int32
    choice,  # [tokens, EACH] int64
    cu_seqlens_q,  # int32; with HAS_BOUNDS alone
    tokens,
    requests,
    groups,
    EACH: tl.constexpr,
    HAS_BOUNDS: tl.constexpr,
    BLOCK_ASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    rows = tokens * EACH
    used = tokens
    if HAS_BOUNDS:
        last = tl.minimum(tl.load(cu_seqlens_q + requests), tokens)
        used = tl.where(last > 0, last, tokens)
    asked = tl.program_id(0) * BLOCK_ASKED + tl.arange(0, BLOCK_ASKED)
    group = asked - rows  # behind the rows come the groups
    own = _choice_of(choice, asked, used, rows, groups, EACH) * rows + asked
    key = tl.where(asked < rows, own, (group + 1) * rows)
    below = asked * 0
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        others = _choice_of(choice, row, used, rows, groups, EACH) * rows + row
        before = (others[None, :] < key[:, None]) & (row < rows)[None, :]
        below += tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    is_row = asked < rows
    tl.store(places + asked, below.to(tl.int64), mask=is_row)
    tl.store(order + below, asked.to(tl.int64), mask=is_row)
    tl.store(ends + group, below, mask=(group >= 0) & (group < groups))


def group_rows(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`selective::group_rows`; see `selective_compile.grouped_ops`. The host reads no values; a negative group is 0."""
    tokens, each = choice.shape
    rows = choice.numel()
    if not 0 < rows <= MOST or (groups + 1) * rows >= 2**31:
        return _sorted(choice, groups, cu_seqlens_q)
    choice = choice.contiguous()
    order, places = (choice.new_empty((rows,)) for _ in range(2))
    ends = choice.new_empty((groups,), dtype=torch.int32)
    bounds, requests = (ends, 0) if cu_seqlens_q is None else (cu_seqlens_q.contiguous(), len(cu_seqlens_q) - 1)
    on_device(_group_rows_kernel, choice)[(triton.cdiv(rows + groups, BLOCK_ASKED),)](
        *(order, places, ends, choice, bounds, tokens, requests, groups),
        *(each, cu_seqlens_q is not None, BLOCK_ASKED, BLOCK_ROWS),
        num_warps=NUM_WARPS,
    )
    return order, places, ends


def _sorted(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens_q is not None and len(choice):
        used = cu_seqlens_q[-1:].long()
        token = torch.arange(len(choice), device=choice.device, dtype=torch.int64)
        last = torch.where(used > 0, used, len(choice)) - 1
        choice = choice.index_select(0, torch.minimum(token, last))
    values, order = choice.reshape(-1).clamp(0, groups).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device, dtype=torch.int64)
    bounds = torch.arange(groups, device=values.device, dtype=values.dtype)
    return order, places, torch.searchsorted(values, bounds, right=True, out_int32=True)
