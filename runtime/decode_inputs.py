"""The inputs of a step in which every request computes one token, where a captured graph reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.device_draw import FIELDS
from selective_compile.runtime.device_stream import DeviceStream

# Each tensor starts at a multiple of so many bytes, as those do that torch allocates: GPU kernels are compiled for it.
ALIGNED = 64
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def shapes(size: int, num_tables: int) -> Shapes:
    """What a step of at most `size` requests reads; of each block table, as many changes as there are requests."""
    each = (size,), torch.int64
    tables = range(num_tables)
    return {
        "input_ids": each,
        "sources": each,
        "positions": each,
        "slots": each,
        "cu_seqlens_q": ((size + 1,), torch.int32),
        "context_lens": ((size,), torch.int32),
        **{f"slot_mapping_{table}": each for table in tables},
        **{f"places_{table}": each for table in tables},
        **{f"values_{table}": ((size,), torch.int32) for table in tables},
        "penalised": each,
        "choices": ((FIELDS, size), torch.float64),
    }


def num_bytes(wanted: Shapes) -> int:
    return sum(_aligned(shape, dtype) for shape, dtype in wanted.values())


@dataclass(frozen=True, kw_only=True)
class Views:
    """Of one memory on the host and one on the device, by the names of `shapes`."""

    host: Mapping[str, NDArray[np.generic]]
    device: Mapping[str, Tensor]


class DecodeMemory:
    """Memory of the host for as many steps as may be on their way, and of the device for the one that runs."""

    def __init__(self, stream: DeviceStream, sizes: Sequence[int], num_tables: int, device: torch.device, turns: int):
        total = max(num_bytes(shapes(size, num_tables)) for size in sizes)
        self._stream = stream
        self._hosts = [torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(turns)]
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._ends = {size: num_bytes(shapes(size, num_tables)) for size in sizes}
        self._views = {(size, turn): self._views_of(size, num_tables, turn) for size in sizes for turn in range(turns)}
        self._turn = 0

    def next(self, size: int) -> Views:
        """The memory of another step; the one before the last has ended."""
        self._turn = (self._turn + 1) % len(self._hosts)
        return self._views[size, self._turn]

    def send(self, size: int) -> None:
        """To the device, what was written last."""
        self._stream.copy(self._device[: self._ends[size]], self._hosts[self._turn][: self._ends[size]])

    def on_device(self, size: int) -> Mapping[str, Tensor]:
        return self._views[size, 0].device

    def _views_of(self, size: int, num_tables: int, turn: int) -> Views:
        host: dict[str, NDArray[np.generic]] = {}
        device: dict[str, Tensor] = {}
        start = 0
        for name, (shape, dtype) in shapes(size, num_tables).items():
            end = start + int(np.prod(shape)) * dtype.itemsize
            host[name] = self._hosts[turn][start:end].view(dtype).view(shape).numpy()
            device[name] = self._device[start:end].view(dtype).view(shape)
            start += _aligned(shape, dtype)
        return Views(host=host, device=device)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-int(np.prod(shape)) * dtype.itemsize // ALIGNED) * ALIGNED
