"""Which tokens each request has had, and which it may not have next, on the device: for penalties and bans."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.processors import Ban
from selective_compile.runtime.request_state import RequestState

# Bits of a mark.
SEEN: Final = 1
BANNED: Final = 2


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """What the device knows of the request in a slot: its number, how many of its tokens, and the bans in force."""

    number: int = -1
    tokens: int = 0
    bans: tuple[Ban, ...] = ()


NOTHING = _Sent()


class TokenMarks:
    """Of each request in a slot, a mark for each token of its prompt and of what it has generated, where it has a
    repetition penalty, and for each that is banned.

    A step on the device marks what it chooses (`mark`); the host sends what came in other ways (`catch_up`).
    """

    def __init__(self, stream: DeviceStream, *, slots: int, vocab_size: int, device: torch.device) -> None:
        self._stream, self._shape, self._device = stream, (slots + 1, vocab_size), device
        self._marks: Tensor | None = None
        self._sent = [NOTHING] * slots

    @property
    def marks(self) -> Tensor:
        """[slots + 1, V] uint8, of bits `SEEN` and `BANNED`, the last row of nobody; memory is taken by the first who
        wants it."""
        if self._marks is None:
            with torch.inference_mode(False):  # it is written to outside of that, too
                self._marks = torch.zeros(self._shape, dtype=torch.uint8, device=self._device)
        return self._marks

    @property
    def nobody(self) -> int:
        """In place of a slot, of a request that needs no marks."""
        return len(self._sent)

    def catch_up(self, state: RequestState, params: GenerationParams, slot: int) -> None:
        """Before a step is expected in which the device chooses for this request."""
        sent, known = self._sent[slot], len(state.tokens) - state.unknown
        if sent.number != state.number:
            sent = _Sent(number=state.number)
            self._enqueue(slot, lambda row: row.zero_())
        if params.repetition_penalty != 1.0 and sent.tokens < known:
            self._send(slot, state.tokens[sent.tokens : known], SEEN)
        bans = tuple(ban for ban in params.bans if ban.first <= len(state.tokens) < ban.before)
        if sent.bans != bans:
            self._enqueue(slot, lambda row: row.bitwise_and_(SEEN))
            self._send(slot, [token for ban in bans for token in ban.tokens], BANNED)
        self._sent[slot] = _Sent(number=state.number, tokens=len(state.tokens) + 1, bans=bans)

    def forget(self) -> None:
        """What was sent may not have arrived."""
        self._sent = [NOTHING] * len(self._sent)

    def mark(self, slots: Tensor, tokens: Tensor) -> None:
        """On the device: of each slot [R], its token [R]; a row of nobody is marked, too."""
        places = slots, tokens.clamp(min=0)
        self.marks.index_put_(places, self.marks[places] | SEEN)

    def _send(self, slot: int, tokens: Sequence[int] | array[int], bit: int) -> None:
        if not tokens:
            return
        places, device = torch.tensor(tokens, dtype=torch.int64, device="cpu"), self._device

        def send(row: Tensor) -> None:
            there = self._stream.send(places, device)
            row[there] = row[there] | bit

        self._enqueue(slot, send)

    def _enqueue(self, slot: int, change: Callable[[Tensor], object]) -> None:
        row = self.marks[slot]

        def run() -> None:
            change(row)

        self._stream.enqueue(run)


def needs_marks(params: GenerationParams) -> bool:
    """Whether it has a penalty or a ban."""
    return bool(params.bans) or params.repetition_penalty != 1.0
