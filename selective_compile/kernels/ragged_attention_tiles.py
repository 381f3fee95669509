"""How a step's ragged attention is shared out in Triton: the tile, and whether keys are split, by what the host knows.

| step | tile | keys of a request |
|---|---|---|
| two rows a request or fewer, as of decoding | low | split |
| more, as of prefill and mixed steps | tall | split where the request's rows fit into one tile, else whole |
| of a batch-invariant engine | low | whole: how a step is split depends on the requests in it |
| without a pool | by rows | whole: a request that fits into a tile has no more keys than rows |

A tile's keys and values are read in one of two ways:

| where | how | tall tiles |
|---|---|---|
| Hopper and Blackwell, 16 bits, head sizes up to 256, blocks of whole tiles | one bulk copy of a block's slots | 128 |
| elsewhere | by the address of each row | 64; 32 from head size 129 on in float32, and from 257 on in 16 bits |

A tile has the heads of a whole group, so that they read keys and values once; where it is 32 rows, at most so many.

A split is a run of `length` keys, the same number for all requests of a step, so that programs have as much to do as
each other and a short request leaves its share empty instead of cutting it finer. Their number is reasoned from the two
things that a walk over all keys gets wrong, and not measured on a GPU:

- few requests leave processors idle, so there are enough splits that every processor has `PROGRAMS_PER_PROCESSOR`;
- one long request among many short ones is walked long after the others are done, however many they are, so no
  split is longer than `LONGEST` keys, up to `MOST` splits: a long context is split at every batch size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

# A program waits for its keys most of the time, and a processor has room for more than one. Not measured on a GPU.
PROGRAMS_PER_PROCESSOR = 2
# Keys of a split. Below the shortest, the launch of the merge costs about what the shorter walk saves; at the longest,
# writing and reading the partial results of four query heads is 0.4 % of reading their keys and values of 16 bits.
# Not measured on a GPU.
SHORTEST = 256
LONGEST = 2048
# Splits that are made on account of the length alone. It bounds the memory of partial results: with 32 heads of size
# 128 they take 0.5 MiB for each request that decodes. Not measured on a GPU.
MOST = 32
# Rows of a tile with head sizes of which more would spill registers. A group of more heads is cut into parts, each of
# which reads all keys again.
SHORT_TILE = 32


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Sizes of one compiled variant of the attention kernel; block_d, block_dv are the padded head sizes.

    heads: query heads of a program: those of a group, or one of several equal parts of it.
    bulk: whether an iteration's keys are one bulk copy, and its values.
    """

    heads: int
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int
    bulk: bool

    def options(self, backend: str) -> dict[str, int]:
        """Of a launch on "cuda" or "hip"."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # As many as a thread can have, said so: by itself the assembler for CUDA spills a few to have room for one
        # more block of threads beside the others.
        return options | ({"maxnreg": 255} if backend == "cuda" else {})


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """`count` programs share the keys of a request, `length` each, which is a multiple of the tile's block_n."""

    count: int
    length: int


