"""Choosing a token for each row of logits in Triton, for CUDA and ROCm: what `runtime.device_draw.choose` defines.

Legend
    row       R of them, of V logits each, and a program for each, behind those that look at the parts of every row.
              Where it is drawn by its temperature alone, the program looks at what is known of the parts, and then at
              the part that the draw falls into. Else others have listed its candidates, and it goes over these some
              forty times, or over all V, out of the cache; it never sorts them
    part, best, lanes  of `choose_parts_triton`
    key       a score's bits as an integer of the same order. A limit between scores is looked for in its 32 bits, two
              of them each time the candidates are gone over: SEARCHES times
    candidates  tokens that top-k, top-p and min-p may leave, in their order; if they are more than ROOM, all V are:
              `whole`. For top-k: of the largest score in each lane the k-th largest, and what is not less. For top-p:
              what weighs 1/V of the limit; all others together come to less than the limit of the likeliest token
              alone, whose weight is 1. What they weigh is the `rest`
    length    of candidates, or V
    kept      the key of the k-th largest score: those that are not less stay
    weight    exp(score - top), top being the largest score: the probability but for a factor. float32, sums float64.
              What is known of parts is next to their `best`, and is multiplied by exp(best - top)
    edge      the least key that top-p leaves. Of the tokens that have it, which are as likely as one another, those up
              to the token `gone` go
    segment   of the candidates, as a part is of the scores: what it weighs is found first, and a draw then looks at one
    BLOCK     scores that are looked at at once. Counts and sums are kept for each place in it and added up behind the
              walk over the row: added up at each step, threads would wait for each other all the time

Of a row, 512 KB for 128,000 scores, memory is read once and then the cache. To sort the rows in place of that would
move each score and its token through memory for each digit of its bits. Of 128,256 scores, an H200 took 16 us for one
row with a temperature, and 184 with top-k and top-p; for 256 rows 106 and 438, when one program listed the candidates
of a row. Where all are greedy and rows are few, the largest of the parts is all that is looked for; by `argmax` it took
39 us, and 40 of 32 rows, of which draws took 27. Not measured on a GPU since.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.choose_candidates_triton import list_candidates
from selective_compile.kernels.choose_limits_triton import find_top_k, find_top_p, keys_of, scores_at
from selective_compile.kernels.choose_parts_triton import NEVER, PARTS, SEEN, asked, look_at_parts, total_of
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.registers import backend, warps

# With 8 warps, twice as many spill for sm_80. Not measured on a GPU.
BLOCK = 1024
WARPS = 8
SEARCHES = 16
# 128 KB for each row. Not measured on a GPU.
ROOM = 32768
# Of so many rows and fewer, draws by parts took less than `argmax`, which gives each row to one processor; that took 48
# us of 256 rows, where draws took 106.
GREEDY_ROWS = 32


@triton.jit
def _left(place, logits, marks, penalty, scale, candidates, whole, length, best, kept, edge, gone, min_p):
    """The tokens of candidates and their weights next to the score `best`, 0 of those that are not left."""
    j, score, mask = scores_at(place, logits, marks, penalty, scale, candidates, whole, length)
    key = keys_of(score)
    weight = tl.exp(score - best).to(tl.float64)
    left = mask & (key >= kept) & ((key > edge) | ((key == edge) & (j > gone))) & (weight >= min_p)
    return j, tl.where(left, weight, 0.0)


@triton.jit
def _segments(
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
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """[PARTS], what is left of each segment weighs; and how many candidates a segment has."""
    each = (length + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    number = tl.arange(0, PARTS)
    sums = tl.full([PARTS], 0.0, tl.float64)
    for segment in range((length + each - 1) // each):
        weights = tl.full([BLOCK], 0.0, tl.float64)
        for start in range(segment * each, tl.minimum(segment * each + each, length), BLOCK):
            place = start + tl.arange(0, BLOCK)
            # fmt: off
            _, weight = _left(
                place, logits, marks, penalty, scale, candidates, whole, length, top, kept, edge, gone, min_p,
            )
            # fmt: on
            weights += weight
        sums = tl.where(number == segment, total_of(weights), sums)
    return sums, each


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
    best,
    sums,
    each,
    kept,
    edge,
    gone,
    min_p,
    fraction,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first token where the running sum of the weights that are left exceeds that share of all.

    best, sums: of segments of `each` candidates [PARTS], the score that weights are next to, and what is left of them.
    """
    number = tl.arange(0, PARTS)
    factor = tl.exp((best - top).to(tl.float64))
    sums *= factor
    limit = fraction * total_of(sums)
    over = (tl.associative_scan(sums, 0, tl.standard._sum_combine) > limit) & (sums > 0)
    segment = tl.reduce(tl.where(over, number, PARTS), 0, tl.standard._elementwise_min)
    # Rounded, the share may be the whole sum; then it is the last token that has any. So it is within a segment.
    segment = tl.minimum(segment, tl.reduce(tl.where(sums > 0, number, 0), 0, tl.standard._elementwise_max))
    before = total_of(tl.where(number < segment, sums, 0.0))
    limit = (limit - before) / total_of(tl.where(number == segment, factor, 0.0))
    best = tl.reduce(tl.where(number == segment, best, float("-inf")), 0, tl.standard._elementwise_max)
    last = tl.full([], 0, tl.int32)
    found = tl.full([], NEVER, tl.int32)
    running = tl.full([], 0.0, tl.float64)
    for start in range(segment * each, tl.minimum(segment * each + each, length), BLOCK):
        place = start + tl.arange(0, BLOCK)
        # fmt: off
        j, weight = _left(
            place, logits, marks, penalty, scale, candidates, whole, length, best, kept, edge, gone, min_p,
        )
        # fmt: on
        drawn = (weight > 0) & (running + tl.associative_scan(weight, 0, tl.standard._sum_combine) > limit)
        found = tl.minimum(found, tl.reduce(tl.where(drawn, j, NEVER), 0, tl.standard._elementwise_min))
        last = tl.maximum(last, tl.reduce(tl.where(weight > 0, j, 0), 0, tl.standard._elementwise_max))
        running += total_of(weight)
    return tl.minimum(found, last)


