"""How a step's ragged attention is shared out in Triton: the tile, and whether keys are split, by what the host knows.

| step | tile | keys of a request |
|---|---|---|
| two rows a request or fewer, as of decoding | low | split |
| more, as of prefill and mixed steps | tall | split |
| of a batch-invariant engine | low | whole: how a step is split depends on the requests in it |
| without a pool | by rows | whole: a request that fits into a tile has no more keys than rows |

A tile's keys and values are read in one of two ways, by one bulk copy of a block's slots or by the address of each row:

| where | how | rows of tall tiles | from head size 129 on |
|---|---|---|---|
| Hopper and Blackwell, 16 bits, sizes up to 256, blocks of whole tiles | by bulk copies | 128 | odd groups, ALiBi: 64 |
| elsewhere, 16 bits | by addresses | 64 | ALiBi, groups of more than 64 heads: 32, as all from 257 on; 16 from 513 |
| float32 | by addresses | 32 | 16 |

Tall tiles of Hopper's have iterations of 128 keys where registers hold what these take and a block has as many slots:
groups that are a power of two, heads of 64 or 128 numbers, scores that are no more than scaled, and no chunks.  On an
H200 a prompt of 8,192 has 66 % of the product's rate by them, and 55 to 59 % with 64 keys (torch 2.11, Triton 3.6).  On
Blackwell they spill.  Hopper's matrix units go on with a product while the program computes weights: such tiles
multiply their values an iteration late (`LATE` of the kernel), where rows see many keys.  With 64 keys that was slower
by 6 %, though by its instructions it is faster (`benchmarks/gpu_loops.py`), and is not done.

Groups are odd here that are no power of two.  A tile has the heads of a whole group, so that they read keys and values
once; where it is 32 rows, at most so many.

How keys are split is found on the device, by the lengths of the requests as they are (`split_plan_triton`). The host
says into how many pieces at least all keys of a step are cut, `slots`, by which alone a split's length follows: where
there are few requests, every processor has its share of them, and where there are many, a request of more keys than
others is cut at every batch size, so that it is not walked long after the others are done.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from selective_compile.kernels.registers import Backend, warps

# Pieces for each processor. Of small programs, a processor has room for two or more at once, which wait for their keys
# most of the time; the last ones to end leave processors idle, for an eighth of a step at most if they are eight.
# Large ones are of many rows, as of prompts, or of latents; a processor has room for one, and one piece too many is
# half as long again as the step with two, a quarter with four: with latents of 34 requests of 4,096 tokens on 132
# processors. Their partial results are large: with 32 heads of size 128, four pieces take 70 MB on 132 processors, and
# eight of low tiles 17 MB. On an H200 half as many pieces of small ones are as fast, from 1 to 128 requests.
PIECES_OF_SMALL, PIECES_OF_LARGE = 8, 4
# Programs that a processor has room for at once, by registers and shared memory on sm_90 (of low tiles with heads of
# 128 numbers, 146 for each of 128 threads, and 71 KiB).
AT_ONCE_OF_SMALL, AT_ONCE_OF_LARGE = 3, 1
# Keys of a split of low tiles, at least. Below that the launch of the merge costs about what the shorter walk saves;
# writing and reading the partial results of four query heads is 3 % of reading their keys and values of 16 bits. Not
# measured on a GPU.
SHORTEST = 256
# Where longer ones leave each processor a piece all the same, they are not that short: of a program's time, the first
# copies, which nothing runs beside, are a quarter with 256 keys of size 128, and an eighth with 512. On an H200 a layer
# of 32 requests of 512 tokens takes 37 us with 256, and 30.
LONG = 512
# Of tall tiles, whose partial results are 64 KiB for each program: on an H200, writing and merging those of 1,024 rows
# took as long as 50 iterations of 64 keys, when each tile of more than 512 keys had two splits.
SHORTEST_OF_LARGE = 1024
# Keys of an iteration, at most: those of a block of as many slots, which are one bulk copy.
MOST_KEYS = 128
# Keys that a row sees, at least, where values are multiplied late. That takes one more product, and a copy that nothing
# runs beside, which it takes some iterations to make good. Not measured on a GPU.
LATE_KEYS = 1024
# Rows of a tile with head sizes of which more would spill registers. A group of more heads is cut into parts, each of
# which reads all keys again.
SHORT_TILE = 32


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What a launch says beside its arguments.

    large: it is a program of many rows or wide ones, of which a processor has one or two at once.
    """

    num_warps: int
    num_stages: int
    large: bool

    def options(self, backend: Backend) -> dict[str, int]:
        """Of a launch there."""
        # Two numbers of an operand at a time on their way to AMD's matrix units: one at a time, float32 spills.
        pairs = {"kpack": 2} if backend == "hip" and self.large else {}
        return {"num_stages": self.num_stages, **warps(self.num_warps, backend), **pairs}


