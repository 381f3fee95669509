"""The pool of the attention calls of one reach, and what the running requests may still come to need of it."""

from __future__ import annotations

from collections.abc import Sequence

from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.request_state import BlockTable, RequestState
from selective_compile.step import Reach


class BlockGroup:
    """The blocks that one of the tables of each running request consists of.

    Where the reach is not limited, a request gets the blocks of all the tokens it has, when it is admitted and as it
    grows. Where it is, a request never holds more than `most`, those of a step's tokens and of what they see: it gives
    back the blocks in front of that.
    """

    def __init__(
        self,
        pool: BlockPool,
        reach: Reach,
        *,
        table: int,
        token_budget: int,
        block_size: int,
        copies: list[Copy | BlockCopy],
    ) -> None:
        """
        Args:
            table: which of a request's tables it is about.
            copies: where to add those that are to be made before the next step runs.
        """
        self.pool = pool
        self._table = table
        self._copies = copies
        self.reach = reach
        self.most = most_blocks(reach, token_budget=token_budget, block_size=block_size)
        self.block_size = block_size
        # Blocks that running requests may come to need: besides those they have, or, where they give some back that
        # others may go on to hold, with those.
        self.promised = 0

    @property
    def rotates(self) -> bool:
        """Whether a request of any length fits, as it gives back blocks while it grows."""
        return self.most is not None and self.most <= self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """What a request of so many tokens comes to hold at most at a time."""
        blocks = -(-num_tokens // self.block_size)
        return blocks if self.most is None else min(blocks, self.most)

    def first_kept(self, position: int) -> int:
        """The first block that is still of use to a request whose next token is at `position`."""
        return self.reach.first_seen(position) // self.block_size if self.reach.limited else 0

    def can_admit_all(self, states: Sequence[RequestState], *, reserve: int | None) -> bool:
        """Whether a group of requests can get its blocks, whatever of them is found."""
        final = sum(self.blocks_for(state.final_length) for state in states)
        if reserve is not None:
            return sum(self.blocks_for(len(state.tokens)) for state in states) + reserve <= self.pool.num_free
        return self.promised + final <= (self.pool.num_free if self.most is None else self.pool.num_blocks)

    def can_admit(self, state: RequestState, found: Sequence[int], needed: int, *, reserve: int | None) -> bool:
        """Whether a request can get `needed` blocks besides those that were found.

        Args:
            reserve: blocks to leave free; None: as many as all running requests may come to need, this one included.
        """
        taken = needed + self.pool.count_free(found)
        if reserve is not None:
            return taken + reserve <= self.pool.num_free
        if self.most is not None:
            return self.promised + state.width * self.blocks_for(state.final_length) <= self.pool.num_blocks
        growth = state.width * self.blocks_for(state.final_length) - self.blocks_for(len(state.tokens))
        return taken + growth + self.promised <= self.pool.num_free

    def promise_of(self, state: RequestState, table: BlockTable) -> int:
        final = state.width * self.blocks_for(state.final_length)
        return final - len(table.blocks) + table.shares_last if self.most is None else final

    def cover(self, table: BlockTable, start: int, end: int) -> bool:
        """Make the table hold what tokens start .. end - 1 see and take; False: there are not so many blocks."""
        blocks = table.blocks
        if self.most is not None:
            first = self.first_kept(start)
            if first > table.gone:
                self.pool.release(blocks[table.gone : first])
                for index in range(table.gone, first):
                    blocks[index] = 0
                table.gone = first
        if table.shares_last and not self._own(table, start // self.block_size):
            return False
        needed = -(-end // self.block_size) - len(blocks)
        if needed > 0:
            if needed > self.pool.num_free:
                return False
            blocks.extend(self.pool.allocate(needed))
            if self.most is None:
                self.promised -= needed
        return True

    def _own(self, table: BlockTable, index: int) -> bool:
        shared = table.blocks[index]
        if not (self.pool.is_own(shared) or self.pool.num_free):
            return False
        own = table.blocks[index] = self.pool.own(shared)
        if own != shared:
            self._copies.append(BlockCopy(self._table, shared, own))
        table.shares_last = False
        if self.most is None:
            self.promised -= 1
        return True


def most_blocks(reach: Reach, *, token_budget: int, block_size: int) -> int | None:
    """What a request holds at most at a time of the calls of this reach; None: the more, the longer it is."""
    if not reach.limited:
        return None
    positions = reach.span - 1 + token_budget
    return (positions + block_size - 2) // block_size + 1