@triton.jit
def _drawn(
    logits,  # of a row, as all up to the candidates
    marks,
    penalty,
    scale,
    candidates,
    vocabulary,
    limits,  # 1 - top-p, min-p, top-k, whether there is any
    best,
    top,
    part,
    of_parts,  # what each weighs, how many candidates it has and what all others weigh
    parts,
    fraction,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SEARCHES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The token at that share of the sum of what is left."""
    limit, min_p, top_k, few = limits
    sums, counts, rests = of_parts
    number = tl.arange(0, PARTS)
    kept = tl.full([], -2147483648, tl.int32)
    edge, gone = kept, tl.full([], -1, tl.int32)
    count, rest = tl.full([], NEVER, tl.int32), tl.full([], 0.0, tl.float64)
    if few:
        count = total_of(tl.load(counts + number, number < parts, 0))
        rest = total_of(tl.load(rests + number, number < parts, 0.0))
    whole = count > ROOM
    length = tl.where(whole, vocabulary, count)
    # What top-k lets go has no share that top-p could be of.
    rest = tl.where(whole | (top_k > 0), 0.0, rest)
    of_row = (logits, marks, penalty, scale, candidates, whole, length)
    if top_k > 0:
        kept = find_top_k(*of_row, top_k, BLOCK, SEARCHES)
    if limit > 0:
        edge, gone = find_top_p(*of_row, top, kept, rest, limit, BLOCK, SEARCHES)
    if few:
        weighs, each = _segments(*of_row, top, kept, edge, gone, min_p, BLOCK, PARTS)
        best = tl.full([PARTS], 0.0, tl.float32) + top
    else:
        weighs, each = tl.load(sums + number, number < parts, 0.0), part
    return _draw(*of_row, top, best, weighs, each, kept, edge, gone, min_p, fraction, BLOCK, PARTS)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["fields", "slots"])
def _choose_kernel(
    tokens,  # [R] int64
    bests,  # of `_part_kernel`, as the places and the sums
    places,
    sums,
    candidates,  # of `list_candidates`, as the counts and the rests; None as `fields`
    counts,
    rests,
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
    SEARCHES: tl.constexpr,
    ROOM: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    row = tl.program_id(0)
    if fields is not None:
        temperature, penalty, limit, min_p, top_k, few = asked(fields, num_rows, row, vocabulary)
        scale = tl.where(temperature == 0, 1.0, temperature)
        logits += row.to(tl.int64) * logits_stride
        candidates += row.to(tl.int64) * ROOM
    if marks is not None:
        marks += tl.load(slots + row) * marks_stride

    number = tl.arange(0, PARTS)
    of_parts = row.to(tl.int64) * PARTS + number
    parts = (vocabulary + part - 1) // part
    best = tl.load(bests + of_parts, number < parts, float("-inf"))
    place = tl.load(places + of_parts, number < parts, NEVER)
    # A NaN is the largest of all, as `argmax` has it.
    nan = tl.reduce(tl.where(best != best, place, NEVER), 0, tl.standard._elementwise_min)
    is_nan = nan < NEVER
    best = tl.where(best != best, float("-inf"), best)
    top = tl.reduce(best, 0, tl.standard._elementwise_max)
    chosen = tl.reduce(tl.where(best == top, place, NEVER), 0, tl.standard._elementwise_min)
    chosen = tl.where(chosen == NEVER, 0, chosen)  # no score is above -inf
    chosen = tl.where(is_nan, nan, chosen)
    if fields is not None:
        if temperature != 0:
            chosen = tl.where(is_nan | (top == float("inf")) | (top == float("-inf")), NO_TOKEN, chosen)
            if chosen != NO_TOKEN:
                first = row.to(tl.int64) * PARTS
                # fmt: off
                chosen = _drawn(
                    logits, marks, penalty, scale, candidates, vocabulary, (limit, min_p, top_k, few), best, top, part,
                    (sums + first, counts + first, rests + first), parts, tl.load(fields + 4 * num_rows + row),
                    BLOCK, PARTS, SEARCHES, ROOM,
                )
                # fmt: on
    tl.store(tokens + row, chosen.to(tl.int64))
    if marks is not None:
        marks += tl.maximum(chosen, 0)
        seen = tl.load(marks) | SEEN
        tl.debug_barrier()  # every warp has read it, one of them writes
        tl.store(marks, seen)


def choose(
    logits: Tensor, fields: Tensor | None, marks: Tensor | None, slots: Tensor | None, *, no_token: int
) -> Tensor:
    """Tokens [R] int64 of logits [R, V]; each is marked, where there are marks.

    fields: [6, R] float64, as `runtime.device_draw.choices` has them, or None; marks: [slots + 1, V] uint8; slots: [R]
    int64.
    """
    num_rows, vocabulary = logits.shape
    assert fields is not None or marks is None
    # What is wider the kernels would round.
    if fields is None and (num_rows > GREEDY_ROWS or logits.dtype is torch.float64):
        return logits.argmax(dim=-1)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    assert fields is None or fields.is_contiguous() and fields.shape == (6, num_rows)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    parts = look_at_parts(logits, fields, marks, slots, block=BLOCK)
    listed: tuple[Tensor | None, ...] = (None, None, None)
    if fields is not None:
        listed = list_candidates(logits, fields, marks, slots, parts, room=ROOM, block=BLOCK, searches=SEARCHES)
    strides = logits.stride(0), 0 if marks is None else marks.stride(0)
    # fmt: off
    on_device(_choose_kernel, logits)[(num_rows,)](
        tokens, parts.bests, parts.places, parts.sums, *listed,
        logits, fields, marks, slots, vocabulary, num_rows, parts.length, *strides,
        BLOCK, PARTS, SEARCHES, ROOM, no_token, enable_fp_fusion=False, **warps(WARPS, backend()),
    )
    # fmt: on
    return tokens
