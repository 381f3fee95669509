"""The second tier of KV memory: content of blocks that the device had no room for, kept in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

# What a copy of a hundred copies ago still counts is a third, as of the steps.
FORGETTING = 0.99


class Copy(NamedTuple):
    """Move a block's keys and values, of all attention calls of one table, between the device and the host."""

    to_host: bool
    table: int
    block: int
    slot: int


class BlockCopy(NamedTuple):
    """Give a block of a table's pool the keys and values that another one has."""

    table: int
    source: int
    block: int


class CopyTimes:
    """Seconds to copy a block, over the recent copies."""

    def __init__(self) -> None:
        self._blocks = self._seconds = 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        self._blocks = FORGETTING**blocks * self._blocks + blocks
        self._seconds = FORGETTING**blocks * self._seconds + seconds

    @property
    def per_block(self) -> float | None:
        return self._seconds / self._blocks if self._blocks else None


class HostTier:
    """Slots of host memory for the blocks of one table, found by the names of their content; the slot that was used
    least recently is taken first.

    It decides, and leaves the copies to be made to `copies`: they hold in this order, before the step they were
    planned with writes anything. A slot that was copied back keeps its content too: the block need not be copied out a
    second time.
    """

    def __init__(
        self, num_slots: int, *, table: int, copies: list[Copy | BlockCopy], pays: Callable[[int], bool]
    ) -> None:
        """`pays`: whether so many copies of a block take less time than computing it again."""
        self.num_slots = num_slots
        self._table = table
        self._copies = copies
        self._pays = pays
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def spill(self, name: bytes, block: int) -> None:
        """The device is about to lose a block's content: keep it, if that is worth while."""
        if name in self._slots:
            self._slots.move_to_end(name)
        elif self._pays(2) and (self._free or self._slots):
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[name] = slot
            self._copies.append(Copy(True, self._table, block, slot))

    def has(self, name: bytes) -> bool:
        """Whether to copy this content back rather than to compute it."""
        return name in self._slots and self._pays(1)

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """The slots of these contents, which nobody else gets until they are restored."""
        return [self._slots.pop(name) for name in names]

    def restore(self, names: Sequence[bytes], slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy contents that are held to blocks of the device."""
        for name, slot, block in zip(names, slots, blocks, strict=True):
            self._copies.append(Copy(False, self._table, block, slot))
            self._slots[name] = slot

    def forget(self) -> None:
        self._slots.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def check(self) -> None:
        """Assert that no slot is lost and none has two contents."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots)), "host slots"
