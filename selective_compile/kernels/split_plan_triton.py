"""How a step's attention is cut into pieces on the device, in Triton: which rows and which keys a program has.

Legend
    tile       BLOCK_Q rows of one request at most. The rows behind those of all requests are of one more, without keys
    keys       of a request: from the iteration of the first key that its first row sees, to its last one
    walked     keys of all tiles, as if each saw all keys of its request: of a prompt up to twice as many as are seen
    length     keys that a split may have: those that are walked, shared among `slots`, but `shortest` at least, and
               `long` where there are `few` pieces then; but up to TIMES as many where all pieces run `at_once` then. Of
               prompts, whose tiles see less and less, as many as a program that runs at once has to see in all: the
               longest tiles begin first, and the short ones fill what they leave. A multiple of BLOCK_N, as splits
               begin at iterations
    splits     of every tile of a request: keys / length, rounded up, as equal as iterations allow. A tile that sees
               fewer keys than the last one of its request may use fewer
    divided    a request of more than one split
    piece      a split of a tile; they are counted request by request, tile by tile
    place      pieces of divided requests alone, counted likewise
    order      in which programs begin: those pieces first that are counted last, since a prompt's last rows see most
               keys, then those of nobody's rows, and where there are no pieces left the rest has nothing to do

A launch in front of a step's first attention finds all pieces, a program each, in two walks over the lengths, LANES
requests at once. Nothing is sent from the host, and the launches depend on T and N only, so that they can be part of a
captured graph; but pieces fit the lengths as they are, not as long as they could be: none has more keys than its share
of all, few requests make enough of them for all processors, and a long request among short ones is cut as finely
as it takes. It is the scheduling of FlashInfer (MLSys 2025, section 3.3), on the device. It is a launch of its own for
all layers that are alike, and because what a program loads is known to be the same for all its threads: found by the
attention itself, it took registers of every thread, and tall tiles spilled.

There are at most tiles + slots pieces, because x rounded up is less than x + 1 and keys / length come to slots at most
over all tiles; at most 2 * slots places, because it is less than 2x above 1; and at most slots divided tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.one_step import once
from selective_compile.kernels.ragged_attention_tiles import SplitConfig

# Lengths that a program of four warps looks at at once. Not measured on a GPU.
LANES = 256
# Of pieces that do not all run at once, the last ones have the device for themselves: of 512 programs where 396 have
# room, these are a quarter. Longer pieces end that, where steps have up to three times too many; more would be too
# long where one begins late, behind requests of few keys. By `benchmarks/split_plan.py`, which simulates it; not
# measured on a GPU.
TIMES = tl.constexpr(3)
# Tiles are uneven where one of so many keys that are walked is not seen: a prompt of its own has every second, and a
# chunk of one behind as many tokens as it has itself every fourth.
UNSEEN = tl.constexpr(4)


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """What a step's launches are told: whatever they need to know of its lengths, so that one look at memory tells it.
    Of each piece and each divided tile, the rows of a tensor are

    pieces   [7, pieces] int32, in the order in which they begin: its request, the first row of its tile, the end of the
             request's rows, its context, its number in the tile, keys of each of the tile's splits, and its place; of
             no piece the first row is not in front of the end
    divided  [4, tiles] int32: its first row and the end of its rows, how many splits its keys reach into, and the place
             of the first one; an end of -1: there is no such tile, nor one behind it
    """

    pieces: Tensor
    divided: Tensor
    places: int  # at most


@triton.jit
def first_key(first_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that any row of a tile sees, by the position of its first row."""
    begin = first_position * 0
    if WINDOW > 0:
        begin = tl.maximum(begin, first_position - WINDOW + 1)
    if CHUNK > 0:
        begin = tl.maximum(begin, first_position // CHUNK * CHUNK)
    return begin


@triton.jit
def last_key(end_of_rows, context, PREFIX: tl.constexpr):
    """The end of the keys that any row of a tile sees, by that of its rows: behind it there may be more of a prefix."""
    end = end_of_rows
    if PREFIX > 0:
        end = tl.maximum(end, tl.minimum(context, PREFIX))
    return end


@triton.jit
def piece_of(pieces, num_pieces, number):
    """A piece, by its rows in `SplitPlan`.

    Read from the second-level cache, so that it may be before the kernel in front is complete (`dependent_launch`).
    """
    at = pieces + number
    request = tl.load(at, cache_modifier=".cg")
    first_row = tl.load(at + num_pieces, cache_modifier=".cg")
    row_end = tl.load(at + 2 * num_pieces, cache_modifier=".cg")
    context = tl.load(at + 3 * num_pieces, cache_modifier=".cg")
    split = tl.load(at + 4 * num_pieces, cache_modifier=".cg")
    each_has = tl.load(at + 5 * num_pieces, cache_modifier=".cg")
    place = tl.load(at + 6 * num_pieces, cache_modifier=".cg")
    return request, first_row, row_end, context, split, each_has, place


@triton.jit
def divided_tile(divided, num_divided, number, there):
    """A divided tile, by its rows in `SplitPlan`; of none, or where not `there`, the end is -1; read as pieces are."""
    at = divided + number
    first_row = tl.load(at, there, 0, cache_modifier=".cg")
    tile_end = tl.load(at + num_divided, there, -1, cache_modifier=".cg")
    used = tl.load(at + 2 * num_divided, there, 0, cache_modifier=".cg")
    place = tl.load(at + 3 * num_divided, there, 0, cache_modifier=".cg")
    return first_row, tile_end, used, place


@triton.jit
def piece_keys(split, each_has, begin, end):
    """Of the keys that a tile sees those of a piece, and whether others have some of the tile's keys. A tile without
    keys has a piece number 0 all the same, which writes the result of its rows."""
    several = end - begin > each_has
    begin += split * each_has
    return begin, tl.minimum(end, begin + each_has), several


@triton.jit
def _tiles_and_keys(
    cu_seqlens_q,
    context_lens,
    num_requests,
    num_rows,
    request,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of requests, of which some may be behind the last one: these have no tiles. And their rows and contexts."""
    real = request < num_requests
    begin = tl.load(cu_seqlens_q + request, request <= num_requests, num_rows)
    end = tl.load(cu_seqlens_q + request + 1, real, num_rows)
    rows = end - begin
    context = tl.load(context_lens + request, real, 0)
    keys = context - first_key(context - rows, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    return (rows + BLOCK_Q - 1) // BLOCK_Q, keys, begin, end, context


@triton.jit
def _longest_split(
    cu_seqlens_q,
    context_lens,
    num_requests,
    num_rows,
    slots,
    shortest,
    few,
    long,
    at_once,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """The `length` of a step."""
    walked = tl.cast(num_rows * 0, tl.int64)
    unseen = tl.cast(num_rows * 0, tl.int64)
    all_tiles = num_rows * 0
    for start in range(0, num_requests, LANES):
        request = start + tl.arange(0, LANES)
        # fmt: off
        tiles, keys, _, _, _ = _tiles_and_keys(
            cu_seqlens_q, context_lens, num_requests, num_rows, request, WINDOW, CHUNK, BLOCK_Q, BLOCK_N,
        )
        # fmt: on
        walked += tl.reduce(tiles.to(tl.int64) * keys, 0, tl.standard._sum_combine)
        theirs = tl.where(request < num_requests, tiles, 0)  # those of rows of nobody walk over nothing
        all_tiles += tl.reduce(theirs, 0, tl.standard._sum_combine)
        if (WINDOW == 0) & (CHUNK == 0):
            behind = theirs.to(tl.int64) * (theirs - 1) // 2 * BLOCK_Q
            unseen += tl.reduce(behind, 0, tl.standard._sum_combine)
    LONGEST: tl.constexpr = 1 << 30
    least = tl.maximum(tl.minimum((walked + few - 1) // few, long), shortest)
    length = tl.maximum((walked + slots - 1) // slots, least)
    # With up to one piece more for each tile; or with as many as there are, where these are no more than run at once.
    room = at_once - all_tiles
    alike = (walked + room - 1) // tl.maximum(room, 1)
    tight = ((walked + at_once - 1) // tl.maximum(at_once, 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    pieces = num_rows * 0
    for start in range(0, num_requests, LANES):
        request = start + tl.arange(0, LANES)
        # fmt: off
        tiles, keys, _, _, _ = _tiles_and_keys(
            cu_seqlens_q, context_lens, num_requests, num_rows, request, WINDOW, CHUNK, BLOCK_Q, BLOCK_N,
        )
        # fmt: on
        theirs = tl.where(request < num_requests, tiles * tl.maximum((keys + tight - 1) // tl.maximum(tight, 1), 1), 0)
        pieces += tl.reduce(theirs.to(tl.int32), 0, tl.standard._sum_combine)
    alike = tl.where(pieces <= at_once, tight, alike)
    fits = (room > 0) & (walked > room.to(tl.int64) * length) & (alike >= length) & (alike <= length * TIMES)
    length = tl.where(fits, alike, length)
    uneven = unseen * UNSEEN >= walked
    length = tl.where(uneven, tl.maximum(length, (walked - unseen) // tl.maximum(at_once, 1)), length)
    length = tl.minimum(length, LONGEST).to(tl.int32)
    return (length + BLOCK_N - 1) // BLOCK_N * BLOCK_N


COUNTS = "num_pieces num_divided num_requests num_rows slots shortest few long at_once".split()


@triton.jit(
    do_not_specialize=COUNTS,
    do_not_specialize_on_alignment=["cu_seqlens_q", "context_lens"],
)
def _plan_kernel(
    pieces,  # [7, num_pieces] int32
    divided,  # [4, num_divided] int32
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]
    num_pieces,
    num_divided,
    num_requests,
    num_rows,
    slots,
    shortest,
    few,
    long,
    at_once,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0)
    # fmt: off
    length = _longest_split(
        cu_seqlens_q, context_lens, num_requests, num_rows, slots, shortest, few, long, at_once, WINDOW,
        CHUNK, BLOCK_Q, BLOCK_N, LANES,
    )
    # fmt: on
    request = number * 0
    counted = number * 0  # pieces of all requests that were walked over
    of_nobody = number * 0
    before = number * 0  # those of requests in front of the one that is looked for
    place = number * 0
    tiles_before = number * 0  # of divided requests
    all_divided = number * 0  # tiles, of the whole step
    for start in range(0, num_requests + 1, LANES):
        each = start + tl.arange(0, LANES)
        # fmt: off
        tiles, keys, _, _, _ = _tiles_and_keys(
            cu_seqlens_q, context_lens, num_requests, num_rows, each, WINDOW, CHUNK, BLOCK_Q, BLOCK_N,
        )
        # fmt: on
        splits = tl.maximum((keys + length - 1) // length, 1)
        theirs = tiles * splits
        in_front = counted + tl.associative_scan(theirs, 0, tl.standard._sum_combine) <= number
        several = splits > 1
        request += tl.reduce(in_front.to(tl.int32), 0, tl.standard._sum_combine)
        before += tl.reduce(tl.where(in_front, theirs, 0), 0, tl.standard._sum_combine)
        place += tl.reduce(tl.where(in_front & several, theirs, 0), 0, tl.standard._sum_combine)
        tiles_before += tl.reduce(tl.where(in_front & several, tiles, 0), 0, tl.standard._sum_combine)
        all_divided += tl.reduce(tl.where(several, tiles, 0), 0, tl.standard._sum_combine)
        counted += tl.reduce(theirs, 0, tl.standard._sum_combine)
        of_nobody += tl.reduce(tl.where(each >= num_requests, theirs, 0), 0, tl.standard._sum_combine)
    # fmt: off
    _, keys, first_row, row_end, context = _tiles_and_keys(
        cu_seqlens_q, context_lens, num_requests, num_rows, request, WINDOW, CHUNK, BLOCK_Q, BLOCK_N,
    )
    # fmt: on
    splits = tl.maximum((keys + length - 1) // length, 1)
    split_keys = ((keys + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    tile = (number - before) // splits
    split = (number - before) % splits
    first_row += tile * BLOCK_Q
    place += number - before
    there = request <= num_requests
    requests_pieces = counted - of_nobody
    to = pieces + tl.where(number < requests_pieces, requests_pieces - 1 - number, number)
    real = number < num_pieces
    tl.store(to, request, real)
    tl.store(to + num_pieces, first_row, real)
    tl.store(to + 2 * num_pieces, tl.where(there, row_end, 0), real)
    tl.store(to + 3 * num_pieces, context, real)
    tl.store(to + 4 * num_pieces, split, real)
    tl.store(to + 5 * num_pieces, split_keys, real)
    tl.store(to + 6 * num_pieces, place, real)
    tile_end = tl.minimum(first_row + BLOCK_Q, row_end)
    in_pool = context - row_end  # a row's position is so much more than its number
    begin = first_key(in_pool + first_row, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    used = (last_key(in_pool + tile_end, context, PREFIX) - begin + split_keys - 1) // tl.maximum(split_keys, 1)
    place_of_tile = tiles_before + tile
    first = (splits > 1) & (split == 0) & there & (place_of_tile < num_divided)
    tl.store(divided + place_of_tile, first_row, first)
    tl.store(divided + num_divided + place_of_tile, tile_end, first)
    tl.store(divided + 2 * num_divided + place_of_tile, used, first)
    tl.store(divided + 3 * num_divided + place_of_tile, place, first)
    tl.store(divided + num_divided + number, -1, (number >= all_divided) & (number < num_divided))


def plan(
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    splits: SplitConfig,
    *,
    num_rows: int,
    rows_and_keys: tuple[int, int],
    window: int,
    chunk: int,
    prefix: int = 0,
) -> SplitPlan:
    """Cut a step of T rows into pieces, once for all layers that are alike. rows_and_keys: of a tile, BLOCK_Q and
    BLOCK_N."""
    sizes = (splits, num_rows, rows_and_keys, window, chunk, prefix)
    key = (cu_seqlens_q.data_ptr(), context_lens.data_ptr(), len(context_lens), *sizes)
    return once(key, lambda: _plan(cu_seqlens_q, context_lens, *sizes))


def _plan(
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    splits: SplitConfig,
    num_rows: int,
    rows_and_keys: tuple[int, int],
    window: int,
    chunk: int,
    prefix: int,
) -> SplitPlan:
    num_requests, block_q = context_lens.shape[0], rows_and_keys[0]
    # No tile is without a row, and each request has one at most that is not full; the rows of nobody are one more.
    tiles = min(num_rows, (num_rows + (num_requests + 1) * (block_q - 1)) // block_q)
    sizes = tiles + splits.slots, min(tiles, splits.slots)
    told = [cu_seqlens_q.new_empty(fields, size, dtype=torch.int32) for fields, size in zip((7, 4), sizes, strict=True)]
    early = begins_early(cu_seqlens_q.device)
    # fmt: off
    on_device(_plan_kernel, cu_seqlens_q)[(sizes[0],)](
        *told, cu_seqlens_q, context_lens, *sizes, num_requests, num_rows, splits.slots, splits.shortest, splits.few,
        splits.long, splits.at_once, window, chunk, prefix, *rows_and_keys, LANES, early, num_warps=4,
        **launch_options(early),
    )
    # fmt: on
    return SplitPlan(pieces=told[0], divided=told[1], places=min(2 * splits.slots, sizes[0]))
