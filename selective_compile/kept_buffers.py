"""A buffer of a model as it was before a run, which may write into it, and is to leave it as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from selective_compile.tensor_memory import as_it_is, bytes_of, is_plain, same_bytes
from selective_compile.tensor_state import address_of, strides

# What PyTorch raises of an operator that a layout, a dtype or a class of tensors does not have.
CANNOT = (NotImplementedError, RuntimeError, TypeError)


class KeptBuffer:
    """``buffer`` and what it was, in memory of its own, where it can be copied."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._values: Tensor | None = None
        self._same: Tensor | None = None
        with as_it_is():
            try:
                self._values = without_repeats(buffer).clone()
                self._same = buffer.detach()  # in the same memory, whatever the run gives the buffer
            except torch.OutOfMemoryError:
                raise
            except CANNOT:
                pass
        self._lies = lies(buffer)

    def is_other(self) -> bool | None:
        """Whether it has other bytes, also where no write was counted, or was given other memory.  None: it has no
        bytes to look at, as a sparse one."""
        if lies(self._buffer) != self._lies:
            return True
        with as_it_is():
            same = None if self._values is None else same_bytes(without_repeats(self._buffer), self._values)
        return None if same is None else not same

    def put_back(self) -> None:
        """
        Raises:
            ValueError: nothing is known of what it was, or it cannot be written.
        """
        if self._values is None or self._same is None:
            raise self._refused()
        try:
            with as_it_is(), torch.inference_mode(self._same.is_inference()):
                if lies(self._buffer) != self._lies:
                    give_back_memory(self._same)
                    self._buffer.data = self._same
                without_repeats(self._buffer).copy_(self._values)
        except CANNOT as error:
            raise self._refused() from error
        self._lies = lies(self._buffer)

    def _refused(self) -> ValueError:
        what = f"{self._buffer.dtype}, {self._buffer.layout}, {type(self._buffer).__name__}"
        return ValueError(f"a buffer that a run of the model writes must be one that can be copied, got {what}")


_KEPT = threading.local()


@contextmanager
def kept_buffer(buffer: Tensor) -> Iterator[KeptBuffer]:
    """As it is now, within: where that is kept already, no other copy is made."""
    kept: dict[int, KeptBuffer] = vars(_KEPT).setdefault("buffers", {})
    outer = kept.get(id(buffer))
    if outer is not None and outer.is_other() is False:
        yield outer
        return
    kept[id(buffer)] = found = KeptBuffer(buffer)
    try:
        yield found
    finally:
        if outer is None:
            del kept[id(buffer)]
        else:
            kept[id(buffer)] = outer


def without_repeats(tensor: Tensor) -> Tensor:
    """Of an expanded one each number once: it cannot be written as it is."""
    for dim, stride in reversed(list(enumerate(strides(tensor)))):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.select(dim, 0)
    return tensor


def give_back_memory(tensor: Tensor) -> None:
    """Make its memory as large as it needs, where a run has taken that away."""
    if is_plain(tensor) and not tensor.is_nested:
        storage, end = tensor.untyped_storage(), bytes_of(tensor).stop
        if storage.nbytes() < end:
            storage.resize_(end)


def lies(tensor: Tensor) -> tuple[Any, ...]:
    """Where it lies and how; in no memory, as one that tracing made, at 0."""
    address = 0 if tensor.device.type == "meta" else address_of(tensor)
    with suppress(*CANNOT):
        return address, tensor.dtype, tensor.shape, strides(tensor)
    return address, tensor.dtype  # nested: it has neither