def tile_config(
    *,
    num_rows: int,
    num_requests: int,
    group: int,
    key_size: int,
    value_size: int,
    bytes_per_element: int,
    block_size: int,
    bulk: bool,
) -> TileConfig:
    """Choose the tile from what the host knows: shapes, not lengths. Any choice is correct for any step.

    Args:
        block_size: 0 without a pool.
        bulk: the device has `bulk_copies`, and the pools begin and go on at multiples of 16 bytes.
    """
    # tl.dot needs 16 in every direction.
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    # At two rows a request or fewer on average, most tiles hold one row: a tall tile would be mostly masked. So
    # it is in every step of a batch-invariant engine, which has a request for each row: it always has one BLOCK_N.
    low = num_rows <= 2 * num_requests
    wide = bytes_per_element == 4
    # float32 is multiplied by vector units, which read registers: it would be copied once more.
    if bulk and not wide and max(block_d, block_dv) <= 256:
        tile = _bulk_tile(group, block_d, block_dv, low=low)
        if block_size > 0 and block_size % tile.block_n == 0:
            return tile
    largest = max(block_d, block_dv)
    short = largest > (128 if wide else 256)
    if short:
        group = _part_of(group, SHORT_TILE)
    # The largest tiles that compile without a register spill for every target. A float32 product runs on the vector
    # units and holds its operands in registers, hence its smaller ones.
    block_m = _block_m(1 if low else (SHORT_TILE if short else 64) // group, group)
    block_n = 16 if wide else (64 if block_m == 16 else 32)
    many = block_m * block_dv >= 64 * 256 or (wide and block_m > 16) or (short and not low) or (wide and largest > 256)
    # Two stages of key and value tiles fit into the 64 KiB of gfx942, the smallest shared memory of a target.
    fitting = 32768 // ((block_d + block_dv) * bytes_per_element)
    block_n = max(16, min(block_n, 1 << fitting.bit_length() - 1))
    return TileConfig(
        heads=group,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_dv=block_dv,
        num_warps=8 if many else 4,
        # Of float32 beyond head size 256 a tile of 16 keys is 64 KiB, and two of them are more than sm_80 has.
        num_stages=1 if wide and largest > 256 else 2,
        bulk=False,
    )


def _bulk_tile(group: int, block_d: int, block_dv: int, *, low: bool) -> TileConfig:
    """For sm_90 and sm_100, which have 227 KiB of shared memory."""
    # Two groups of four warps, with the 64 rows that an instruction of Hopper's matrix units has for each, and the 128
    # of Blackwell's together.
    block_m = _block_m(1 if low else 128 // group, group)
    return TileConfig(
        heads=group,
        block_m=block_m,
        # With 64 at head size 256, tall tiles spill registers on sm_90.
        block_n=64 if max(block_d, block_dv) <= 128 else 32,
        block_d=block_d,
        block_dv=block_dv,
        num_warps=4 if block_m < 128 else 8,
        # Copies begin two iterations ahead, as far as they are from memory at 1 microsecond: an iteration of a tall
        # tile is half of one. Each takes two stages, as Triton loads a block's number a stage in front of the block.
        # Not measured on a GPU.
        num_stages=5,
        bulk=True,
    )


def _part_of(group: int, most: int) -> int:
    """How many heads a part of a group has, if it is cut into equal parts of at most so many."""
    return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def _block_m(rows: int, group: int) -> int:
    return max(16, triton.next_power_of_2(max(1, rows) * group))


def split_config(
    *, num_rows: int, num_requests: int, parts: int, keys: int, block_n: int, processors: int
) -> SplitConfig:
    """Choose how many programs share the keys of a request. Any choice is correct for any step.

    Args:
        parts: of a tile's heads, each of which has a program.
        keys: an upper bound of those that a program walks over without splits (`most_keys`).
        processors: of the device (`processors`).
    """
    # Requests that fit into a tile have one each, and the empty ones none.
    programs = max(1, min(num_rows, num_requests) * parts)
    idle = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)
    long = min(MOST, triton.cdiv(keys, LONGEST))
    count = max(1, min(max(idle, long), keys // SHORTEST))
    # Rounded up, so that the last splits may be empty; the programs of those end at once.
    return SplitConfig(count=count, length=max(1, triton.cdiv(triton.cdiv(keys, count), block_n)) * block_n)


def most_keys(*, capacity: int, rows: int, window: int, chunk: int, block_n: int) -> int:
    """An upper bound of the keys that the rows of one tile see between them, from the first key's iteration on.

    Args:
        capacity: keys that the block table has room for.
        rows: of a tile.
    """
    # The first iteration may begin up to block_n - 1 keys in front of the first key.
    seen = [each - 1 + rows + block_n - 1 for each in (window, chunk) if each > 0]
    return min([capacity, *seen])


def backend() -> str:
    """What Triton compiles for here; where there is no GPU, what the interpreter is told makes no difference."""
    return "hip" if torch.version.hip else "cuda"


@functools.cache
def bulk_copies(device: torch.device) -> bool:
    """Whether the device has units that copy a tile by a descriptor, and shared memory for `_bulk_tile`: Hopper and
    Blackwell, but not its consumer parts (compute capability 12), which have 99 KiB."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
