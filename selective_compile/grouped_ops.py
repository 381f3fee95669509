"""The operators of linear layers on rows in groups, as those of experts: schemas, fakes, and their implementations.

    selective::grouped_linear   the rows of each group by a weight of its own
    selective::group_rows       which row comes where in the order of groups that tokens have chosen
    selective::take_rows        rows in another order, by themselves: what computes with them then reads them in order

    x         [S, K] float32, bfloat16 or float16; the rows of a group are neighbours, groups in order
    weight    [E, N, K], x's dtype; or int8, but not for Triton's kernel, for E * N rows of which scales [E, N] float32
              stand beside the numbers: row n of group e is scales[e, n] * weight[e, n]. On a CPU contiguous, or, where
              it is not int8, its transposition [E, K, N]
    ends      [E] int32 or int64: group e has the rows ends[e - 1] : ends[e] of x, possibly none, the first those from 0
    result    [S, N], x's dtype; rows from ends[E - 1] on are 0
    batch_invariant   whether a row is summed in one order however many rows its group has; slower where these are few

of group_rows:

    choice        [T, k] int64, not negative: the groups of token t, whose rows are t * k : (t + 1) * k; from E on none
    groups        E, at least 1
    cu_seqlens_q  int32, the last of which is how many tokens are somebody's; None: all. Nobody's tokens choose as the
                  last one in front of them, so that no group has rows for their sake alone
    order         [S] int64: which row is the i-th, those of a group in their order, those of no group last
    places        [S] int64: order[places[row]] is row
    ends          [E] int32, as grouped_linear takes them

and of take_rows:

    x         [S, N]
    index     [R] int64, at least 0
    result    [R, N], row r is x[index[r]]

Sums are float32. Ends that are not in order, or not among the rows, are a ValueError on a CPU, and on a GPU, whose
values the host does not read, give a result that is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selective_compile import reference
from selective_compile.attention_checks import require
from selective_compile.implementations import implementation_on
from selective_compile.int8_ops import DTYPES
from selective_compile.kernels.linear_call import check_grouped
from selective_compile.ops import refuse_gradients, register


def _run(
    x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    refuse_gradients(x, weight)
    implementation = implementation_on(x.device.type)
    if implementation == "triton" and scales is None:
        from selective_compile.kernels import grouped_linear_triton

        return grouped_linear_triton.grouped_linear(x, weight, ends)
    if implementation == "cpu" and x.dtype in DTYPES:
        from selective_compile.kernels import linear_cpu

        if linear_cpu.available():
            return linear_cpu.grouped_linear(x, weight, ends, scales, batch_invariant=batch_invariant)
    check_grouped(x, weight, ends, scales)
    return reference.grouped_linear(x, weight, ends, scales)


def _fake(
    x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    check_grouped(x, weight, ends, scales)
    return x.new_empty((x.shape[0], weight.shape[1]))


grouped_linear = register(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends, Tensor? scales=None, bool batch_invariant=False) -> Tensor",
    _run,
    _fake,
)


def _group_rows(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    _check_choice(choice, groups, cu_seqlens_q)
    implementation = implementation_on(choice.device.type)
    if implementation == "triton":
        from selective_compile.kernels import group_rows_triton

        return group_rows_triton.group_rows(choice, groups, cu_seqlens_q)
    if implementation == "cpu":
        from selective_compile.kernels import group_rows_cpu

        if group_rows_cpu.available():
            return group_rows_cpu.group_rows(choice, groups, cu_seqlens_q)
    return reference.group_rows(choice, groups, cu_seqlens_q)


def _fake_group_rows(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    _check_choice(choice, groups, cu_seqlens_q)
    order, places = (choice.new_empty((choice.numel(),)) for _ in range(2))
    return order, places, choice.new_empty((groups,), dtype=torch.int32)


def _check_choice(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None) -> None:
    require(
        choice.dim() == 2 and choice.dtype is torch.int64,
        f"choice must be [T, k] of int64, got {list(choice.shape)} of {choice.dtype}",
    )
    require(groups > 0, f"groups must be at least 1, got {groups}")
    if cu_seqlens_q is not None:
        require(
            cu_seqlens_q.dim() == 1 and cu_seqlens_q.shape[0] > 0 and cu_seqlens_q.dtype is torch.int32,
            f"cu_seqlens_q must be [N + 1] of int32, got {list(cu_seqlens_q.shape)} of {cu_seqlens_q.dtype}",
        )


group_rows = register(
    "group_rows(Tensor choice, int groups, Tensor? cu_seqlens_q=None) -> (Tensor, Tensor, Tensor)",
    _group_rows,
    _fake_group_rows,
)


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    refuse_gradients(x)
    _check_index(x, index)
    if implementation_on(x.device.type) == "cpu":
        from selective_compile.kernels import group_rows_cpu

        if group_rows_cpu.available():
            return group_rows_cpu.take_rows(x, index)
    return x.index_select(0, index)


def _fake_take_rows(x: Tensor, index: Tensor) -> Tensor:
    _check_index(x, index)
    return x.new_empty((index.shape[0], x.shape[1]))


def _check_index(x: Tensor, index: Tensor) -> None:
    fits = x.dim() == 2 and index.dim() == 1 and index.dtype is torch.int64
    require(fits, f"x and index must be [S, N] and [R] of int64, got {x.dim()} and {index.dim()} dims, {index.dtype}")


take_rows = register("take_rows(Tensor x, Tensor index) -> Tensor", _take_rows, _fake_take_rows)
