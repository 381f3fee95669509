"""Choosing a token for each row of logits in Triton, for CUDA and ROCm: what `runtime.device_draw.choose` defines.

Legend
    row       a program each; it goes over the V logits two or three times, and some forty times over its candidates,
              which may be all V, out of the cache, and never sorts them
    key       a score's bits as an integer of the same order. A limit between scores is looked for in its 32 bits, two
              of them each time the candidates are gone over: SEARCHES times
    candidates  tokens that top-k, top-p and min-p may leave, in their order; if they are more than ROOM, all V are:
              `whole`. For top-k: of the largest score in each place of the BLOCKs the k-th largest, and what is not
              less. For top-p: what weighs 1/V of the limit; all others together come to less than the limit of the
              likeliest token alone, whose weight is 1. What they weigh is the `rest`
    length    of candidates, or V
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
# 128 KB for each row. Not measured on a GPU.
ROOM = 32768
NEVER = tl.constexpr(2147483647)
# As in `runtime.token_marks`, which no kernel knows of.
SEEN = tl.constexpr(1)
BANNED = tl.constexpr(2)


@triton.jit
def _scores(logits, marks, penalty, scale, j, mask):
    """float32 [BLOCK], with the repetition penalty, the bans and the temperature; -inf where there is none."""
    score = tl.load(logits + j, mask, float("-inf")).to(tl.float32)
    if marks is not None:
        mark = tl.load(marks + j, mask, 0)
        penalised = tl.where(score < 0, score * penalty, tl.div_rn(score, penalty))
        score = tl.where((mark & SEEN) != 0, penalised, score)
        score = tl.where((mark & BANNED) != 0, float("-inf"), score)
    return tl.div_rn(score, scale)


@triton.jit
def _scores_at(place, logits, marks, penalty, scale, candidates, whole, length):
    """The tokens of candidates and their scores, and whether there are so many."""
    mask = place < length
    j = tl.where(whole, place, tl.load(candidates + place, place < tl.where(whole, 0, length), 0))
    return j, _scores(logits, marks, penalty, scale, j, mask), mask


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
def _kth_largest(keys, k, SEARCHES: tl.constexpr):
    """The largest key that as many as `k` of these are not less than; the least there is, if they are fewer."""
    found = tl.full([], 0, tl.int64)
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        one = _sum((keys >= _key_at(found, 1, shift)).to(tl.int32)) >= k
        two = _sum((keys >= _key_at(found, 2, shift)).to(tl.int32)) >= k
        three = _sum((keys >= _key_at(found, 3, shift)).to(tl.int32)) >= k
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    return _key_at(found, 0, 0)


@triton.jit
def _find_candidates(
    candidates, logits, marks, penalty, scale, vocabulary, top, least, lightest, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens with a key and a weight that are not less: how many they are, and what the others weigh."""
    count = tl.full([], 0, tl.int32)
    rest = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = _scores(logits, marks, penalty, scale, j, j < vocabulary)
        weight = tl.exp(score - top).to(tl.float64)
        likely = (j < vocabulary) & (_keys(score) >= least) & (weight >= lightest)
        place = count - 1 + tl.associative_scan(likely.to(tl.int32), 0, tl.standard._sum_combine)
        tl.store(candidates + place, j, likely & (place < ROOM))
        rest += tl.where(likely, 0.0, weight)
        count += _sum(likely.to(tl.int32))
    tl.debug_barrier()  # each thread reads what others have found
    return count, _sum(rest)


@triton.jit
def _top_k(
    logits, marks, penalty, scale, candidates, whole, length, top_k, BLOCK: tl.constexpr, SEARCHES: tl.constexpr
):
    """The largest key that as many as `top_k` scores are not less than."""
    found = tl.full([], 0, tl.int64)
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        first = tl.full([BLOCK], 0, tl.int32)
        second = tl.full([BLOCK], 0, tl.int32)
        third = tl.full([BLOCK], 0, tl.int32)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _, score, mask = _scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
            key = tl.where(mask, _keys(score), -2147483648)
            first += (key >= _key_at(found, 1, shift)).to(tl.int32)
            second += (key >= _key_at(found, 2, shift)).to(tl.int32)
            third += (key >= _key_at(found, 3, shift)).to(tl.int32)
        one, two, three = _sum(first) >= top_k, _sum(second) >= top_k, _sum(third) >= top_k
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    return _key_at(found, 0, 0)


@triton.jit
def _sum_kept(logits, marks, penalty, scale, candidates, whole, length, top, kept, BLOCK: tl.constexpr):
    """The weights of what is kept."""
    total = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        _, score, _ = _scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
        total += tl.where(_keys(score) >= kept, tl.exp(score - top), 0.0).to(tl.float64)
    return _sum(total)


