"""Choosing a token for each row of logits in Triton, for CUDA and ROCm: what `runtime.device_draw.choose` defines.

Legend
    row       a program each; it goes over the V logits some forty times, out of the cache, and never sorts them
    key       a score's bits as an integer of the same order. A limit between scores is looked for in its 32 bits, two
              of them each time the row is gone over: SEARCHES times
    kept      the key of the k-th largest score: those that are not less stay
    weight    exp(score - top), top being the largest score: the probability but for a factor. float32, sums float64
    edge      the least key that top-p leaves. Of the tokens that have it, which are as likely as one another, the
              first `gone` go
    BLOCK     scores that are looked at at once. Counts and sums are kept for each place in it and added up behind the
              walk over the row: added up at each step, threads would wait for each other all the time

Of a row, 512 KB for 128,000 scores, memory is read once and then the cache. To sort the rows in place of that would
move each score and its token through memory for each digit of its bits. The speed has not been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.registers import backend, warps

# With 8 warps, twice as many spill for sm_80. Not measured on a GPU.
BLOCK = 1024
WARPS = 8
SEARCHES = 16
NEVER = tl.constexpr(2147483647)
# As in `runtime.token_marks`, which no kernel knows of.
SEEN = tl.constexpr(1)
BANNED = tl.constexpr(2)


@triton.jit
def _scores(logits, marks, penalty, scale, j, vocabulary):
    """float32 [BLOCK], with the repetition penalty, the bans and the temperature; -inf behind the last."""
    mask = j < vocabulary
    score = tl.load(logits + j, mask, float("-inf")).to(tl.float32)
    if marks is not None:
        mark = tl.load(marks + j, mask, 0)
        penalised = tl.where(score < 0, score * penalty, tl.div_rn(score, penalty))
        score = tl.where((mark & SEEN) != 0, penalised, score)
        score = tl.where((mark & BANNED) != 0, float("-inf"), score)
    return tl.div_rn(score, scale)


@triton.jit
def _keys(score):
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # there is one zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sum(each):
    return tl.reduce(each, 0, tl.standard._sum_combine)


@triton.jit
def _key_at(found, digit, shift):
    """The key that a search tries: a digit of two bits behind those that are found."""
    return (found + (digit << shift) - 2147483648).to(tl.int32)


@triton.jit
def _top_k(logits, marks, penalty, scale, vocabulary, top_k, BLOCK: tl.constexpr, SEARCHES: tl.constexpr):
    """The largest key that as many as `top_k` scores are not less than."""
    found = tl.full([], 0, tl.int64)
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        first = tl.full([BLOCK], 0, tl.int32)
        second = tl.full([BLOCK], 0, tl.int32)
        third = tl.full([BLOCK], 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            j = start + tl.arange(0, BLOCK)
            key = _keys(_scores(logits, marks, penalty, scale, j, vocabulary))
            key = tl.where(j < vocabulary, key, -2147483648)
            first += (key >= _key_at(found, 1, shift)).to(tl.int32)
            second += (key >= _key_at(found, 2, shift)).to(tl.int32)
            third += (key >= _key_at(found, 3, shift)).to(tl.int32)
        one, two, three = _sum(first) >= top_k, _sum(second) >= top_k, _sum(third) >= top_k
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    return _key_at(found, 0, 0)


@triton.jit
def _sum_below(logits, marks, penalty, scale, vocabulary, top, kept, below, BLOCK: tl.constexpr):
    """The weights of what is kept and has a key below."""
    total = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = _scores(logits, marks, penalty, scale, j, vocabulary)
        key = _keys(score)
        total += tl.where((key >= kept) & (key < below), tl.exp(score - top), 0.0).to(tl.float64)
    return _sum(total)


@triton.jit
def _top_p(logits, marks, penalty, scale, vocabulary, top, kept, limit, BLOCK: tl.constexpr, SEARCHES: tl.constexpr):
    """The largest key that all below it go with, and how many of the tokens that have it go."""
    total = _sum_below(logits, marks, penalty, scale, vocabulary, top, kept, NEVER, BLOCK)
    found = tl.full([], 0, tl.int64)
    below = tl.full([], 0.0, tl.float64)
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        first = tl.full([BLOCK], 0.0, tl.float64)
        second = tl.full([BLOCK], 0.0, tl.float64)
        third = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(0, vocabulary, BLOCK):
            j = start + tl.arange(0, BLOCK)
            score = _scores(logits, marks, penalty, scale, j, vocabulary)
            key = _keys(score)
            weight = tl.where(key >= kept, tl.exp(score - top), 0.0).to(tl.float64)
            first += tl.where(key < _key_at(found, 1, shift), weight, 0.0)
            second += tl.where(key < _key_at(found, 2, shift), weight, 0.0)
            third += tl.where(key < _key_at(found, 3, shift), weight, 0.0)
        shares = _sum(first), _sum(second), _sum(third)
        # In float32, as transformers compares.
        one = (shares[0] / total).to(tl.float32) <= limit
        two = (shares[1] / total).to(tl.float32) <= limit
        three = (shares[2] / total).to(tl.float32) <= limit
        below = tl.where(three, shares[2], tl.where(two, shares[1], tl.where(one, shares[0], below)))
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    largest = _keys(top)
    edge = tl.minimum(_key_at(found, 0, 0), largest)
    ties = tl.full([], 0, tl.int32)
    gone = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = _scores(logits, marks, penalty, scale, j, vocabulary)
        tied = (j < vocabulary) & (_keys(score) == edge)
        rank = ties + tl.associative_scan(tied.to(tl.int32), 0, tl.standard._sum_combine)
        share = (below + rank.to(tl.float64) * tl.exp(score - top).to(tl.float64)) / total
        goes = tied & (share.to(tl.float32) <= limit)
        gone += tl.reduce(goes.to(tl.int32), 0, tl.standard._sum_combine)
        ties += tl.reduce(tied.to(tl.int32), 0, tl.standard._sum_combine)
    # The likeliest token stays, whatever the limit.
    return edge, tl.where(edge == largest, tl.minimum(gone, ties - 1), gone)


@triton.jit
def _draw(logits, marks, penalty, scale, vocabulary, top, kept, edge, gone, min_p, fraction, BLOCK: tl.constexpr):
    """The first token where the running sum of the weights that are left exceeds that share of all."""
    total = tl.full([], 0.0, tl.float64)
    last = tl.full([], 0, tl.int32)
    found = tl.full([], NEVER, tl.int32)
    for again in range(2):
        running = tl.full([], 0.0, tl.float64)
        ties = tl.full([], 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            j = start + tl.arange(0, BLOCK)
            score = _scores(logits, marks, penalty, scale, j, vocabulary)
            key = _keys(score)
            weight = tl.exp(score - top).to(tl.float64)
            tied = (j < vocabulary) & (key == edge)
            rank = ties + tl.associative_scan(tied.to(tl.int32), 0, tl.standard._sum_combine)
            left = (j < vocabulary) & (key >= kept) & ((key > edge) | (tied & (rank > gone))) & (weight >= min_p)
            weight = tl.where(left, weight, 0.0)
            sums = running + tl.associative_scan(weight, 0, tl.standard._sum_combine)
            over = left & (sums > fraction * total) & (again == 1)
            found = tl.minimum(found, tl.reduce(tl.where(over, j, NEVER), 0, tl.standard._elementwise_min))
            last = tl.maximum(last, tl.reduce(tl.where(weight > 0, j, 0), 0, tl.standard._elementwise_max))
            running += tl.reduce(weight, 0, tl.standard._sum_combine)
            ties += tl.reduce(tied.to(tl.int32), 0, tl.standard._sum_combine)
        total = running
    # Rounded, the share may be the whole sum; then it is the last token that has any.
    return tl.minimum(found, last)


@triton.jit(do_not_specialize=["vocabulary", "num_rows"], do_not_specialize_on_alignment=["fields", "marks", "slots"])
def _choose_kernel(
    tokens,  # [R] int64
    logits,  # [R, V]
    fields,  # [6, R] float64
    marks,  # [slots + 1, V] uint8, of bits SEEN and BANNED, or None
    slots,  # [R] int64, or None
    vocabulary,
    num_rows,
    logits_stride,
    marks_stride,
    BLOCK: tl.constexpr,
    SEARCHES: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(fields + row).to(tl.float32)
    limit = tl.load(fields + num_rows + row).to(tl.float32)
    min_p = tl.load(fields + 2 * num_rows + row)
    top_k = tl.load(fields + 3 * num_rows + row)
    fraction = tl.load(fields + 4 * num_rows + row)
    penalty = tl.load(fields + 5 * num_rows + row).to(tl.float32)
    logits += row.to(tl.int64) * logits_stride
    if marks is not None:
        marks += tl.load(slots + row) * marks_stride
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, temperature)

    # A NaN is the largest of all, as `argmax` has it.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], NEVER, tl.int32)
    first_nan = tl.full([BLOCK], NEVER, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = _scores(logits, marks, penalty, scale, j, vocabulary)
        none = score != score
        first_nan = tl.where(none, tl.minimum(first_nan, j), first_nan)
        better = score > best
        place = tl.where(better, j, place)
        best = tl.where(better, score, best)
    top = tl.reduce(best, 0, tl.standard._elementwise_max)
    chosen = tl.reduce(tl.where(best == top, place, NEVER), 0, tl.standard._elementwise_min)
    chosen = tl.where(chosen == NEVER, 0, chosen)  # no score is above -inf
    nan = tl.reduce(first_nan, 0, tl.standard._elementwise_min)
    is_nan = nan < NEVER
    chosen = tl.where(is_nan, nan, chosen)
    if temperature != 0:
        chosen = tl.where(is_nan | (top == float("inf")) | (top == float("-inf")), NO_TOKEN, chosen)
        if chosen != NO_TOKEN:
            kept = tl.full([], -2147483648, tl.int32)
            edge, gone = kept, tl.full([], 0, tl.int32)
            if (top_k > 0) & (top_k < vocabulary.to(tl.float64)):
                kept = _top_k(logits, marks, penalty, scale, vocabulary, top_k, BLOCK, SEARCHES)
            if limit > 0:
                edge, gone = _top_p(logits, marks, penalty, scale, vocabulary, top, kept, limit, BLOCK, SEARCHES)
            chosen = _draw(logits, marks, penalty, scale, vocabulary, top, kept, edge, gone, min_p, fraction, BLOCK)
    tl.store(tokens + row, chosen.to(tl.int64))
    if marks is not None:
        marks += tl.maximum(chosen, 0)
        tl.store(marks, tl.load(marks) | SEEN)


def choose(logits: Tensor, fields: Tensor, marks: Tensor | None, slots: Tensor | None, *, no_token: int) -> Tensor:
    """Tokens [R] int64 of logits [R, V]; each is marked, where there are marks.

    fields: [6, R] float64, as `runtime.device_draw.choices` has them; marks: [slots + 1, V] uint8; slots: [R] int64.
    """
    num_rows, vocabulary = logits.shape
    assert logits.stride(-1) == 1 and fields.is_contiguous() and fields.shape == (6, num_rows)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    # fmt: off
    on_device(_choose_kernel, logits)[(num_rows,)](
        tokens, logits, fields, marks, slots, vocabulary, num_rows, logits.stride(0),
        0 if marks is None else marks.stride(0), BLOCK, SEARCHES, no_token, enable_fp_fusion=False,
        **warps(WARPS, backend()),
    )
    # fmt: on
    return tokens
