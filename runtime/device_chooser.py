"""What goes between a step and the next on the device: tokens that are chosen there, and read there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.device_draw import FIELDS, NO_TOKEN, choices, choose
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.token_marks import TokenMarks

# Steps whose memory on the host the device may still read or write: the one on its way, and the next.
TURNS = 2


class Staged:
    """Values that the host has written, on the device when the stream gets there."""

    def __init__(self, stream: DeviceStream, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._stream = stream
        # Only from pinned memory does a copy to the device run beside the host's work.
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda", device="cpu")
        self._device = self._host.to(device, copy=True) if stream.separate else self._host

    def put(self, values: NDArray[Any]) -> Tensor:
        """As the first of a flat memory, in their shape."""
        size = values.size
        self._host.numpy()[:size] = values.reshape(-1)
        if self._stream.separate:
            self._stream.copy(self._device[:size], self._host[:size])
        return self._device[:size].view(values.shape)


class DeviceChooser:
    """Keeps the last step's tokens on the device, and brings each step's to the host's memory.

    Attributes:
        last: [rows] int64, the tokens of the last step's rows of logits, on the device.
        marks: of the tokens that requests have had or may not have, where penalties and bans go by them.
    """

    def __init__(
        self,
        stream: DeviceStream,
        device: torch.device,
        *,
        token_budget: int,
        rows: int,
        slots: int,
        vocab_size: int,
        known_ids: int,
    ) -> None:
        """
        Args:
            rows: most rows of logits of a step.
            slots: that requests are kept in.
            known_ids: a step can be given ids less than this.
        """
        self._stream = stream
        self._known_ids = known_ids
        self.marks = TokenMarks(stream, slots=slots, vocab_size=vocab_size, device=device)
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        self._sources = [Staged(stream, (token_budget,), torch.int64, device) for _ in range(TURNS)]
        self._slots = [Staged(stream, (rows,), torch.int64, device) for _ in range(TURNS)]
        self._rows = [Staged(stream, (rows,), torch.int64, device) for _ in range(TURNS)]
        self._choices = [Staged(stream, (FIELDS * rows,), torch.float64, device) for _ in range(TURNS)]
        self._tokens = [
            torch.zeros(rows, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu") for _ in range(TURNS)
        ]
        self._turn = 0

    def next_turn(self) -> None:
        """Another step begins; the one before the last has ended."""
        self._turn = (self._turn + 1) % TURNS

    def stage_sources(self, sources: array[int] | None) -> Tensor | None:
        return None if sources is None else self._sources[self._turn].put(np.asarray(sources, dtype=np.int64))

    def stage_choices(self, params: Sequence[GenerationParams], indices: Sequence[int]) -> Tensor | None:
        """What `choose` is to be given; as `device_draw.choices`."""
        found = choices(params, indices)
        return None if found is None else self._choices[self._turn].put(found)

    def input_ids(self, known: Tensor, sources: Tensor | None) -> Tensor:
        """Ids [T], those of which there is a source from the last step."""
        if sources is None:
            return known
        count = sources.shape[0]
        # Where no token could be drawn, or one that the model does not know, the request ends; any id will do.
        given = self.last[sources.clamp(min=0)].clamp(0, self._known_ids - 1)
        ids = known.clone()
        ids[:count] = torch.where(sources < 0, known[:count], given)
        return ids

    @property
    def arriving(self) -> Tensor:
        """Where the tokens of this turn's step come to be, in the host's memory."""
        return self._tokens[self._turn]

    def stage_slots(self, slots: Sequence[int]) -> Tensor:
        return self._slots[self._turn].put(np.array(slots, dtype=np.int64))

    def stage_rows(self, rows: Sequence[int]) -> Tensor:
        """[count] int64, of the logits that the device chooses from."""
        return self._rows[self._turn].put(np.array(rows, dtype=np.int64))

    def choose(self, logits: Tensor, rows: Tensor | None, slots: Tensor | None = None) -> None:
        """The last tokens are from now on those of logits [R, V].

        Args:
            slots: [R], of the requests in `marks`; None: nobody has a penalty or a ban.
        """
        if logits.is_cuda:
            from selective_compile.kernels import choose_triton  # without a GPU, there may be no Triton

            marks, fields = None if slots is None else self.marks.marks, None if rows is None else rows.contiguous()
            tokens = choose_triton.choose(logits, fields, marks, slots, no_token=NO_TOKEN)
        else:
            tokens = choose(logits, rows, None if slots is None else self.marks.marks[slots])
            if slots is not None:
                self.marks.mark(slots, tokens)
        self.last[: logits.shape[0]] = tokens
