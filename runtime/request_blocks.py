"""The blocks of the running requests: what they hold, share, and may still come to need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from selective_compile.runtime.block_group import BlockGroup
from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.found_blocks import FoundBlocks, count_found
from selective_compile.runtime.host_tier import BlockCopy, Copy, HostTier
from selective_compile.runtime.request_state import BlockTable, RequestState
from selective_compile.step import Reach

# Blocks that a request fills token by token are told of so many at a time, which takes half the time that it takes one
# by one.
NAMED_TOGETHER = 4


class RequestBlocks:
    """Gives requests their blocks, a table for each reach of the model's attention, and takes them back.

    With `reuse` a request gets the full blocks of its leading tokens that are still in the pools, whoever computed
    them, save that it computes at least its last token. Of calls whose reach is limited, only those are wanted that
    its next token sees.

    With `guarantees` a request is admitted only if what it and all others may still come to need is free: then `cover`
    never fails.
    """

    def __init__(
        self,
        pools: Sequence[tuple[BlockPool, Reach]],
        *,
        token_budget: int,
        block_size: int,
        reuse: bool,
        guarantees: bool,
        host_slots: int = 0,
        copying_pays: Callable[[int], bool] = lambda copies: True,
    ) -> None:
        """
        Args:
            host_slots: of the host tier, for each of the pools.
            copying_pays: whether so many copies of a block take less time than computing it again.
        """
        self.block_size = block_size
        self.reuse = reuse
        self.guarantees = guarantees
        self._copies: list[Copy | BlockCopy] = []
        self.groups = tuple(
            BlockGroup(pool, reach, table=table, token_budget=token_budget, block_size=block_size, copies=self._copies)
            for table, (pool, reach) in enumerate(pools)
        )
        # Where the reach is limited, blocks go as soon as no token sees them.
        self._named_together = NAMED_TOGETHER if all(group.most is None for group in self.groups) else 1
        for table, (pool, _) in enumerate(pools if host_slots else ()):
            pool.host = HostTier(host_slots, table=table, copies=self._copies, pays=copying_pays)

    @property
    def host_tiers(self) -> list[HostTier]:
        return [group.pool.host for group in self.groups if group.pool.host is not None]

    def take_copies(self) -> tuple[Copy | BlockCopy, ...]:
        """Those to be made, in this order, before the step that is planned runs."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def fits(self, num_tokens: int) -> bool:
        """Whether a request that comes to hold so many computed tokens can run, at least by itself."""
        return self.fits_together(num_tokens, 1)

    def fits_together(self, num_tokens: int, count: int) -> bool:
        """Whether so many of them can run side by side, whatever they share."""
        return all(count * group.blocks_for(num_tokens) <= group.pool.num_blocks for group in self.groups)

    @property
    def most_tokens(self) -> int | None:
        """The most that `fits`; None: as many as you like."""
        bounds = [group.pool.num_blocks for group in self.groups if not group.rotates]
        return min(bounds) * self.block_size if bounds else None

    def admit(self, state: RequestState, *, num_running: int) -> bool:
        """Give a request, or all of a group, its blocks beside so many others, if there is memory for it; `computed` is
        what was found."""
        # Half a block of growth is left to each running request, or the newcomer would soon be preempted
        # again: of 200 requests (prompts log-uniform in 8-512, outputs in 8-256; pools of 60, 150 and 400
        # blocks of 16 slots) this computes 8, 12 and 16 % fewer tokens, for 0.4, 1.3 and 2.1 % more steps.
        reserve = None if self.guarantees else num_running // 2
        if self.groups[0].pool.num_free <= (reserve or 0):
            return False
        if state.group is not None:
            return self._admit_group(state.group, reserve)
        return self._admit_one(state, reserve)

    def _admit_group(self, members: Sequence[RequestState], reserve: int | None) -> bool:
        # As if nothing of them was found: what is found for one may have to go for the blocks of another.
        if not all(group.can_admit_all(members, reserve=reserve) for group in self.groups):
            return False
        for member in members:
            admitted = self._admit_one(member, None if self.guarantees else 0)
            assert admitted, member
        return True

    def _admit_one(self, state: RequestState, reserve: int | None) -> bool:
        reused = count_found(state, self.groups, self.block_size) if self.reuse else 0
        wanted = -(-len(state.tokens) // self.block_size)
        found = [FoundBlocks.of(state, reused, group, wanted=wanted) for group in self.groups]
        for group, one in zip(self.groups, found, strict=True):
            if not group.can_admit(state, list(one.here.values()), one.needed, reserve=reserve):
                return False
        state.tables = tuple(one.take(group) for group, one in zip(self.groups, found, strict=True))
        for group, table in zip(self.groups, state.tables, strict=True):
            group.promised += group.promise_of(state, table)
        state.computed, state.kept = reused * self.block_size, reused
        return True

    def cover(self, state: RequestState, end: int) -> bool:
        """Give a running request the blocks of its next tokens, up to `end`, to write to; False: there are not so many.

        Of those that it shares, the one that it writes to next is copied.
        """
        start = state.computed
        if self._names(state) and state.kept + self._named_together <= start // self.block_size:
            self._keep(state, start // self.block_size)  # before those that no token sees any more go
        for group, table in zip(self.groups, state.tables, strict=True):
            if not group.cover(table, start, end):
                assert not self.guarantees, state
                return False
        state.shares_last = False
        return True

    def room_for_draft(self, state: RequestState, most: int, *, num_running: int) -> int:
        """For how many tokens behind those that it has, at most `most`, there are blocks that nobody will miss soon.

        Args:
            num_running: how many requests may need a block in the same step.
        """
        known = len(state.tokens)
        most = min(most, state.final_length - known)
        for group, table in zip(self.groups, state.tables, strict=True):
            reserved = num_running
            if self.guarantees:
                # Where the calls' reach is limited, what all may come to need at a time is there in any case.
                reserved = group.promised - group.promise_of(state, table) if group.most is None else 0
            free = max(0, group.pool.num_free - reserved)
            most = min(most, (len(table.blocks) + free) * self.block_size - known)
        return max(0, most)

    def cut(self, state: RequestState) -> None:
        """Take back the blocks behind that of its last token, which a draft had that was not all right."""
        self.filled(state, state.computed)
        for group, table in zip(self.groups, state.tables, strict=True):
            surplus = len(table.blocks) - -(-len(state.tokens) // self.block_size)
            if surplus > 0:
                group.pool.release(table.blocks[-surplus:])
                del table.blocks[-surplus:]
                if group.most is None:
                    group.promised += surplus

    def narrow(self, state: RequestState) -> None:
        """One fewer is to go on from a running request: nothing is promised for it any more."""
        for group, table in zip(self.groups, state.tables, strict=True):
            group.promised -= group.promise_of(state, table)
        state.width -= 1
        for group, table in zip(self.groups, state.tables, strict=True):
            group.promised += group.promise_of(state, table)

    def fork(self, parent: RequestState, children: Sequence[RequestState], *, copies_last: bool) -> None:
        """Let others go on from what a running request has computed, in the room that it was given for its `width`.

        Args:
            copies_last: each of them writes to the block that the parent writes to as well; else `rearrange` follows.
        """
        for group, table in zip(self.groups, parent.tables, strict=True):
            group.promised -= group.promise_of(parent, table)
        parent.width = 1
        for child in children:
            pairs = zip(self.groups, parent.tables, strict=True)
            child.tables = tuple(BlockTable(group.pool.fork(table.held), table.gone) for group, table in pairs)
            child.computed, child.kept = parent.computed, parent.kept
            child.block_names = parent.block_names[: parent.computed // self.block_size]
            child.shares_last = copies_last and parent.computed % self.block_size > 0
            for table in child.tables:
                table.shares_last = child.shares_last
        for place, group in enumerate(self.groups):
            group.promised += sum(group.promise_of(state, state.tables[place]) for state in (parent, *children))

    def rearrange(self, states: Sequence[RequestState], parents: Sequence[int]) -> None:
        """Each of them goes on from what the one at the place that `parents` has for it has computed, to its end.

        The first that goes on in a block writes where it is; the others copy before they do.
        """
        names = [(state.block_names, state.kept) for state in states]
        for place, group in enumerate(self.groups):
            held = [state.tables[place] for state in states]
            group.promised -= sum(group.promise_of(state, table) for state, table in zip(states, held, strict=True))
            written: set[int] = set()
            for state, parent in zip(states, parents, strict=True):
                table = BlockTable(group.pool.fork(held[parent].held), held[parent].gone)
                if state.computed % self.block_size:
                    last = table.blocks[state.computed // self.block_size]
                    table.shares_last = last in written
                    written.add(last)
                state.tables = (*state.tables[:place], table, *state.tables[place + 1 :])
            for table in held:
                group.pool.release(table.held)
            group.promised += sum(group.promise_of(state, state.tables[place]) for state in states)
        for state, parent in zip(states, parents, strict=True):
            known, state.kept = names[parent]
            state.block_names = list(known)
            state.shares_last = any(table.shares_last for table in state.tables)

    def filled(self, state: RequestState, end: int) -> None:
        """The step computes the tokens up to `end`: others may share the blocks that are full by that.

        Those that a request fills token by token need not be told of: `cover` shares them, some blocks later, and
        `release` the last ones.
        """
        if self._names(state) and state.kept < end // self.block_size:
            self._keep(state, end // self.block_size)

    def release(self, state: RequestState) -> None:
        """Take all blocks back."""
        self.filled(state, state.computed)
        for group, table in zip(self.groups, state.tables, strict=True):
            group.promised -= group.promise_of(state, table)
            group.pool.release(table.held)
        state.tables = ()
        state.kept = 0
        state.shares_last = False

    def _names(self, state: RequestState) -> bool:
        return self.reuse and state.shares_blocks

    def _keep(self, state: RequestState, count: int) -> None:
        names = block_names(state, count, self.block_size)
        for group, table in zip(self.groups, state.tables, strict=True):
            group.pool.keep(table.blocks[state.kept : count], names[state.kept : count])
        state.kept = count

    def forget(self) -> None:
        """Nothing that the pools hold is to be found any more."""
        for group in self.groups:
            group.pool.forget()
        self._copies.clear()

    def check(self, running: Iterable[RequestState]) -> None:
        """Assert that the running requests hold what they should, and the pools agree."""
        states = list(running)
        for place, group in enumerate(self.groups):
            tables = [state.tables[place] for state in states]
            for state, table in zip(states, tables, strict=True):
                assert state.computed <= len(table.blocks) * self.block_size, state
                assert len(table.blocks) <= -(-len(state.tokens) // self.block_size), state
                assert table.gone <= group.first_kept(state.computed), state
                assert not table.shares_last or state.shares_last, state
                assert group.most is None or len(table.held) <= group.most, state
            pairs = zip(states, tables, strict=True)
            assert group.promised == sum(group.promise_of(state, table) for state, table in pairs), group.promised
            most = group.pool.num_free if group.most is None else group.pool.num_blocks
            assert not self.guarantees or group.promised <= most, "what was guaranteed is not there"
            group.pool.check(table.held for table in tables)
