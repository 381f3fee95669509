"""Block tables that stay on the device: what changes of them from one step to the next is all that is sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.request_state import RequestState


class DeviceTables:
    """Of each request in a slot, its blocks in one pool.

    Attributes:
        entries: [slots + 1, max_blocks] int32 on the device; nobody reads what lies behind a request's blocks, nor the
            last row, but requests that are none.
    """

    def __init__(self, table: int, *, slots: int, max_blocks: int, device: torch.device) -> None:
        """`table`: which of a request's."""
        self.entries = torch.zeros(slots + 1, max_blocks, dtype=torch.int32, device=device)
        self.nobody = slots * max_blocks  # the place of an entry that changes nothing
        self._table = table
        self._max_blocks = max_blocks
        self._sent = [b""] * slots

    def changes(
        self, states: Sequence[RequestState], slots: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places in `entries`, flat, and the values that are to come there; from now on they count as sent."""
        places: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int32]] = []
        for state, slot in zip(states, slots, strict=True):
            blocks = state.tables[self._table].blocks.tobytes()
            sent = self._sent[slot]
            if blocks != sent:
                self._sent[slot] = blocks
                now, before = (np.frombuffer(each, dtype=np.int32) for each in (blocks, sent))
                known = min(len(now), len(before))
                changed = np.flatnonzero(now[:known] != before[:known])
                fresh = np.concatenate([changed, np.arange(known, len(now))])
                places.append(fresh + slot * self._max_blocks)
                values.append(now[fresh])
        if not places:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        return np.concatenate(places), np.concatenate(values)

    def forget(self) -> None:
        """What was sent may not have arrived."""
        self._sent = [b""] * len(self._sent)

    def change(self, places: Tensor, values: Tensor) -> None:
        """On the device; of a place that comes twice, both values are the same or nobody reads it."""
        self.entries.view(-1).index_put_((places,), values)
