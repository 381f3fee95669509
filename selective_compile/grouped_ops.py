"""The operators of linear layers on rows in groups, as those of experts: schemas, fakes, and their implementations.

    selective::grouped_linear   the rows of each group by a weight of its own
    selective::take_rows        rows in another order, by themselves: what computes with them then reads them in order

    x         [S, K] float32, bfloat16 or float16; the rows of a group are neighbours, groups in order
    weight    [E, N, K], x's dtype; or int8, but not for Triton's kernel, for E * N rows of which scales [E, N] float32
              stand beside the numbers: row n of group e is scales[e, n] * weight[e, n]. Contiguous on a CPU
    ends      [E] int32 or int64: group e has the rows ends[e - 1] : ends[e] of x, possibly none, the first those from 0
    result    [S, N], x's dtype; rows from ends[E - 1] on are 0
    batch_invariant   whether a row is summed in one order however many rows its group has; slower where these are few

and of take_rows:

    x         [S, N]
    index     [R] int64, at least 0
    result    [R, N], row r is x[index[r]]

Sums are float32. Ends that are not in order, or not among the rows, are a ValueError on a CPU, and on a GPU, whose
values the host does not read, give a result that is none.
"""

from __future__ import annotations

from torch import Tensor

from selective_compile import reference
from selective_compile.int8_ops import DTYPES
from selective_compile.kernels.linear_call import check_grouped
from selective_compile.ops import implementation_on, refuse_gradients, register, require


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


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    refuse_gradients(x)
    return x.index_select(0, index)


def _fake_take_rows(x: Tensor, index: Tensor) -> Tensor:
    require(
        x.dim() == 2 and index.dim() == 1, f"x and index must be [S, N] and [R], got {x.dim()} and {index.dim()} dims"
    )
    return x.new_empty((index.shape[0], x.shape[1]))


take_rows = register("take_rows(Tensor x, Tensor index) -> Tensor", _take_rows, _fake_take_rows)
