"""A buffer of a model as it was before a run, which may write into it, and is to leave it as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.tensor_state import class_of

# What PyTorch raises of an operator that a layout, a dtype or a class of tensors does not have.
CANNOT = (NotImplementedError, RuntimeError, TypeError)


class KeptBuffer:
    """``buffer`` and what it was, in memory of its own; where it cannot be copied, only whether it was written."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self.version = buffer, version(buffer)
        self._values: Tensor | None = None
        self._same: Tensor | None = None
        with _as_it_is(), suppress(*CANNOT):
            self._values = buffer.detach().clone()
            self._same = buffer.detach()  # in the same memory, whatever the run gives the buffer
        self._at = _address_of(buffer)

    def holds(self) -> bool:
        """Whether it is still what it was when this was made, as far as PyTorch counts that."""
        counted = not self._buffer.is_inference()
        return counted and version(self._buffer) == self.version and _address_of(self._buffer) == self._at

    def is_other(self) -> bool:
        """Whether it was written in place, or given other memory."""
        if not self._buffer.is_inference():
            return not self.holds()
        return self._values is not None and not _same_bytes(self._buffer, self._values)

    def put_back(self) -> None:
        """One that is as it was keeps its version: compiled programs watch it."""
        if not self.is_other() or self._values is None or self._same is None:
            return
        with _as_it_is(), torch.inference_mode(self._buffer.is_inference()), suppress(*CANNOT):
            if self._buffer.shape != self._values.shape or _address_of(self._buffer) != self._at:
                self._buffer.data = self._same
            self._buffer.copy_(self._values)


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


def version(tensor: Tensor) -> int:
    """How often it was written in place; one made in inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _as_it_is() -> Iterator[None]:
    """Also where a run is traced."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """NaN is what it is, too."""
    if one.shape != other.shape or class_of(one) is not Tensor or one.layout is not torch.strided:
        return one is other
    one, other = (tensor.contiguous().view(torch.uint8) for tensor in (one.reshape(-1), other.reshape(-1)))
    return torch.equal(one, other)


def _address_of(tensor: Tensor) -> int:
    """0 where there is no memory, as of one that tracing made."""
    with suppress(*CANNOT):
        return 0 if tensor.device.type == "meta" else tensor.data_ptr()
    return 0
