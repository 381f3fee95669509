"""Which tokens of each row of logits top-k, top-p and min-p may leave, in Triton: listed by many programs a row.

Legend
    row, part, best, lanes, BLOCK  of `choose_parts_triton`
    key       of `choose_triton`, as `candidates` and their `rest`
    least     key: of the k-th largest lane where there is a top-k, which k scores at least are not less than
    lightest  weight: for top-p, 1/V of the limit, or min-p's own; 0 where there is a top-k
    likely    a token whose score's key and weight are not less: a candidate

A program for each part of every row. One launch counts what is likely; the next lists it, behind that of the parts in
front: candidates stand in their order, and where depends on no other program's speed. When the program that chooses did
this, too, it looked at four blocks at once, of which a thread had 218 registers, and took 184 us of one row on an H200,
and of two rows in turn 438; now it has half of them. Not measured on a GPU since.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.choose_limits_triton import find_kth_largest, keys_of
from selective_compile.kernels.choose_parts_triton import LANES, PART_WARPS, PARTS, Parts, asked, scores_of, total_of
from selective_compile.kernels.interpreter import on_device


@triton.jit
def _likely(j, logits, marks, penalty, scale, vocabulary, top, least, lightest):
    """Whether these tokens are; and what they weigh next to the score `top`."""
    score = scores_of(logits, marks, penalty, scale, j, j < vocabulary)
    weight = tl.exp(score - top).to(tl.float64)
    return (j < vocabulary) & (keys_of(score) >= least) & (weight >= lightest), weight


@triton.jit
def _top_of(bests, row, parts, PARTS: tl.constexpr):
    """The largest score of a row."""
    number = tl.arange(0, PARTS)
    best = tl.load(bests + row.to(tl.int64) * PARTS + number, number < parts, float("-inf"))
    return tl.reduce(best, 0, tl.standard._elementwise_max)


@triton.jit
def _lightest(limit, min_p, top_k, vocabulary):
    lightest = tl.where(limit > 0, limit.to(tl.float64) / vocabulary, min_p)
    return tl.where(top_k > 0, 0.0, lightest)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["fields", "slots"])
def _count_kernel(
    counts,  # [R, PARTS] int32, of each part's likely tokens; of a row with a limit, as the next two
    rests,  # [R, PARTS] float64, what all others of the part weigh
    leasts,  # [R, PARTS] int32, the same for each part of a row
    bests,  # of `_part_kernel`, as the lanes
    lanes,
    logits,  # [R, V]
    fields,  # [6, R] float64
    marks,  # [slots + 1, V] uint8, of bits SEEN and BANNED, or None
    slots,  # [R] int64, or None
    vocabulary,
    num_rows,
    part,
    logits_stride,
    marks_stride,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    SEARCHES: tl.constexpr,
):
    row, number = tl.program_id(0), tl.program_id(1)
    temperature, penalty, limit, min_p, top_k, few = asked(fields, num_rows, row, vocabulary)
    if (temperature != 0) & few:
        logits += row.to(tl.int64) * logits_stride
        if marks is not None:
            marks += tl.load(slots + row) * marks_stride
        parts = (vocabulary + part - 1) // part
        least = tl.full([], -2147483648, tl.int32)
        if top_k > 0:
            lane = tl.arange(0, PARTS * LANES)
            of_row = lanes + row.to(tl.int64) * PARTS * LANES
            largest = tl.load(of_row + lane, lane < parts * LANES, float("-inf"))
            least = find_kth_largest(keys_of(largest), top_k, SEARCHES)
        top, lightest = _top_of(bests, row, parts, PARTS), _lightest(limit, min_p, top_k, vocabulary)
        count = tl.full([BLOCK], 0, tl.int32)
        rest = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(number * part, tl.minimum(number * part + part, vocabulary), BLOCK):
            j = start + tl.arange(0, BLOCK)
            likely, weight = _likely(j, logits, marks, penalty, temperature, vocabulary, top, least, lightest)
            count += likely.to(tl.int32)
            rest += tl.where(likely, 0.0, weight)
        of_part = row.to(tl.int64) * PARTS + number
        tl.store(counts + of_part, total_of(count))
        tl.store(rests + of_part, total_of(rest))
        tl.store(leasts + of_part, least)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["fields", "slots"])
def _list_kernel(
    candidates,  # [R, ROOM] int32, to be written as far as there is room
    counts,  # of `_count_kernel`, as the leasts
    leasts,
    bests,  # of `_part_kernel`
    logits,  # [R, V]
    fields,  # [6, R] float64
    marks,  # [slots + 1, V] uint8, of bits SEEN and BANNED, or None
    slots,  # [R] int64, or None
    vocabulary,
    num_rows,
    part,
    logits_stride,
    marks_stride,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
):
    row, number = tl.program_id(0), tl.program_id(1)
    temperature, penalty, limit, min_p, top_k, few = asked(fields, num_rows, row, vocabulary)
    if (temperature != 0) & few:
        of_row, of_parts = row.to(tl.int64) * PARTS, tl.arange(0, PARTS)
        # Nobody has written what is behind the last part; that is in front of none.
        count = total_of(tl.load(counts + of_row + of_parts, of_parts < number, 0))
        if (tl.load(counts + of_row + number) > 0) & (count < ROOM):  # of a sharp row, most parts have none
            logits += row.to(tl.int64) * logits_stride
            candidates += row.to(tl.int64) * ROOM
            if marks is not None:
                marks += tl.load(slots + row) * marks_stride
            least, lightest = tl.load(leasts + of_row + number), _lightest(limit, min_p, top_k, vocabulary)
            top = _top_of(bests, row, (vocabulary + part - 1) // part, PARTS)
            for start in range(number * part, tl.minimum(number * part + part, vocabulary), BLOCK):
                j = start + tl.arange(0, BLOCK)
                likely, _ = _likely(j, logits, marks, penalty, temperature, vocabulary, top, least, lightest)
                place = count - 1 + tl.associative_scan(likely.to(tl.int32), 0, tl.standard._sum_combine)
                tl.store(candidates + place, j, likely & (place < ROOM))
                count += total_of(likely.to(tl.int32))


def list_candidates(
    logits: Tensor,
    fields: Tensor,
    marks: Tensor | None,
    slots: Tensor | None,
    parts: Parts,
    *,
    room: int,
    block: int,
    searches: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates [R, room] int32 of logits [R, V], as many of them as there is room for; and of each part, how many
    there are [R, PARTS] int32 and what all others weigh [R, PARTS] float64.

    The rest is as in `choose`.
    """
    num_rows, vocabulary = logits.shape
    # As wide for any V: the kernels are the same for all.
    candidates = logits.new_empty(num_rows, room, dtype=torch.int32)
    counts, leasts = logits.new_empty(2, num_rows, PARTS, dtype=torch.int32)
    rests = logits.new_empty(num_rows, PARTS, dtype=torch.float64)
    strides = logits.stride(0), 0 if marks is None else marks.stride(0)
    of_rows = logits, fields, marks, slots, vocabulary, num_rows, parts.length, *strides, block, PARTS
    grid, options = (
        (num_rows, triton.cdiv(vocabulary, parts.length)),
        {"enable_fp_fusion": False, "num_warps": PART_WARPS},
    )
    on_device(_count_kernel, logits)[grid](
        counts, rests, leasts, parts.bests, parts.lanes, *of_rows, LANES, searches, **options
    )
    on_device(_list_kernel, logits)[grid](candidates, counts, leasts, parts.bests, *of_rows, room, **options)
    return candidates, counts, rests
