"""The block pool: nothing is given out twice or lost, shared blocks stay until the last holder lets go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
