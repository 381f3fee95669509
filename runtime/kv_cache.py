"""The memory behind the blocks: one pool of keys and one of values for each attention call of the model."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from selective_compile import huge_pages
from selective_compile.backend import CallSite
from selective_compile.options import EngineConfig
from selective_compile.runtime.block_group import most_blocks
from selective_compile.step import Reach, reaches

GIB = 2**30
# The engine on a CPU shares the machine with its user: whoever wants more says so with max_kv_tokens.
CPU_LIMIT = 4 * GIB
# Tokens of a request of a model that has no pools and does not say how far it reaches.
UNBOUNDED = 2**15
# And of one whose attention calls are all limited, so that a request is never too long for the pools.
LONGEST = 2**20


def reaches_of(call_sites: Sequence[CallSite]) -> tuple[Reach, ...]:
    """How far back the model's attention calls see, the farthest first; each has pools and block tables of its own."""
    return reaches(site.reach for site in call_sites) or (Reach(),)


def bytes_per_block(call_sites: Sequence[CallSite], block_size: int) -> int:
    """What one block number takes in all pools together."""
    return block_size * sum(site.bytes_per_token for site in call_sites)


def num_blocks(
    call_sites: Sequence[CallSite],
    config: EngineConfig,
    *,
    max_positions: int | None,
    device: torch.device,
    reserved: int = 0,
) -> tuple[int, ...]:
    """How many blocks the pools of each of `reaches_of` have.

    `max_kv_tokens` decides those of the first if it is given. Otherwise all take `kv_memory_fraction` of the memory
    that is free, on a CPU at most 4 GiB, and never more than `max_requests` requests of `max_positions` tokens can
    fill; `reserved` bytes of that memory are for something else. Those of the others are never more than
    `max_requests` requests can hold.

    Raises:
        ValueError: not one block fits.
    """
    if config.max_kv_tokens is not None:
        return shared_out(config.max_kv_tokens // config.block_size, call_sites, config)
    memory = memory_for_pools(config, device) - reserved
    size = bytes_per_block(call_sites, config.block_size)
    if memory < size:
        raise ValueError(
            f"the free memory of {device} must hold a block of {size} bytes, got {memory} bytes "
            f"(kv_memory_fraction={config.kv_memory_fraction})"
        )
    # Without pools, block numbers are a mere account of tokens.
    most = config.max_requests * -(-(max_positions or UNBOUNDED) // config.block_size)
    if not size:
        return shared_out(most, call_sites, config)
    first = reaches_of(call_sites)[0]
    if max_positions is None:
        most = memory // bytes_per_block([site for site in call_sites if site.reach == first], config.block_size)
    held = most_held(first, config)
    return largest_that_fits(memory, most if held is None else min(most, held), call_sites, config)


def most_held(reach: Reach, config: EngineConfig) -> int | None:
    """What all requests together hold of a reach at most; None: no end to it."""
    most = most_blocks(reach, token_budget=config.token_budget, block_size=config.block_size)
    return None if most is None else config.max_requests * most


def shared_out(blocks: int, call_sites: Sequence[CallSite], config: EngineConfig) -> tuple[int, ...]:
    """So many for the farthest reach, and for each other as many, or what all requests can hold if that is less."""
    others = [most_held(reach, config) for reach in reaches_of(call_sites)[1:]]
    return (blocks, *(blocks if most is None else min(blocks, most) for most in others))


def largest_that_fits(memory: int, most: int, call_sites: Sequence[CallSite], config: EngineConfig) -> tuple[int, ...]:
    """At most so many blocks of the farthest reach, such that all pools fit into memory; one of each does."""
    kinds = reaches_of(call_sites)
    sizes = [bytes_per_block([site for site in call_sites if site.reach == kind], config.block_size) for kind in kinds]

    def taken(blocks: int) -> int:
        counts = shared_out(blocks, call_sites, config)
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    fitting, too_many = 1, most + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if taken(middle) <= memory:
            fitting = middle
        else:
            too_many = middle
    return shared_out(fitting, call_sites, config)


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
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS has no count of free pages; half of all is what is usually there to be had.
    return physical_memory() // 2


LARGE = 2**27  # bytes of pools, for which to look through all that Python has made: a quarter of a second
_POOLS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by identity


def free_dropped_pools() -> None:
    """Of engines that nobody holds any more but for requests that have not ended, which hold them and are held by them:
    only a search finds those.  Others are sized by the memory that is left."""
    if sum(pool.nbytes for pool in list(_POOLS.values())) >= LARGE:
        gc.collect()


def allocate_pools(
    call_sites: Sequence[CallSite], blocks: Sequence[int], block_size: int, device: torch.device | None = None
) -> tuple[tuple[Tensor, Tensor], ...]:
    """A key pool [blocks, K, block_size, D] and a value pool [blocks, K, block_size, Dv] for each call site, of its
    dtype; or of int8 rows, whose length is in bytes.

    `blocks` are those of `num_blocks`: as many as its reach has.  `device`: another than that of the call sites.

    Zeros, since a kernel may load slots that were never written and multiply them by a probability of 0.

    Raises:
        ValueError: there is not so much memory.
    """
    kinds = reaches_of(call_sites)
    sizes = [blocks[kinds.index(site.reach)] * block_size * site.bytes_per_token for site in call_sites]
    where = device or (call_sites[0].device if call_sites else torch.device("cpu"))

    def pool(site: CallSite, size: int) -> Tensor:
        shape = (blocks[kinds.index(site.reach)], site.num_kv_heads, block_size, size)
        # Only from pinned memory does a copy to a GPU run at the speed of the bus.
        pinned = device is not None and device.type == "cpu" and site.device.type == "cuda"
        on = device or site.device
        if on.type == "cpu" and not pinned:
            return huge_pages.zeros(shape, site.pool_dtype)
        return torch.zeros(shape, dtype=site.pool_dtype, device=on, pin_memory=pinned)

    try:
        if where.type == "cpu" and sum(sizes) > physical_memory():  # which the system may give, and not have
            raise MemoryError(f"this machine has {physical_memory()}")
        pools = tuple((pool(site, site.pool_rows[0]), pool(site, site.pool_rows[1])) for site in call_sites)
    except (RuntimeError, MemoryError) as error:
        name = "max_kv_tokens" if device is None else "host_kv_bytes"
        raise ValueError(
            f"{name} must ask for no more memory than {where} has, got {sum(sizes)} bytes of keys and values: {error}"
        ) from error
    _POOLS.update((id(pool), pool) for pair in pools for pool in pair)
    return pools


def physical_memory() -> int:
    """Bytes of the machine's memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
