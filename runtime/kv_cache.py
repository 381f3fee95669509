"""The memory behind the blocks: one pool of keys and one of values for each attention call of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from selective_compile.backend import CallSite
from selective_compile.options import EngineConfig

GIB = 2**30
# The engine on a CPU shares the machine with its user: whoever wants more says so with max_kv_tokens.
CPU_LIMIT = 4 * GIB
# Tokens of a request of a model that has no pools and does not say how far it reaches.
UNBOUNDED = 2**15


def bytes_per_block(call_sites: Sequence[CallSite], block_size: int) -> int:
    """What one block number takes in all pools together."""
    return sum(
        block_size * site.num_kv_heads * (site.key_head_size + site.value_head_size) * site.dtype.itemsize
        for site in call_sites
    )


def num_blocks(
    call_sites: Sequence[CallSite], config: EngineConfig, *, max_positions: int | None, device: torch.device
) -> int:
    """How many blocks the pools have.

    `max_kv_tokens` decides if it is given. Otherwise they take `kv_memory_fraction` of the memory that is
    free, on a CPU at most 4 GiB, and never more than `max_requests` requests of `max_positions` tokens can
    fill.

    Raises:
        ValueError: not one block fits.
    """
    if config.max_kv_tokens is not None:
        return config.max_kv_tokens // config.block_size
    memory = memory_for_pools(config, device)
    size = bytes_per_block(call_sites, config.block_size)
    if memory < size:
        raise ValueError(
            f"the free memory of {device} must hold a block of {size} bytes, got {memory} bytes "
            f"(kv_memory_fraction={config.kv_memory_fraction})"
        )
    # Without pools, block numbers are a mere account of tokens.
    blocks = memory // size if size else config.max_requests * -(-(max_positions or UNBOUNDED) // config.block_size)
    if max_positions is not None:
        blocks = min(blocks, config.max_requests * -(-max_positions // config.block_size))
    return blocks


def memory_for_pools(config: EngineConfig, device: torch.device) -> int:
    memory = int(config.kv_memory_fraction * free_memory(device))
    return min(memory, CPU_LIMIT) if device.type == "cpu" else memory


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device without others having to give any up."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        # Unlike the free pages that sysconf knows of, this counts the file cache as available.
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS has no count of free pages; half of all is what is usually there to be had.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def allocate_pools(call_sites: Sequence[CallSite], blocks: int, block_size: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """A key pool [blocks, K, block_size, D] and a value pool [blocks, K, block_size, Dv] for each call site.

    Zeros, since a kernel may load slots that were never written and multiply them by a probability of 0.
    """
    return tuple(
        (
            torch.zeros(
                blocks,
                site.num_kv_heads,
                block_size,
                site.key_head_size,
                dtype=site.dtype,
                device=site.device,
            ),
            torch.zeros(
                blocks,
                site.num_kv_heads,
                block_size,
                site.value_head_size,
                dtype=site.dtype,
                device=site.device,
            ),
        )
        for site in call_sites
    )