@dataclass(frozen=True, kw_only=True)
class TileConfig(LaunchConfig):
    """Sizes of one compiled variant of the attention kernel; block_d, block_dv are the padded head sizes.

    heads: query heads of a program: those of a group, or one of several equal parts of it.
    bulk: whether an iteration's keys are one bulk copy, and its values.
    late: whether values are multiplied an iteration late, beside what comes of the next scores.
    ahead: for how many iterations of a program whose keys are split, a power of two, the second-level cache is asked
        before the kernel in front is complete, where there are bulk copies; 0: for none.  Chosen nowhere, since it was
        not measured on a GPU yet: `benchmarks/gpu_parts/tiles.py` does.
    """

    heads: int
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    bulk: bool
    late: bool
    ahead: int = 0


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Keys are shared among `slots` pieces or a few more, of `shortest` keys at least; 0: they are not split.

    long: keys that a piece has at least where that leaves `few` pieces.
    at_once: pieces that run at once, of which there are no more where they need not be much longer for that.
    """

    slots: int
    shortest: int
    few: int = 1
    long: int = 0
    at_once: int = 0


WHOLE = SplitConfig(slots=0, shortest=0)  # every program takes all keys of its tile


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
    late: bool = False,
    slopes: bool = False,
    distances: bool = False,
    narrow: bool = False,
    most: bool = False,
    backend: Backend = "cuda",
) -> TileConfig:
    """Choose the tile from what the host knows: shapes, not lengths. Any choice is correct for any step.

    Args:
        block_size: 0 without a pool.
        bulk: the device has `bulk_copies`, and the pools begin and go on at multiples of 16 bytes.
        late: `worth_late`.
        slopes: a bias is added to each score, whose distances take registers.
        distances: one is read for each score, and where it lies takes as many again.
        narrow: pools are e4m3, whose numbers take registers on their way to the query's dtype.
        most: the device has `asynchronous_products`, scores are no more than scaled, and rows see keys without chunks.
        backend: what Triton compiles for.
    """
    # tl.dot needs 16 in every direction.
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    # At two rows a request or fewer on average, most tiles hold one row: a tall tile would be mostly masked. So
    # it is in every step of a batch-invariant engine, which has a request for each row: it always has one BLOCK_N.
    low = num_rows <= 2 * num_requests
    wide = bytes_per_element == 4
    # float32 is multiplied by vector units, which read registers: it would be copied once more.
    if bulk and not wide and max(block_d, block_dv) <= 256:
        whole = (key_size, value_size) == (block_d, block_dv) and not group & (group - 1)
        most = most and whole and not (narrow or slopes or distances or low) and max(block_d, block_dv, group) <= 128
        most = most and block_size % MOST_KEYS == 0
        tile = _bulk_tile(
            group, block_d, block_dv, low=low, slopes=slopes, distances=distances, most=most, late=late and most
        )
        if block_size > 0 and block_size % tile.block_n == 0:
            return tile
    largest = max(block_d, block_dv)
    short = wide or distances or largest > (128 if slopes or group > 64 else 256)
    widest = block_dv > 512
    rows = 16 if widest or (wide and largest > 128) else SHORT_TILE if short else 64
    if short:
        group = _part_of(group, rows)
    # The largest tiles that compile without a register spill for every target. A float32 product runs on the vector
    # units and holds its operands in registers, hence its smaller ones.
    block_m = _block_m(1 if low else rows // group, group)
    block_n = 16 if wide or (narrow and largest > 128 and block_m >= SHORT_TILE) else (64 if block_m == 16 else 32)
    many = block_m * block_dv >= 64 * 256 or (wide and block_m > 16) or (short and not low) or (wide and largest > 128)
    # Two stages of key and value tiles fit into the 64 KiB of gfx942, the smallest shared memory of a target.
    fitting = 32768 // ((block_d + block_dv) * bytes_per_element)
    block_n = max(16, min(block_n, 1 << fitting.bit_length() - 1))
    # Of float32 beyond head size 256 a tile of 16 keys is 64 KiB, and two of them are more than sm_80 has.
    single = (wide and largest > 256) or (backend == "hip" and fitting < 16)
    return TileConfig(
        heads=group,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_dv=block_dv,
        num_warps=_warps(backend, many=many, widest=wide and widest),
        num_stages=1 if single else 2,
        large=many,
        bulk=False,
        late=False,
    )


def _warps(backend: Backend, *, many: bool, widest: bool) -> int:
    """Of a program of many rows or of few; widest: its values are float32, and more than 512 numbers."""
    if backend == "hip":
        # They have 64 threads: four of them are as many as eight elsewhere, and have 512 registers, which eight share.
        return 4
    # With eight, the widest spill on Hopper and Blackwell.
    return 16 if widest else 8 if many else 4


def _bulk_tile(
    group: int, block_d: int, block_dv: int, *, low: bool, slopes: bool, distances: bool, most: bool, late: bool
) -> TileConfig:
    """For sm_90 and sm_100, which have 227 KiB of shared memory; most: an iteration has MOST_KEYS."""
    # Two groups of four warps, with the 64 rows that an instruction of Hopper's matrix units has for each, and the 128
    # of Blackwell's together.
    # Distances take registers, and so do rows of a group that is no power of two: beside values of 256 numbers there
    # are enough for 64 rows.
    large_heads = max(block_d, block_dv) > 128
    tall = 64 if distances or (large_heads and (slopes or group & (group - 1))) else 128
    if distances and large_heads:
        tall = SHORT_TILE  # biases by distance take more of them
    block_m = _block_m(1 if low else tall // group, group)
    return TileConfig(
        heads=group,
        block_m=block_m,
        # With 64 at head size 256, tall tiles spill registers on sm_90.
        block_n=MOST_KEYS if most else 64 if not (large_heads or distances) else 32,
        block_d=block_d,
        block_dv=block_dv,
        num_warps=4 if block_m < tall else 8,
        large=block_m >= tall,
        # Copies begin two iterations ahead, more than they are from memory at 1 microsecond: an iteration of a tall
        # tile is most of one. Each takes two stages, as Triton loads a block's number a stage in front of the block.
        # With seven stages decoding is no faster (H200).
        num_stages=5,
        bulk=True,
        # Of 64 rows, warps share the weights of a row, which go through shared memory.
        late=late and block_m == 128,
    )


def _part_of(group: int, most: int) -> int:
    """How many heads a part of a group has, if it is cut into equal parts of at most so many."""
    return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def _block_m(rows: int, group: int) -> int:
    return max(16, triton.next_power_of_2(max(1, rows) * group))


def split_config(*, parts: int, keys: int | None, large: bool, processors: int) -> SplitConfig:
    """Choose into how many pieces a step is cut. Any choice is correct for any step.

    Args:
        parts: of a tile's heads, each of which has a program.
        keys: an upper bound of those that a program walks over without splits (`most_keys`), if there is one.
        large: programs are (`LaunchConfig`).
        processors: of the device (`processors`).
    """
    shortest, long = (SHORTEST_OF_LARGE, SHORTEST_OF_LARGE) if large else (SHORTEST, LONG)
    if keys is not None and keys <= shortest:
        return SplitConfig(slots=0, shortest=shortest)
    pieces, at_once = (PIECES_OF_LARGE, AT_ONCE_OF_LARGE) if large else (PIECES_OF_SMALL, AT_ONCE_OF_SMALL)
    slots, few = (triton.cdiv(each * processors, parts) for each in (pieces, 1))
    at_once = at_once * processors // parts
    return SplitConfig(slots=slots, shortest=shortest, few=few, long=long, at_once=at_once)


def most_keys(*, rows: int, window: int, chunk: int, block_n: int) -> int | None:
    """An upper bound of the keys that the rows of one tile see between them, from the first key's iteration on.

    Args:
        rows: of a tile.
    """
    # The first iteration may begin up to block_n - 1 keys in front of the first key.
    return min((each - 1 + rows + block_n - 1 for each in (window, chunk) if each > 0), default=None)


def worth_late(*, window: int, chunk: int, prefix: int) -> bool:
    """Whether rows may see as many keys as it takes; beside a prefix, registers spill with Triton 3.6."""
    return prefix == 0 and all(each >= LATE_KEYS for each in (window, chunk) if each > 0)


@functools.cache
def bulk_copies(device: torch.device) -> bool:
    """Whether the device has units that copy a tile by a descriptor, and shared memory for `_bulk_tile`: Hopper and
    Blackwell, but not its consumer parts (compute capability 12), which have 99 KiB."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def asynchronous_products(device: torch.device) -> bool:
    """Whether a group of warps goes on while a product of its registers is computed, until it waits for it: Hopper."""
    return bulk_copies(device) and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; the interpreter runs one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def shared_memory(device: torch.device) -> int:
    """That a block can have on a GPU, in bytes; the interpreter has no limit, and is told Hopper's."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)  # of which the stub does not know them all
    return properties.shared_memory_per_block if torch.version.hip else properties.shared_memory_per_block_optin
