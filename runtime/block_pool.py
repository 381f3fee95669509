"""The block pool: which blocks of KV memory are free, who shares the others, and what content is worth keeping."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from selective_compile.runtime.host_tier import HostTier


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1, counting references so that requests can share a block.

    A block whose content has a name (`keep`) stays findable by it, also while nobody holds the block: it is free
    then, but it is handed out only when no nameless free block is left, the one that was let go of first going
    first. The pool knows numbers and names only; the memory itself is in `selective_compile.runtime.kv_cache`.
    Every operation costs time in proportion to the blocks named in it, whatever the size of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self._references = [0] * num_blocks
        # A stack: the block freed last is taken first, while it may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with content that has a name
        self._names: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self.host: HostTier | None = None  # where content goes that there is no room for

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """How many of the free blocks have content that can be found."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. The caller knows that there are so many."""
        free, references = self._free, self._references
        assert 0 <= count <= len(free) + len(self._idle), (count, self.num_free)
        blocks = [free.pop() for _ in range(min(count, len(free)))]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are in use or found by their content."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._idle, f"block {block} is free"
                del self._idle[block]
            self._references[block] += 1

    def fork(self, blocks: Sequence[int]) -> list[int]:
        """The blocks of one who goes on from what the holder of these has in them, all shared.

        Before either writes to a shared block it asks for one of its `own`.
        """
        self.share(blocks)
        return list(blocks)

    def is_own(self, block: int) -> bool:
        """Whether its one holder may write to the block: nobody else holds it, or can find its content."""
        assert self._references[block] > 0, f"block {block} is free"
        return self._references[block] == 1 and self._names[block] is None

    def own(self, block: int) -> int:
        """A block that a holder of this one may write to: this one, or a free one in exchange for its reference.

        The caller knows that one is free, and copies the content, before anybody writes to either of the two.
        """
        if self.is_own(block):
            return block
        (fresh,) = self.allocate(1)
        self.release([block])
        return fresh

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of these blocks; one without references is free.

        Blocks that continue others are let go of before those, for without them they could not be found.
        """
        references, names = self._references, self._names
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} is free"
            references[block] -= 1
            if references[block] == 0:
                if names[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def keep(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Name the content of blocks in use; where another block has that content, it keeps the name."""
        known, named, references = self._blocks, self._names, self._references
        for block, name in zip(blocks, names, strict=True):
            assert references[block] > 0, f"block {block} is free"
            if name not in known:
                assert named[block] is None, f"block {block} has content with another name"
                known[name] = block
                named[block] = name

    def find(self, name: bytes) -> int | None:
        """The block with this content; `share` it to hold it."""
        return self._blocks.get(name)

    def count_known(self, names: Iterable[bytes]) -> int:
        """How many of these contents are here or in the host tier, up to the first that is not."""
        count = 0
        for name in names:
            if name not in self._blocks and (self.host is None or not self.host.has(name)):
                break
            count += 1
        return count

    def restore(self, names: Sequence[bytes], slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Have contents that the host tier holds copied to blocks that were allocated for them."""
        if names:
            assert self.host is not None
            self.host.restore(names, slots, blocks)
            self.keep(blocks, names)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def forget(self) -> None:
        """Take all names away: no content can be found any more. Who holds a block goes on holding it."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._names = [None] * self.num_blocks
        self._blocks.clear()
        if self.host is not None:
            self.host.forget()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the pool agrees with the holders' blocks: none is lost, none given out twice."""
        held = Counter(block for blocks in holders for block in blocks)
        free = set(self._free) | set(self._idle)
        assert len(free) == self.num_free, "a block is free twice"
        for block, references in enumerate(self._references):
            assert references == held[block], f"block {block}: {references} references, {held[block]} holders"
            assert (references == 0) == (block in free), f"block {block}: {references} references and free"
        assert max(held, default=0) < self.num_blocks, "a holder names a block that does not exist"
        named = {name: block for block, name in enumerate(self._names) if name is not None}
        assert self._blocks == named, "a name leads elsewhere"
        if self.host is not None:
            self.host.check()
        assert free & set(named.values()) == self._idle.keys(), "idle blocks are the free ones with names"

    def _evict(self, count: int) -> list[int]:
        idle, known, named, host = self._idle, self._blocks, self._names, self.host
        blocks = [idle.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            name = named[block]
            assert name is not None, block
            named[block] = None
            del known[name]
            if host is not None:
                host.spill(name, block)
        return blocks
