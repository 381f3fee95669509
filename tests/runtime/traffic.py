"""Random traffic over a scheduler, and a model of the KV memory that knows what every slot should hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.step import Reach


def content(state: RequestState, position: int, weights: int, drafted: int = 0) -> int:
    """What the keys and values of a token depend on: all tokens up to it, the salt, and the weights."""
    tokens = (state.tokens + state.draft[:drafted])[: position + 1].tobytes()
    return zlib.crc32(repr((state.terms.cache_salt, weights)).encode() + tokens)


class Memory:
    """Slots as a step writes them. A wrong block, a lost one, or a stale one is found when it is read."""

    def __init__(self, block_size: int, reaches: Sequence[Reach] = (Reach(),)) -> None:
        self._block_size = block_size
        self._reaches = reaches
        self._slots: dict[tuple[int, int], int] = {}
        self._host: dict[tuple[int, int], list[int | None]] = {}

    def copy(self, copies: Iterable[Copy | BlockCopy]) -> None:
        """Between blocks, and between the device and the host tier, one after the other."""
        for copy in copies:
            places = self._places(copy.table, copy.block)
            if isinstance(copy, BlockCopy):
                self._put(places, [self._slots.get(place) for place in self._places(copy.table, copy.source)])
            elif copy.to_host:
                self._host[copy.table, copy.slot] = [self._slots.get(place) for place in places]
            else:
                self._put(places, self._host[copy.table, copy.slot])

    def _places(self, table: int, block: int) -> list[tuple[int, int]]:
        return [(table, block * self._block_size + inside) for inside in range(self._block_size)]

    def _put(self, places: Sequence[tuple[int, int]], values: Sequence[int | None]) -> None:
        for place, value in zip(places, values, strict=True):
            self._slots.pop(place, None)
            if value is not None:
                self._slots[place] = value

    def run(self, plan: StepPlan, weights: int) -> None:
        """The step of a plan: all writes, then all reads, as `selective::ragged_attention` has it."""
        written: set[tuple[int, int]] = set()
        for table in range(len(self._reaches)):
            for share in plan.shares:
                for position in range(share.start, share.start + share.num_tokens):
                    slot = self._slot(share.state, table, position)
                    assert slot not in written, f"slot {slot} is written twice in a step"
                    written.add(slot)
                    self._slots[slot] = content(share.state, position, weights, share.drafted)
        for table, reach in enumerate(self._reaches):
            for share in plan.shares:
                seen = range(reach.first_seen(share.start), share.start + share.num_tokens)
                self._read(share.state, table, seen, weights, share.drafted)

    def _read(self, state: RequestState, table: int, positions: Iterable[int], weights: int, drafted: int) -> None:
        for position in positions:
            found = self._slots.get(self._slot(state, table, position))
            assert found == content(state, position, weights, drafted), f"{state}: another's content at {position}"

    def _slot(self, state: RequestState, table: int, position: int) -> tuple[int, int]:
        block, inside = divmod(position, self._block_size)
        held = state.tables[table]
        assert block >= held.gone, f"{state}: block {block} was given back"
        return table, held.blocks[block] * self._block_size + inside


def next_token(state: RequestState, branch: int = 0) -> int:
    """What the model of the tests generates: few different tokens, so that requests come to agree by chance."""
    return (zlib.crc32(state.tokens.tobytes()) + branch) % 2


def next_tokens(state: RequestState, drafted: int) -> list[int]:
    """The tokens of a step: those of the draft that are right, and one more."""
    found = RequestState(0, 0, state.tokens, max_new_tokens=1)
    for right in state.draft[:drafted]:
        found.tokens.append(next_token(found))
        if found.tokens[-1] != right:
            return found.tokens[len(state.tokens) :].tolist()
    return [*found.tokens[len(state.tokens) :], next_token(found)]


def next_beams(group: Sequence[RequestState]) -> tuple[list[int], list[int]]:
    """Which of a group each of it goes on from, and the token that it goes on with."""
    mixed = zlib.crc32(b"".join(state.tokens.tobytes() for state in group))
    parents = [(mixed >> 3 * place) % len(group) for place in range(len(group))]
    return parents, [next_token(group[parent], place) for place, parent in enumerate(parents)]