@triton.jit
def _top_p(
    logits,
    marks,
    penalty,
    scale,
    candidates,
    whole,
    length,
    top,
    kept,
    rest,
    limit,
    BLOCK: tl.constexpr,
    SEARCHES: tl.constexpr,
):
    """The largest key that all below it go with, and how many of the tokens that have it go. rest: of what has gone."""
    total = rest + _sum_kept(logits, marks, penalty, scale, candidates, whole, length, top, kept, BLOCK)
    largest = _keys(top)
    found = tl.full([], 0, tl.int64)
    below = rest
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        first = tl.full([BLOCK], 0.0, tl.float64)
        second = tl.full([BLOCK], 0.0, tl.float64)
        third = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _, score, _ = _scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
            key = _keys(score)
            weight = tl.where(key >= kept, tl.exp(score - top), 0.0).to(tl.float64)
            first += tl.where(key < _key_at(found, 1, shift), weight, 0.0)
            second += tl.where(key < _key_at(found, 2, shift), weight, 0.0)
            third += tl.where(key < _key_at(found, 3, shift), weight, 0.0)
        shares = rest + _sum(first), rest + _sum(second), rest + _sum(third)
        # In float32, as transformers compares. What is rounded to a limit of 1 would reach behind the likeliest tokens.
        one = ((shares[0] / total).to(tl.float32) <= limit) & (_key_at(found, 1, shift) <= largest)
        two = ((shares[1] / total).to(tl.float32) <= limit) & (_key_at(found, 2, shift) <= largest)
        three = ((shares[2] / total).to(tl.float32) <= limit) & (_key_at(found, 3, shift) <= largest)
        below = tl.where(three, shares[2], tl.where(two, shares[1], tl.where(one, shares[0], below)))
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    edge = _key_at(found, 0, 0)
    ties = tl.full([], 0, tl.int32)
    gone = tl.full([], 0, tl.int32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        _, score, mask = _scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
        tied = mask & (_keys(score) == edge)
        rank = ties + tl.associative_scan(tied.to(tl.int32), 0, tl.standard._sum_combine)
        share = (below + rank.to(tl.float64) * tl.exp(score - top).to(tl.float64)) / total
        goes = tied & (share.to(tl.float32) <= limit)
        gone += tl.reduce(goes.to(tl.int32), 0, tl.standard._sum_combine)
        ties += tl.reduce(tied.to(tl.int32), 0, tl.standard._sum_combine)
    # The likeliest token stays, whatever the limit.
    return edge, tl.where(edge == largest, tl.minimum(gone, ties - 1), gone)


@triton.jit
def _draw(
    logits,
    marks,
    penalty,
    scale,
    candidates,
    whole,
    length,
    top,
    kept,
    edge,
    gone,
    min_p,
    fraction,
    BLOCK: tl.constexpr,
):
    """The first token where the running sum of the weights that are left exceeds that share of all."""
    total = tl.full([], 0.0, tl.float64)
    last = tl.full([], 0, tl.int32)
    found = tl.full([], NEVER, tl.int32)
    for again in range(2):
        running = tl.full([], 0.0, tl.float64)
        ties = tl.full([], 0, tl.int32)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            j, score, mask = _scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
            key = _keys(score)
            weight = tl.exp(score - top).to(tl.float64)
            tied = mask & (key == edge)
            rank = ties + tl.associative_scan(tied.to(tl.int32), 0, tl.standard._sum_combine)
            left = mask & (key >= kept) & ((key > edge) | (tied & (rank > gone))) & (weight >= min_p)
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
    candidates,  # [R, ROOM] int32, to be written
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
    ROOM: tl.constexpr,
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
    candidates += row.to(tl.int64) * ROOM
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
        score = _scores(logits, marks, penalty, scale, j, j < vocabulary)
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
            count, rest = tl.full([], NEVER, tl.int32), tl.full([], 0.0, tl.float64)
            has_top_k = (top_k > 0) & (top_k < vocabulary.to(tl.float64))
            if has_top_k | (limit > 0) | (min_p > 0):
                least, lightest = kept, tl.where(limit > 0, limit.to(tl.float64) / vocabulary, min_p)
                if has_top_k:
                    least, lightest = _kth_largest(_keys(best), top_k, SEARCHES), lightest * 0
                # fmt: off
                count, rest = _find_candidates(
                    candidates, logits, marks, penalty, scale, vocabulary, top, least, lightest, ROOM, BLOCK,
                )
                # fmt: on
            whole = count > ROOM
            length = tl.where(whole, vocabulary, count)
            # What top-k lets go has no share that top-p could be of.
            rest = tl.where(whole | has_top_k, 0.0, rest)
            of_row = (logits, marks, penalty, scale, candidates, whole, length)
            if has_top_k:
                kept = _top_k(*of_row, top_k, BLOCK, SEARCHES)
            if limit > 0:
                edge, gone = _top_p(*of_row, top, kept, rest, limit, BLOCK, SEARCHES)
            chosen = _draw(*of_row, top, kept, edge, gone, min_p, fraction, BLOCK)
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
    candidates = logits.new_empty(num_rows, ROOM, dtype=torch.int32)  # as wide for any V: the kernel is one for all
    # fmt: off
    on_device(_choose_kernel, logits)[(num_rows,)](
        tokens, candidates, logits, fields, marks, slots, vocabulary, num_rows, logits.stride(0),
        0 if marks is None else marks.stride(0), BLOCK, SEARCHES, ROOM, no_token,
        enable_fp_fusion=False, **warps(WARPS, backend()),
    )
    # fmt: on
    return tokens
