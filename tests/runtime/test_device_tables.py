"""Block tables on the device are those of the requests, however these change, and only what changed is sent."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.runtime.device_tables import DeviceTables
from selective_compile.runtime.request_state import BlockTable, RequestState

SLOTS, WIDTH = 3, 6
TABLES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=WIDTH), min_size=SLOTS, max_size=SLOTS)


def sent(tables: DeviceTables, states: list[RequestState], slots: list[int]) -> int:
    places, values = tables.changes(states, slots)
    tables.change(torch.from_numpy(places), torch.from_numpy(values))
    return len(places)


def requests() -> list[RequestState]:
    return [RequestState(number, number, [1], max_new_tokens=9) for number in range(SLOTS)]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(TABLES, st.permutations(range(SLOTS)), st.booleans()), min_size=1, max_size=6))
def test_they_follow(steps: list[tuple[list[list[int]], list[int], bool]]) -> None:
    tables = DeviceTables(0, slots=SLOTS, max_blocks=WIDTH, device=torch.device("cpu"))
    states = requests()
    for blocks, slots, lost in steps:
        for state, own in zip(states, blocks, strict=True):
            state.tables = (BlockTable(own),)
        if lost:
            tables.entries.fill_(-7)
            tables.forget()
        sent(tables, states, slots)
        for slot, own in zip(slots, blocks, strict=True):
            assert tables.entries[slot, : len(own)].tolist() == own


def test_only_what_changed_is_sent() -> None:
    tables = DeviceTables(0, slots=SLOTS, max_blocks=WIDTH, device=torch.device("cpu"))
    states = requests()
    for state in states:
        state.tables = (BlockTable([4, 5]),)
    assert sent(tables, states, [0, 1, 2]) == 6
    assert sent(tables, states, [0, 1, 2]) == 0
    states[1].tables[0].blocks.append(9)
    states[2].tables[0].blocks[1] = 8
    assert sent(tables, states, [0, 1, 2]) == 2
    assert tables.entries[:3, :3].tolist() == [[4, 5, 0], [4, 5, 9], [4, 8, 0]]
