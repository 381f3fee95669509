"""What is known of each row of logits before a token is chosen, in Triton: by its parts, which many programs look at.

Legend
    row       R of them, of V logits each
    part      `part` scores, a multiple of BLOCK, so that there are at most PARTS, by V alone: the order of sums depends
              on nothing else of a step. A program for each of every row. `best` is its largest score
    lanes     what a part's scores are dealt to, LANES of them, one after another; each has a largest score
    weight    exp(score - best), float32, sums float64
    BLOCK     scores that are looked at at once. What is counted and added up is so for each place in it, and for all of
              them behind the walk: at each step, threads would wait for each other all the time
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device

# A thread has eight scores at once, so that what it waits for is loaded together. Not measured on a GPU.
PART_WARPS = 4
# A walk over 128,000 scores takes one processor of a GPU tens of microseconds, and all others wait for it in a step of
# one request. Each of 64 parts is two blocks long then, and two numbers of each thread of a warp say what they weigh.
# Not measured on a GPU.
PARTS = 64
# A thousand lanes of a row: top-k of more has all V for candidates.
LANES = 16
NEVER = tl.constexpr(2147483647)
# As in `runtime.token_marks`, which no kernel knows of.
SEEN = tl.constexpr(1)
BANNED = tl.constexpr(2)


@triton.jit
def scores_of(logits, marks, penalty, scale, j, mask):
    """float32 [BLOCK], with the repetition penalty, the bans and the temperature, unless `scale` is None; -inf where
    there is none."""
    score = tl.load(logits + j, mask, float("-inf")).to(tl.float32)
    if marks is not None:
        mark = tl.load(marks + j, mask, 0)
        penalised = tl.where(score < 0, score * penalty, tl.div_rn(score, penalty))
        score = tl.where((mark & SEEN) != 0, penalised, score)
        score = tl.where((mark & BANNED) != 0, float("-inf"), score)
    if scale is not None:
        score = tl.div_rn(score, scale)
    return score


@triton.jit
def total_of(each):
    return tl.reduce(each, 0, tl.standard._sum_combine)


@triton.jit
def asked(fields, num_rows, row, vocabulary):
    """Of a row: temperature, repetition penalty, 1 - top-p, min-p and top-k, which is 0 where it leaves all tokens; and
    whether one of the last three lets tokens go."""
    temperature = tl.load(fields + row).to(tl.float32)
    limit = tl.load(fields + num_rows + row).to(tl.float32)
    min_p = tl.load(fields + 2 * num_rows + row)
    top_k = tl.load(fields + 3 * num_rows + row)
    penalty = tl.load(fields + 5 * num_rows + row).to(tl.float32)
    top_k = tl.where(top_k < vocabulary, top_k, 0.0)
    return temperature, penalty, limit, min_p, top_k, (top_k > 0) | (limit > 0) | (min_p > 0)


# A vocabulary is always the same: where it is a multiple of 16, a thread reads eight scores at once.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["fields", "slots"])
def _part_kernel(
    bests,  # [R, PARTS], the largest score of each part, NaN where it has one; behind the last part not written
    places,  # [R, PARTS] int32, the first token that has it
    sums,  # [R, PARTS] float64, what the part weighs; of a row that is drawn by its temperature alone
    lanes,  # [R, PARTS, LANES], largest scores; of a row with top-k
    logits,  # [R, V]
    fields,  # [6, R] float64; None: of each row, the largest logit is wanted
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
):
    row, number = tl.program_id(0), tl.program_id(1)
    penalty = None
    scale = None
    if fields is not None:
        temperature, penalty, _, _, top_k, few = asked(fields, num_rows, row, vocabulary)
        scale = tl.where(temperature == 0, 1.0, temperature)
    logits += row.to(tl.int64) * logits_stride
    if marks is not None:
        marks += tl.load(slots + row) * marks_stride
    begin = number * part
    end = tl.minimum(begin + part, vocabulary)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], NEVER, tl.int32)
    first_nan = tl.full([BLOCK], NEVER, tl.int32)
    for start in range(begin, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = scores_of(logits, marks, penalty, scale, j, j < vocabulary)
        none = score != score
        first_nan = tl.where(none, tl.minimum(first_nan, j), first_nan)
        better = score > best
        place = tl.where(better, j, place)
        best = tl.where(better, score, best)
    top = tl.reduce(best, 0, tl.standard._elementwise_max)
    first = tl.reduce(tl.where(best == top, place, NEVER), 0, tl.standard._elementwise_min)
    nan = tl.reduce(first_nan, 0, tl.standard._elementwise_min)
    of_part = row.to(tl.int64) * PARTS + number
    tl.store(bests + of_part, tl.where(nan < NEVER, float("nan"), top))
    tl.store(places + of_part, tl.where(nan < NEVER, nan, first))
    if fields is not None:
        if top_k > 0:
            largest = tl.reduce(tl.reshape(best, [BLOCK // LANES, LANES]), 0, tl.standard._elementwise_max)
            tl.store(lanes + of_part * LANES + tl.arange(0, LANES), largest)
        if (temperature != 0) & (few == 0) & (top < float("inf")):
            top = tl.where(top == float("-inf"), 0.0, top)  # what -inf is less than -inf is NaN
            weights = tl.full([BLOCK], 0.0, tl.float64)
            for start in range(begin, end, BLOCK):
                j = start + tl.arange(0, BLOCK)
                weights += tl.exp(scores_of(logits, marks, penalty, scale, j, j < vocabulary) - top).to(tl.float64)
            tl.store(sums + of_part, total_of(weights))


class Parts(NamedTuple):
    """What `_part_kernel` writes of R rows, and how many scores a part has."""

    bests: Tensor
    places: Tensor
    sums: Tensor | None
    lanes: Tensor | None
    length: int


def look_at_parts(
    logits: Tensor, fields: Tensor | None, marks: Tensor | None, slots: Tensor | None, *, block: int
) -> Parts:
    """Of logits [R, V]; the rest as in `choose`."""
    num_rows, vocabulary = logits.shape
    found = Parts(
        bests=logits.new_empty(num_rows, PARTS, dtype=torch.float32),
        places=logits.new_empty(num_rows, PARTS, dtype=torch.int32),
        sums=None if fields is None else logits.new_empty(num_rows, PARTS, dtype=torch.float64),
        lanes=None if fields is None else logits.new_empty(num_rows, PARTS, LANES, dtype=torch.float32),
        length=triton.cdiv(vocabulary, PARTS * block) * block,
    )
    *of_parts, part = found
    strides = logits.stride(0), 0 if marks is None else marks.stride(0)
    on_device(_part_kernel, logits)[(num_rows, triton.cdiv(vocabulary, part))](
        *(*of_parts, logits, fields, marks, slots, vocabulary, num_rows, part, *strides, block, PARTS, LANES),
        enable_fp_fusion=False,
        num_warps=PART_WARPS,
    )
    return found
