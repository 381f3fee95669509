"""Which tokens top-k, top-p and min-p leave of a row of logits, in Triton; the legend is that of `choose_triton`."""

from __future__ import annotations

import triton
import triton.language as tl

from selective_compile.kernels.choose_parts_triton import scores_of, total_of


@triton.jit
def scores_at(place, logits, marks, penalty, scale, candidates, whole, length):
    """The tokens of candidates and their scores, and whether there are so many."""
    mask = place < length
    j = tl.where(whole, place, tl.load(candidates + place, place < tl.where(whole, 0, length), 0))
    return j, scores_of(logits, marks, penalty, scale, j, mask), mask


@triton.jit
def keys_of(score):
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # there is one zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _key_at(found, digit, shift):
    """The key that a search tries: a digit of two bits behind those that are found."""
    return (found + (digit << shift) - 2147483648).to(tl.int32)


@triton.jit
def find_kth_largest(keys, k, SEARCHES: tl.constexpr):
    """The largest key that as many as `k` of these are not less than; the least there is, if they are fewer."""
    found = tl.full([], 0, tl.int64)
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        one = total_of((keys >= _key_at(found, 1, shift)).to(tl.int32)) >= k
        two = total_of((keys >= _key_at(found, 2, shift)).to(tl.int32)) >= k
        three = total_of((keys >= _key_at(found, 3, shift)).to(tl.int32)) >= k
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    return _key_at(found, 0, 0)


@triton.jit
def find_top_k(
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
            _, score, mask = scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
            key = tl.where(mask, keys_of(score), -2147483648)
            first += (key >= _key_at(found, 1, shift)).to(tl.int32)
            second += (key >= _key_at(found, 2, shift)).to(tl.int32)
            third += (key >= _key_at(found, 3, shift)).to(tl.int32)
        one, two, three = total_of(first) >= top_k, total_of(second) >= top_k, total_of(third) >= top_k
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    return _key_at(found, 0, 0)


@triton.jit
def _sum_kept(logits, marks, penalty, scale, candidates, whole, length, top, kept, BLOCK: tl.constexpr):
    """The weights of what is kept."""
    total = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        _, score, _ = scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
        total += tl.where(keys_of(score) >= kept, tl.exp(score - top), 0.0).to(tl.float64)
    return total_of(total)


@triton.jit
def find_top_p(
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
    """The largest key that all below it go with, and the last of the tokens that have it that goes, or -1.

    rest: of what has gone.
    """
    total = rest + _sum_kept(logits, marks, penalty, scale, candidates, whole, length, top, kept, BLOCK)
    largest = keys_of(top)
    found = tl.full([], 0, tl.int64)
    below = rest
    for search in range(SEARCHES):
        shift = 30 - 2 * search
        first = tl.full([BLOCK], 0.0, tl.float64)
        second = tl.full([BLOCK], 0.0, tl.float64)
        third = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _, score, _ = scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
            key = keys_of(score)
            weight = tl.where(key >= kept, tl.exp(score - top), 0.0).to(tl.float64)
            first += tl.where(key < _key_at(found, 1, shift), weight, 0.0)
            second += tl.where(key < _key_at(found, 2, shift), weight, 0.0)
            third += tl.where(key < _key_at(found, 3, shift), weight, 0.0)
        shares = rest + total_of(first), rest + total_of(second), rest + total_of(third)
        # In float32, as transformers compares. What is rounded to a limit of 1 would reach behind the likeliest tokens.
        one = ((shares[0] / total).to(tl.float32) <= limit) & (_key_at(found, 1, shift) <= largest)
        two = ((shares[1] / total).to(tl.float32) <= limit) & (_key_at(found, 2, shift) <= largest)
        three = ((shares[2] / total).to(tl.float32) <= limit) & (_key_at(found, 3, shift) <= largest)
        below = tl.where(three, shares[2], tl.where(two, shares[1], tl.where(one, shares[0], below)))
        found += (one.to(tl.int64) + two.to(tl.int64) + three.to(tl.int64)) << shift
    edge = _key_at(found, 0, 0)
    ties = tl.full([], 0, tl.int32)
    gone = tl.full([], -1, tl.int32)
    last = gone
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        j, score, mask = scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
        tied = mask & (keys_of(score) == edge)
        here = total_of(tied.to(tl.int32))
        if here > 0:  # mostly in one step alone
            rank = ties + tl.associative_scan(tied.to(tl.int32), 0, tl.standard._sum_combine)
            share = (below + rank.to(tl.float64) * tl.exp(score - top).to(tl.float64)) / total
            goes = tied & (share.to(tl.float32) <= limit)
            gone = tl.maximum(gone, tl.reduce(tl.where(goes, j, -1), 0, tl.standard._elementwise_max))
            last = tl.maximum(last, tl.reduce(tl.where(tied, j, -1), 0, tl.standard._elementwise_max))
        ties += here
    # The likeliest token stays, whatever the limit.
    return edge, tl.where(edge == largest, tl.minimum(gone, last - 1), gone)
