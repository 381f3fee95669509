"""Where the tensors of a step lie in memory: for as long as nobody comes or goes, steps differ in their values alone.

Values are written as bytes that arrays and ranges give. A model's run leaves nothing of the host's code and data in the
caches, so that a call into numpy or torch, of which a step would take dozens, costs ten times what it does in a loop:
5 to 25 microseconds each (measured after reading 24 MB on an EPYC with 1 MB of cache per core).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Literal

import torch
from torch import Tensor

from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.request_state import RequestState
from selective_compile.step import StepInputs

# Each tensor starts at a multiple of so many bytes, as those do that torch allocates: GPU kernels are compiled for it.
ALIGNED = 64
Kind = Literal["i", "q"]
DTYPES = {"i": torch.int32, "q": torch.int64}
SIZES = {"i": 4, "q": 8}


class StepMemory:
    """Memory for the integers of a step, on the host and, copied as one, on the device."""

    def __init__(self, num_bytes: int, device: torch.device, stream: DeviceStream) -> None:
        self._stream = stream
        # Only from pinned memory does a copy to the device run beside the host's work.
        self._host = torch.zeros(num_bytes // 8, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        self._device = self._host.to(device, copy=True) if stream.separate else self._host
        self._bytes = self._host.numpy().data.cast("B")
        self._words = {kind: self._device.view(dtype) for kind, dtype in DTYPES.items()}

    def tensor(self, start: int, *shape: int, kind: Kind) -> tuple[memoryview, Tensor]:
        """What begins at byte `start`, zeros: on the host to be written, and on the device to be read."""
        size, count = SIZES[kind], 1
        for each in shape:
            count *= each
        host = self._bytes[start : start + count * size]
        host[:] = bytes(len(host))
        return host, self._words[kind][start // size : start // size + count].view(shape)

    def move(self, num_bytes: int) -> None:
        """To the device, what is in the first so many bytes."""
        if self._stream.separate:
            self._stream.copy(self._device[: num_bytes // 8], self._host[: num_bytes // 8])


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


class StepLayout:
    """Views of a step's memory, and what depends on nothing but how long its shares are."""

    def __init__(
        self,
        memory: StepMemory,
        counts: Sequence[int],
        rows: Sequence[int],
        *,
        width: int,
        num_tables: int,
        smallest: int,
        invariant: bool,
    ) -> None:
        """
        Args:
            counts: tokens of each share.
            rows: of how many of them, the last, the logits are wanted.
            width: entries of a block table.
            smallest: T, N and R are at least so many.
            invariant: each row attends as a request of its own.
        """
        self._memory = memory
        self._used = 0
        ends = list(accumulate(counts))
        tokens = ends[-1]
        bounds = range(1, tokens + 1) if invariant else ends  # where requests end, as attention has them
        padded, requests = max(tokens, smallest), max(len(bounds), smallest)
        self._ids, input_ids = self._next(padded, kind="q")
        self._positions, positions = self._next(padded, kind="q")
        logits, logit_rows = self._next(max(sum(rows), smallest), kind="q")
        cu, cu_seqlens = self._next(requests + 1, kind="i")
        self._context_lens, context_lens = self._next(requests, kind="i")
        slots = [self._next(padded, kind="q") for _ in range(num_tables)]
        tables = [self._next(requests, width, kind="i") for _ in range(num_tables)]
        last = [range(end - count, end) for end, count in zip(ends, rows, strict=True)]
        _write(logits, array("q", chain.from_iterable(last)))
        _write(cu, array("i", [0, *bounds, *[tokens] * (requests - len(bounds))]))
        for slot, _ in slots:
            _write(slot[8 * tokens :], array("q", [-1] * (padded - tokens)))
        self._tables = [(table, slot) for (table, _), (slot, _) in zip(tables, slots, strict=True)]
        (block_table, slot_mapping), *others = [
            (table, slot) for (_, table), (_, slot) in zip(tables, slots, strict=True)
        ]
        self._inputs = StepInputs(
            input_ids=input_ids,
            positions=positions,
            cu_seqlens_q=cu_seqlens,
            context_lens=context_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            other_tables=tuple(others),
            logit_rows=logit_rows,
        )

    def _next(self, *shape: int, kind: Kind) -> tuple[memoryview, Tensor]:
        found = self._memory.tensor(self._used, *shape, kind=kind)
        self._used += aligned(len(found[0]))
        return found

    def fill(
        self,
        *,
        ids: bytes,
        positions: array[int],
        context_lens: array[int],
        tables: Iterable[tuple[bytes, array[int]]],
        requests: tuple[RequestState, ...],
    ) -> StepInputs:
        """The inputs of a step, all but the padding; block tables with the slots that go with each."""
        _write(self._ids, ids)
        _write(self._positions, positions)
        _write(self._context_lens, context_lens)
        for (table, slots), (blocks, places) in zip(self._tables, tables, strict=True):
            _write(table, blocks)
            _write(slots, places)
        self._memory.move(self._used)
        if self._inputs.requests != requests:
            self._inputs = replace(self._inputs, requests=requests)
        return self._inputs


def _write(place: memoryview, values: bytes | array[int]) -> None:
    """To the beginning of a place."""
    found = bytes(values)
    place[: len(found)] = found
