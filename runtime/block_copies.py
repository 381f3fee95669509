"""Blocks are copied within the pools of keys and values, and between these and those of the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from operator import attrgetter

import torch
from torch import Tensor

from selective_compile.backend import CallSite
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.host_copies import copy_blocks
from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.kv_cache import reaches_of

Pools = Sequence[tuple[Tensor, Tensor]]


class BlockCopies:
    """Of an engine's pools, one of keys and one of values for each of ``sites``, and those of the host."""

    def __init__(
        self, stream: DeviceStream, device: torch.device, sites: Sequence[CallSite], pools: Pools, host_pools: Pools
    ) -> None:
        self._stream, self._device, self._pools, self._host_pools = stream, device, pools, host_pools
        kinds = reaches_of(sites)
        self._sites_of = [[i for i, site in enumerate(sites) if site.reach == kind] for kind in kinds]

    @torch.no_grad()
    def make(self, copies: Sequence[Copy | BlockCopy]) -> None:
        """In this order."""
        for within, some in groupby(copies, key=lambda copy: isinstance(copy, BlockCopy)):
            if within:
                self._within([copy for copy in some if isinstance(copy, BlockCopy)])
            else:
                self._to_and_from_host([copy for copy in some if isinstance(copy, Copy)])

    def _within(self, copies: Sequence[BlockCopy]) -> None:
        """The source of one is never what one before it wrote: nobody shares a block that was just copied."""
        by_table = attrgetter("table")
        for table, every in groupby(sorted(copies, key=by_table), key=by_table):
            moved = {copy.block: copy.source for copy in every}
            blocks, sources = sent(self._stream, self._device, list(moved), list(moved.values()))
            for site in self._sites_of[table]:
                for pool in self._pools[site]:
                    pool[blocks] = pool[sources]

    def _to_and_from_host(self, copies: Sequence[Copy]) -> None:
        for (to_host, table), run in groupby(copies, key=attrgetter("to_host", "table")):
            # By what is written: of two copies to one place the later holds.
            moved = {copy.slot if to_host else copy.block: copy for copy in run}.values()
            (blocks,) = sent(self._stream, self._device, [copy.block for copy in moved])
            slots = torch.tensor([copy.slot for copy in moved], device="cpu")
            sites = [zip(self._pools[site], self._host_pools[site], strict=True) for site in self._sites_of[table]]
            copy_blocks(self._stream, chain.from_iterable(sites), to_host=to_host, blocks=blocks, slots=slots)


def sent(stream: DeviceStream, device: torch.device, *places: Sequence[int]) -> Tensor:
    """Places in pools, on the device: as numbers, they would be copied there, and waited for, pool after pool."""
    return stream.send(torch.tensor(places, device="cpu"), device)
