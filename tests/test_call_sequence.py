"""Memory between the calls of a step: no storage is written to while what lies there is still to be read."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from selective_compile.call_sequence import _covers, _slots
from selective_compile.call_values import Memory, Pointer, Size, Storage
from selective_compile.native_calls import Call, NativeCalls


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.lists(st.integers(0, 9), max_size=4)),
        min_size=1,
        max_size=25,
    )
)
def test_storages_that_are_needed_at_once_have_slots_of_their_own(rows: list[tuple[int, int, list[int]]]) -> None:
    """Each call writes to a new storage and reads some of the last ten."""
    written: list[Storage] = []
    calls, uses = [], dict[Storage, list[int]]()
    for number, (factor, constant, read) in enumerate(rows):
        written.append(Storage(num_bytes=Size.symbol(1) * factor + constant))
        used = [written[-1], *[written[-1 - back] for back in read if back < len(written)]]
        for storage in used:
            uses.setdefault(storage, []).append(number)
        calls.append(
            Call(function=1, arguments=(Pointer(Storage(argument=0), 0), *[Pointer(each, 4) for each in used]))
        )
    output = Memory(written[-1], torch.float32, (1,), (1,))
    slots = _slots(NativeCalls(calls=tuple(calls), sizes=((0, 0),), output=output))
    assert set(slots.of) == set(uses) - {written[-1]}
    for one, slot in slots.of.items():
        assert one.num_bytes is not None and _covers(slots.sizes[slot], one.num_bytes)
        for other, its in slots.of.items():
            if other is not one and its == slot:
                assert uses[one][-1] < uses[other][0] or uses[other][-1] < uses[one][0]


def test_a_chain_of_calls_needs_two_slots() -> None:
    """As Inductor's own reuse of buffers: what one call reads is free for what the next writes."""
    storages = [Storage(num_bytes=64) for _ in range(6)]
    calls = [
        Call(function=1, arguments=(Pointer(before, 0), Pointer(after, 0)))
        for before, after in zip(storages, storages[1:], strict=False)
    ]
    output = Memory(storages[-1], torch.float32, (16,), (1,))
    assert len(_slots(NativeCalls(calls=tuple(calls), sizes=(), output=output)).sizes) == 2
