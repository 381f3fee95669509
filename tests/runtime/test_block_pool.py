"""The block pool: nothing is given out twice or lost, shared blocks stay until the last holder lets go."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from selective_compile.runtime.block_pool import BlockPool


def test_every_block_is_given_out_once() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check([first, second])


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 2
    pool.check([blocks[:1]])
    pool.release(blocks[:1])
    assert pool.num_free == 3
    pool.check([])


def test_more_than_is_free_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).allocate(3)


def test_releasing_or_sharing_a_free_block_is_our_mistake() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="is free"):
        pool.release([block])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([block])


@pytest.mark.parametrize("holders", [[], [[0], [0]], [[0, 1]]])
def test_check_finds_lost_and_doubly_held_blocks(holders: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError):
        pool.check(holders)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_random_use_keeps_the_invariants(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    holders: list[list[int]] = []
    for action, number in actions:
        if action == "allocate" and number <= pool.num_free:
            holders.append(pool.allocate(number))
        elif action == "share" and holders:
            holders.append(list(holders[number % len(holders)]))
            pool.share(holders[-1])
        elif action == "release" and holders:
            pool.release(holders.pop(number % len(holders)))
        pool.check(holders)
    assert pool.num_free == 12 - len({block for blocks in holders for block in blocks})


NAMES = [bytes([number]) for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Holders that allocate, share, name, find and let go; what a name finds is what was named last so."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of every block, since it was handed out

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            nameless = self.pool.num_free - self.pool.num_idle
            idle = self.pool.num_idle
            blocks = self.pool.allocate(count)
            assert self.pool.num_idle == idle - max(0, count - nameless), "idle blocks are taken last"
            for block in blocks:
                self.content.pop(block, None)
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(holder=st.integers(0, 99), name=st.sampled_from(NAMES))
    def keep(self, holder: int, name: bytes) -> None:
        for block in self.holders[holder % len(self.holders)][:1]:
            if block not in self.content:
                self.content[block] = name
                self.pool.keep([block], [name])

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    def find(self, names: list[bytes]) -> None:
        known = {name: block for name in names if (block := self.pool.find(name)) is not None}
        assert all(self.content[block] == name for name, block in known.items())
        assert self.pool.count_known(names) == len(list(takewhile(known.__contains__, names)))
        found = list(known.values())
        free = self.pool.count_free(found)
        before = self.pool.num_free
        self.pool.share(found)
        assert self.pool.num_free == before - free
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(holder=st.integers(0, 99))
    def fork(self, holder: int) -> None:
        before = self.pool.num_free
        self.holders.append(self.pool.fork(self.holders[holder % len(self.holders)]))
        assert self.pool.num_free == before, "a fork takes no memory until somebody writes"

    @precondition(lambda self: self.holders)
    @rule(holder=st.integers(0, 99), place=st.integers(0, 3))
    def write(self, holder: int, place: int) -> None:
        """What is written to is nobody else's, cannot be found, and is another block only where it had to be."""
        blocks = self.holders[holder % len(self.holders)]
        if blocks and (self.pool.num_free or self.pool.is_own(blocks[place % len(blocks)])):
            place %= len(blocks)
            shared = blocks[place]
            findable = self.pool.find(self.content.get(shared, b"")) == shared
            own = blocks[place] = self.pool.own(shared)
            self.pool.check(self.holders)
            assert sum(own in other for other in self.holders) == 1
            others = sum(shared in other for other in self.holders)
            if own == shared:
                assert others == 1 and not findable
            else:
                assert others >= 1 or findable
                self.content.pop(own, None)

    @precondition(lambda self: self.holders)
    @rule(holder=st.integers(0, 99))
    def release(self, holder: int) -> None:
        self.pool.release(self.holders.pop(holder % len(self.holders)))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.find(NAMES[0]) is None
        self.content = {block: b"" for blocks in self.holders for block in blocks}

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.holders)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
