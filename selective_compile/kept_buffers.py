"""A buffer of a model as it was before a run, which may write into it, and is to leave it as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.tensor_state import address_of, class_of, strides, version_of

# What PyTorch raises of an operator that a layout, a dtype or a class of tensors does not have.
CANNOT = (NotImplementedError, RuntimeError, TypeError)


class KeptBuffer:
    """``buffer`` and what it was, in memory of its own; where it cannot be copied, only whether it was written.

    Attributes:
        times: how often it was put back.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.times = 0
        self._buffer, self._version = buffer, version_of(buffer)
        self._values: Tensor | None = None
        self._same: Tensor | None = None
        with _as_it_is():
            try:
                self._values = buffer.detach().clone()
                self._same = buffer.detach()  # in the same memory, whatever the run gives the buffer
            except torch.OutOfMemoryError:
                raise
            except CANNOT:
                pass
        self._lies = _lies(buffer)

    def holds(self) -> bool:
        """Whether it is still what it was when this was made, as far as PyTorch counts that."""
        return not self._buffer.is_inference() and self._is_where_it_was()

    def is_other(self) -> bool:
        """Whether it was written in place, also where that is not counted, or given other memory."""
        return not self._is_where_it_was() or not (self._values is None or _same_bytes(self._buffer, self._values))

    def put_back(self) -> None:
        """
        Raises:
            ValueError: nothing is known of what it was.
        """
        if self._values is None or self._same is None:
            what = f"{self._buffer.dtype}, {self._buffer.layout}, {type(self._buffer).__name__}"
            raise ValueError(f"a buffer that a run of the model writes must be one that can be copied, got {what}")
        self.times += 1
        with _as_it_is(), torch.inference_mode(self._buffer.is_inference()):
            if _lies(self._buffer) != self._lies:
                self._buffer.data = self._same
            self._buffer.copy_(self._values)
        self._version = version_of(self._buffer)

    def _is_where_it_was(self) -> bool:
        return version_of(self._buffer) == self._version and _lies(self._buffer) == self._lies


_KEPT = threading.local()


@contextmanager
def kept_buffer(buffer: Tensor) -> Iterator[KeptBuffer]:
    """As it is now, within: where it is kept already, and unchanged since, no other copy is made."""
    kept: dict[int, KeptBuffer] = vars(_KEPT).setdefault("buffers", {})
    outer = kept.get(id(buffer))
    if outer is not None and outer.holds():
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


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Also where a run is traced."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """NaN is what it is, too. Of what has no bytes to look at, that it was not written is all that is known."""
    with _as_it_is(), suppress(*CANNOT):
        if class_of(one) is Tensor and one.layout is torch.strided:
            return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other)))
    return True


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """Where it lies and how; in no memory, as one that tracing made, at 0."""
    address = 0 if tensor.device.type == "meta" else address_of(tensor)
    return address, tensor.dtype, tensor.shape, strides(tensor)
