"""How attention to latents is shared out in Triton: the tile, by what the host knows of a step.

All heads read the same rows, so that a tile is as many of them as its registers have room for, in decoding as in
prefill; the others' programs find the rows in the second-level cache. Of 128 heads, with 16 in a tile, that reading
would take longer than the products. A model of fewer heads has tiles of more rows where a step has more.

| where | rows of the query matrix | keys of an iteration, and how they are read |
|---|---|---|
| Hopper and Blackwell, 16 bits, blocks of whole tiles | 32 | 64; one bulk copy of the latents, one of the rest |
| there, from a pool of e4m3 or with a window | 32 | 32; bulk copies |
| elsewhere on CUDA, 16 bits | 32 | 32, by the address of each row; 16 where shared memory is short |
| ROCm, 16 bits; float32 | 16 | 32; of float32, 16 |

A decoding step of 16 heads or fewer has 16 rows everywhere, as every step of 9 to 15. They are the largest that
compile without a spill for a latent of 512 numbers and 64 more. With 64 rows, which an instruction of Hopper's matrix
units has, half of the registers hold the sums, and Triton spills what tells the units where the query lies: 568 bytes a
thread on sm_90, 312 on sm_100. On gfx942 32 rows spill with e4m3, as they do in float32, whose products run on the
vector units and hold their operands in registers. None of it has been timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from selective_compile.kernels.ragged_attention_tiles import LaunchConfig
from selective_compile.kernels.registers import Backend

# tl.dot needs 16 in every direction.
LEAST = 16
# Bytes of shared memory that a block can have where tiles are 32 keys. Two such tiles and the query of latents of 576
# numbers take 102,400; consumer parts have 101,376, other parts for CUDA 166,912 or more.
ROOMY = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class LatentTile(LaunchConfig):
    """Sizes of one compiled variant of the kernel; the legend is in `latent_attention_triton`.

    bulk: whether an iteration's latents are one bulk copy, and what is behind them another.
    """

    block_q: int
    block_h: int
    block_n: int
    bulk: bool


def latent_tile(
    *,
    num_rows: int,
    num_requests: int,
    heads: int,
    width: int,
    bytes_per_element: int,
    block_size: int,
    window: int,
    narrow: bool,
    selected: bool,
    shared_memory: int,
    bulk: bool,
    backend: Backend,
) -> LatentTile:
    """Choose the tile from what the host knows: shapes, not lengths. Any choice is correct for any step.

    Args:
        width: of a row: how many numbers the latent and the rest have, each padded to a power of two.
        bytes_per_element: of queries.
        narrow: the pool is e4m3, whose numbers take registers on their way to the query's dtype.
        selected: each row has a selection of keys of its own, so that a tile is one row.
        shared_memory: that a block can have, in bytes (`shared_memory`).
        bulk: the device has `bulk_copies`, and what they read of the pool begins and goes on at multiples of 16 bytes.
    """
    wide, rocm = bytes_per_element == 4, backend == "hip"
    most = LEAST if wide or rocm else 2 * LEAST
    # Most tiles hold one row then, as in `tile_config`; with a selection all do. Two rows of 9 to 15 heads would spill.
    low = selected or num_rows <= 2 * num_requests or LEAST // 2 < heads < LEAST
    block_m = min(most, max(LEAST, triton.next_power_of_2(heads))) if low else most
    block_h = block_m if selected else min(block_m, triton.next_power_of_2(heads))
    block_n = 32 if narrow or window else 64
    bulk = bulk and not wide and not selected and block_size % block_n == 0
    # The latents of two iterations, the query and the weights.
    ahead = (2 * block_n * (1 if narrow else 2) + 2 * block_m) * width + 2 * block_m * block_n + 1024 <= shared_memory
    short = wide or (not rocm and shared_memory < ROOMY)
    return LatentTile(
        block_q=block_m // block_h,
        block_h=block_h,
        block_n=block_n if bulk else 16 if short else 32,
        # On ROCm, where they have 64 threads, four have twice the registers of eight.
        num_warps=4 if rocm else 8,
        # A second stage takes registers, too, with float32 more than there are. For bulk copies to begin an iteration
        # ahead it takes five: Triton loads a block's number two stages in front of the block, and both are waited for.
        num_stages=1 if wide else 5 if bulk and ahead else 2,
        large=not rocm,
        bulk=bulk,
    )
