"""A played device that notes where the host would wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.blocking_calls import blocks, reads
from tests.runtime.played_stream import PlayedStream, is_tensor, waits_for_the_device
from tests.runtime.simulated import SimulatedProgram


class WatchedStream(PlayedStream):
    """Notes where the host reads what the device has computed, other than from what was copied to the host, and where
    work that it was given does, which is not the model's: what is `kernels` here are kernels there. And where the host
    would wait for a copy (`blocking_calls`), but where the user's code is asked `aside`.

    What is computed from memory of the device is the device's, whoever asks for it but `aside`; so is all that work
    computes.

    Attributes:
        reads: what was called for it, within `watched`.
    """

    def __init__(self, *, captures: bool) -> None:
        super().__init__(captures=captures)
        self.reads: list[str] = []
        self._of_device: dict[int, Any] = {}  # storages, which are kept: another could get the address of one
        self._pinned: dict[int, Any] = {}
        self._working = self._watching = self._in_kernels = self._copying = False

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """What runs within stands for a model's kernels, which wait for nothing."""
        was, self._in_kernels = self._in_kernels, True
        try:
            yield
        finally:
            self._in_kernels = was

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._watching and not any(each.untyped_storage().data_ptr() in self._pinned for each in (target, source)):
            self.reads.append("a copy of memory that is not pinned")

        def done() -> None:
            to_host = self.is_of_device(source)
            with self.copies():
                target.copy_(source)
            if to_host:
                self._of_device.pop(target.untyped_storage().data_ptr(), None)

        self.enqueue(done)

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        with self.copies():
            sent = values.clone()
        self.computed(sent)
        return sent

    @contextmanager
    def copies(self) -> Iterator[None]:
        """What is copied within is pinned, and nobody waits for it."""
        was, self._copying = self._copying, True
        try:
            yield
        finally:
            self._copying = was

    @contextmanager
    def built(self) -> Iterator[None]:
        """Memory of the host that is made within is known to be pinned, if it would be with a GPU: if it is asked
        for."""
        with Computed(self), HostReads(self):
            yield

    def made(self, tensor: Tensor, *, asked: Mapping[str, Any]) -> None:
        """Of no other, or at a place that was named; and of the host where no device was asked for, though work may
        have done it, or where the host was: a device that somebody holds is the program's."""
        memory = tensor.untyped_storage()
        if "pin_memory" in asked:
            self._pinned[memory.data_ptr()] = memory
        elif asked.get("device") is not None and not isinstance(asked["device"], str):
            self.computed(tensor)
        else:
            self._of_device.pop(memory.data_ptr(), None)

    def is_of_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._of_device

    def computed(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        if memory.data_ptr():  # or all that is empty were
            self._of_device[memory.data_ptr()] = memory

    def _run(self, count: int) -> None:
        was, self._working = self._working, True
        try:
            with Computed(self):
                super()._run(count)
        finally:
            self._working = was

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._watching = True
        try:
            with Computed(self), HostReads(self):
                yield
        finally:
            self._watching = False

    def worked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator is called, by the device's work or by the host."""
        if not self._watching or self._in_kernels or not waits_for_the_device(func, args):
            return
        if self._working or (not self.besides and self._any_of_device(args, kwargs)):
            self.reads.append(str(func))

    def found(self, results: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator has."""
        if self._working or (not self.besides and self._any_of_device(args, kwargs)):
            for tensor in filter(is_tensor, tree_leaves(results)):
                self.computed(tensor)

    def _any_of_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return any(map(self.is_of_device, filter(is_tensor, tree_leaves((args, kwargs)))))

    def called(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A function of torch is."""
        if not self._watching or self._in_kernels:
            return
        if reads(name, args, kwargs, self.is_of_device, working=self._working):
            self.reads.append(name)
        elif not self._copying and not self.besides:
            if blocks(name, args, kwargs, self.is_of_device, working=self._working):
                self.reads.append(f"{name} of memory of the host")


class Computed(TorchDispatchMode):
    """Within, what is computed by the device, or from its memory, is the device's."""

    def __init__(self, stream: WatchedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self._stream.worked(func, args, given)
        found = func(*args, **given)
        self._stream.found(found, args, given)
        return found


class HostReads(TorchFunctionMode):
    """Tells of calls that operators do not show where all memory is the host's."""

    def __init__(self, stream: WatchedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self._stream.called(getattr(func, "__name__", ""), args, given)
        found = func(*args, **given)
        others = list(filter(is_tensor, tree_leaves((args, given))))
        if is_tensor(found) and (not others or (isinstance(given.get("device"), str) and _is_new(found, others))):
            self._stream.made(found, asked=given)
        return found


def _is_new(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether its memory is none of theirs."""
    return all(tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() for other in others)


class Kernels(SimulatedProgram):
    """Whose kernels, here, are Python that looks at tensors."""

    def __init__(self, stream: WatchedStream, *, captured: bool) -> None:
        super().__init__(captured=captured)
        self._stream = stream

    def __call__(self, *arguments: Any) -> Tensor:
        with self._stream.kernels():
            return super().__call__(*arguments)
