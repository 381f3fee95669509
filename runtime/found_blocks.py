"""Which of a request's leading tokens need not be computed, since a pool or the host tier has their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selective_compile.runtime.block_group import BlockGroup
from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.request_state import BlockTable, RequestState


def count_found(state: RequestState, groups: Sequence[BlockGroup], block_size: int) -> int:
    """How many full blocks of leading tokens, of which the last is none, every group has, as far as it wants them; of a
    prefix all or none."""
    if not state.shares_blocks:
        return 0
    count = (len(state.tokens) - 1) // block_size
    if state.rows_from is not None:
        count = min(count, state.rows_from // block_size)
    names = block_names(state, count, block_size)
    before = count + 1
    while 0 < count < before:  # what one group has not, the others need not have
        before = count
        for group in groups:
            first = group.first_kept(count * block_size)
            # Without a block, no number of blocks that reaches past it would do.
            count = first + group.pool.count_known(names[first:count])
    return count if count * block_size >= state.prefix else 0


@dataclass(kw_only=True)
class FoundBlocks:
    """Of the leading blocks of a request from `first` on, those in the pool and the names of those in the host tier, by
    their places; and how many blocks are to be allocated."""

    first: int
    here: dict[int, int] = field(default_factory=dict)
    away: dict[int, bytes] = field(default_factory=dict)
    needed: int = 0

    @classmethod
    def of(cls, state: RequestState, count: int, group: BlockGroup, *, wanted: int) -> FoundBlocks:
        """Those among the first `count` of which the group has what it wants, of `wanted` blocks that the request is
        to have."""
        found = cls(first=group.first_kept(count * group.block_size) if count else 0)
        for index, name in enumerate(state.block_names[found.first : count], found.first):
            block = group.pool.find(name)
            if block is None:
                found.away[index] = name
            else:
                found.here[index] = block
        last = wanted if group.most is None else min(wanted, found.first + group.most)
        found.needed = last - found.first - len(found.here)
        return found

    def take(self, group: BlockGroup) -> BlockTable:
        """The request's table: what was found, shared, and the blocks that were needed."""
        pool, leading = group.pool, list(self.here.values())
        pool.share(leading)
        if not self.away:
            return BlockTable(leading + pool.allocate(self.needed), self.first)
        # Before blocks are allocated: what has to go from the device for them may take other slots of the host.
        names = list(self.away.values())
        slots = pool.host.hold(names) if pool.host is not None else []
        fresh = pool.allocate(self.needed)
        restored = fresh[: len(names)]
        pool.restore(names, slots, restored)
        places = {**self.here, **dict(zip(self.away, restored, strict=True))}
        leading = [places[index] for index in sorted(places)]
        return BlockTable(leading + fresh[len(names) :], self.first)
