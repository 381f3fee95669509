"""Which tokens each request has had, on the device, for its repetition penalty."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.request_state import RequestState

NEVER = -1, 0


class SeenTokens:
    """Of each request in a slot, a mark for each token of its prompt and of what it has generated.

    A step on the device marks what it chooses (`mark`); the host sends what came in other ways (`catch_up`).
    """

    def __init__(self, stream: DeviceStream, *, slots: int, vocab_size: int, device: torch.device) -> None:
        self._stream, self._shape, self._device = stream, (slots + 1, vocab_size), device
        self._marks: Tensor | None = None
        self._sent = [NEVER] * slots  # of each slot: whose tokens, and how many of them

    @property
    def marks(self) -> Tensor:
        """[slots + 1, V] booleans, the last row of nobody; memory is taken by the first who wants it."""
        if self._marks is None:
            with torch.inference_mode(False):  # it is written to outside of that, too
                self._marks = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._marks

    @property
    def nobody(self) -> int:
        """In place of a slot, of a request that has no penalty."""
        return len(self._sent)

    def catch_up(self, state: RequestState, slot: int) -> None:
        """Before a step is expected in which the device chooses for this request."""
        known = len(state.tokens) - state.unknown
        number, sent = self._sent[slot]
        fresh = number != state.number
        if fresh or sent < known:
            self._send(slot, state.tokens[0 if fresh else sent : known], clear=fresh)
        self._sent[slot] = state.number, len(state.tokens) + 1

    def forget(self) -> None:
        """What was sent may not have arrived."""
        self._sent = [NEVER] * len(self._sent)

    def mark(self, slots: Tensor, tokens: Tensor) -> None:
        """On the device: of each slot [R], its token [R]; a row of nobody is marked, too."""
        self.marks.index_put_((slots, tokens.clamp(min=0)), torch.ones_like(slots, dtype=torch.bool))

    def _send(self, slot: int, tokens: Sequence[int] | array[int], *, clear: bool) -> None:
        marks, places = self.marks, torch.tensor(tokens, dtype=torch.int64)

        def send() -> None:
            if clear:
                marks[slot].zero_()
            marks[slot].index_fill_(0, self._stream.send(places, marks.device), 1)

        self._stream.enqueue(send)
