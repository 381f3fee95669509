"""The blocks of the running requests: what they hold, share, and may still come to need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.host_tier import BlockCopy, Copy, HostTier
from selective_compile.runtime.request_state import BlockTable, RequestState
from selective_compile.step import Reach


class BlockGroup:
    """The pool of the attention calls of one reach, and what of it the running requests may still come to need.

    Where the reach is not limited, a request gets the blocks of all the tokens it has, when it is admitted and as it
    grows. Where it is, a request never holds more than `most`, those of a step's tokens and of what they see: it gives
    back the blocks in front of that.
    """

    def __init__(self, pool: BlockPool, reach: Reach, *, token_budget: int, block_size: int) -> None:
        self.pool = pool
        self.reach = reach
        self.most = most_blocks(reach, token_budget=token_budget, block_size=block_size)
        self._block_size = block_size
        # Blocks that running requests may come to need: besides those they have, or, where they give some back that
        # others may go on to hold, with those.
        self.promised = 0

    def blocks_for(self, num_tokens: int) -> int:
        """What a request of so many tokens comes to hold at most at a time."""
        blocks = -(-num_tokens // self._block_size)
        return blocks if self.most is None else min(blocks, self.most)

    def first_kept(self, position: int) -> int:
        """The first block that is still of use to a request whose next token is at `position`."""
        return self.reach.first_seen(position) // self._block_size if self.reach.limited else 0

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

    def cover(self, table: BlockTable, *, start: int, end: int, copy: Callable[[int, int], None]) -> bool:
        """Make the table hold what tokens start .. end - 1 see and take; False: there are not so many blocks.

        Args:
            copy: called with two blocks, where the first is another's too: the second takes its place and content.
        """
        blocks = table.blocks
        if self.most is not None:
            first = self.first_kept(start)
            if first > table.gone:
                self.pool.release(blocks[table.gone : first])
                for index in range(table.gone, first):
                    blocks[index] = 0
                table.gone = first
        if table.shares_last and not self._own(table, start // self._block_size, copy):
            return False
        needed = -(-end // self._block_size) - len(blocks)
        if needed > 0:
            if needed > self.pool.num_free:
                return False
            blocks.extend(self.pool.allocate(needed))
            if self.most is None:
                self.promised -= needed
        return True

    def _own(self, table: BlockTable, index: int, copy: Callable[[int, int], None]) -> bool:
        shared = table.blocks[index]
        if not (self.pool.is_own(shared) or self.pool.num_free):
            return False
        own = table.blocks[index] = self.pool.own(shared)
        if own != shared:
            copy(shared, own)
        table.shares_last = False
        if self.most is None:
            self.promised -= 1
        return True


@dataclass(kw_only=True)
class _Found:
    """Of the leading blocks of a request from `first` on, those in the pool and the names of those in the host tier, by
    their places; and how many blocks are to be allocated."""

    first: int
    here: dict[int, int] = field(default_factory=dict)
    away: dict[int, bytes] = field(default_factory=dict)
    needed: int = 0


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
        self.groups = tuple(
            BlockGroup(pool, reach, token_budget=token_budget, block_size=block_size) for pool, reach in pools
        )
        self.block_size = block_size
        self.reuse = reuse
        self.guarantees = guarantees
        self._copies: list[Copy | BlockCopy] = []
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
        bounds = [group.pool.num_blocks for group in self.groups if group.most is None or not self._rotates(group)]
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
        reused = self._computed_by_others(state)
        wanted = -(-len(state.tokens) // self.block_size)
        found = [self._find(group, state, reused) for group in self.groups]
        for group, one in zip(self.groups, found, strict=True):
            last = wanted if group.most is None else min(wanted, one.first + group.most)
            one.needed = last - one.first - len(one.here)
            if not group.can_admit(state, list(one.here.values()), one.needed, reserve=reserve):
                return False
        state.tables = tuple(self._take(*pair) for pair in zip(self.groups, found, strict=True))
        for group, table in zip(self.groups, state.tables, strict=True):
            group.promised += group.promise_of(state, table)
        state.computed, state.kept = reused * self.block_size, reused
        return True

    def cover(self, state: RequestState, end: int) -> bool:
        """Give a running request the blocks of its next tokens, up to `end`, to write to; False: there are not so many.

        Of those that it shares, the one that it writes to next is copied.
        """
        start = state.computed
        if self.reuse and state.kept < start // self.block_size:
            self._keep(state, start // self.block_size)  # before those that no token sees any more go
        for place, (group, table) in enumerate(zip(self.groups, state.tables, strict=True)):
            if not group.cover(table, start=start, end=end, copy=partial(self._copy, place)):
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

    def _copy(self, table: int, source: int, block: int) -> None:
        self._copies.append(BlockCopy(table, source, block))

    def filled(self, state: RequestState, end: int) -> None:
        """The step computes the tokens up to `end`: others may share the blocks that are full by that.

        Those that a request fills token by token need not be told of one by one: they are shared when it gets its next.
        """
        if self.reuse and state.kept < end // self.block_size:
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

    def _keep(self, state: RequestState, count: int) -> None:
        names = block_names(state, count, self.block_size)
        for group, table in zip(self.groups, state.tables, strict=True):
            for index in range(state.kept, count):
                group.pool.keep(table.blocks[index], names[index])
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

    def _computed_by_others(self, state: RequestState) -> int:
        """How many full blocks of leading tokens, of which the last is none, can be taken from the pools."""
        if not self.reuse:
            return 0
        count = (len(state.tokens) - 1) // self.block_size
        if state.rows_from is not None:
            count = min(count, state.rows_from // self.block_size)
        names = block_names(state, count, self.block_size)
        before = count + 1
        while count < before:  # what one group has not, the others need not have
            before = count
            for group in self.groups:
                first = group.first_kept(count * self.block_size)
                # Without a block, no number of blocks that reaches past it would do.
                count = first + group.pool.count_known(names[first:count])
        return count

    def _find(self, group: BlockGroup, state: RequestState, reused: int) -> _Found:
        first = group.first_kept(reused * self.block_size) if reused else 0
        found = _Found(first=first)
        for index, name in enumerate(state.block_names[first:reused], first):
            if group.pool.has(name):
                (found.here[index],) = group.pool.find([name])
            else:
                found.away[index] = name
        return found

    def _take(self, group: BlockGroup, found: _Found) -> BlockTable:
        group.pool.share(list(found.here.values()))
        # Before blocks are allocated: what has to go from the device for them may take other slots of the host.
        names = list(found.away.values())
        slots = group.pool.host.hold(names) if group.pool.host is not None else []
        fresh = group.pool.allocate(found.needed)
        restored = fresh[: len(names)]
        group.pool.restore(names, slots, restored)
        leading = list(found.here.values())
        if names:
            places = {**found.here, **dict(zip(found.away, restored, strict=True))}
            leading = [places[index] for index in sorted(places)]
        return BlockTable([*leading, *fresh[len(names) :]], found.first)

    def _rotates(self, group: BlockGroup) -> bool:
        return group.most is not None and group.most <= group.pool.num_blocks


def most_blocks(reach: Reach, *, token_budget: int, block_size: int) -> int | None:
    """What a request holds at most at a time of the calls of this reach; None: the more, the longer it is."""
    if not reach.limited:
        return None
    positions = reach.span - 1 + token_budget
    return (positions + block_size - 2) // block_size + 1
