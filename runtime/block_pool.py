"""The block pool: which blocks of KV memory are free, and how many requests hold each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1, counting references so that requests can share a block.

    It knows numbers only; the memory itself is in `selective_compile.runtime.kv_cache`. Every operation costs
    time in proportion to the blocks named in it, whatever the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self._references = [0] * num_blocks
        # A stack: the block freed last is taken first, while it may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. The caller knows that there are so many."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are in use."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of these blocks; one without references is free."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the pool agrees with the holders' blocks: none is lost, none given out twice."""
        held = Counter(block for blocks in holders for block in blocks)
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        free = set(self._free)
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
            assert (references == 0) == (block in free), f"block {block}: {references} references and free"
        assert max(held, default=0) < self.num_blocks, "a holder names a block that does not exist"
