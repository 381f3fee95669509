"""A device that is only played: what is enqueued is done when somebody waits for it, or before, as it likes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selective_compile.runtime.device_stream import DeviceStream, Work

T = TypeVar("T")


class PlayedStream(DeviceStream):
    """Nothing is done before it has to be, so that memory of the host that changes too early gives wrong tokens.

    Attributes:
        eager: asked after each `enqueue` how many of the works that are left the device does now.
        captures: what is captured is done again by calling it; by the operators that were seen: `TapedStream`.
        waits: how often the host has waited.
        captured: how often work was captured.
        replayed: how often captured work was enqueued.
        launching: how long it takes the host, on the clock of `seconds`, to give work to the device.
        besides: how many are asked within `aside`.
        busy: how long the device has computed on that clock; whoever plays what computes adds to it.
    """

    separate = True

    def __init__(self, eager: Callable[[], int] = lambda: 0, *, captures: bool = False) -> None:
        self.eager = eager
        self.captures = captures
        self.waits = 0
        self.captured = self.replayed = self.besides = 0
        self.launching = 1.0
        self.busy = 0.0
        self._queue: deque[Work] = deque()
        self._done = 0
        self._lent: list[Tensor] = []

    @property
    def left(self) -> int:
        return len(self._queue)

    def enqueue(self, work: Work) -> None:
        self.replayed += isinstance(work, (Tape, Again))
        self._queue.append(work)
        self._run(min(self.eager(), len(self._queue)))

    def call(self, work: Callable[[], T]) -> T:
        self._run(len(self._queue))
        return work()

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.besides += 1
        try:
            yield
        finally:
            self.besides -= 1

    def seconds(self, work: Work) -> tuple[float, float]:
        before = self.busy
        self.call(work)
        return self.launching, max(self.launching, self.busy - before)

    def capture(self, work: Work, keep: Sequence[Tensor]) -> Work:
        self.captured += 1
        self._run(len(self._queue))
        kept = [tensor.clone() for tensor in keep]
        replay = self._recorded(work)
        for tensor, values in zip(keep, kept, strict=True):
            tensor.copy_(values)
        return replay

    def _recorded(self, work: Work) -> Work:
        work()
        return Again(work)

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._lent.append(tensor)
        return lambda: tensor

    @torch.inference_mode()  # a tensor may be of that mode, or of none
    def _compute_over_what_was_lent(self) -> None:
        for lent in self._lent:
            lent.fill_(torch.nan)
        self._lent.clear()

    def mark(self) -> Work:
        until = self._done + len(self._queue)

        def wait() -> None:
            self.waits += 1
            self._run(max(0, until - self._done))

        return wait

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._done += 1
            work = self._queue.popleft()
            if isinstance(work, (Tape, Again)):  # graphs compute where others have computed
                self._compute_over_what_was_lent()
            work()


class TapedStream(PlayedStream):
    """Captures as a GPU does: what is replayed knows nothing of the host."""

    def _recorded(self, work: Work) -> Work:
        tape = Tape()
        with tape:
            work()
        return tape


class Again:
    """Work that was captured."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self) -> None:
        self._work()


class Tape(TorchDispatchMode):
    """The operators that ran, with the memory that they read and wrote and the numbers that they were given: all that
    a captured graph knows. Called, it runs them again, and results come to where they were."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace in ("aten", "prims", "selective"), f"what this does on the host nobody knows: {func}"
        assert not waits_for_the_device(func, args), f"a captured step reads a number from the device: {func}"
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def __call__(self) -> None:
        for func, args, kwargs, found in self._calls:
            given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if is_tensor(old) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


aten = torch.ops.aten
# Operators that wait for the device on a GPU, since the host is to know a number, or how many there are; none can be
# captured. With an index of booleans, those of indices do, too. What copies to the host is seen by its caller alone.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.item}
WAITING |= {aten._unique2, aten.unique_dim, aten.unique_consecutive, aten._unique, aten.bincount}
WAITING |= {aten.unique_dim_consecutive, aten.argwhere, aten.nonzero_numpy, aten.allclose, aten.multinomial}
WAITING |= {aten._linalg_check_errors, aten.linalg_inv}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


def waits_for_the_device(func: Any, args: Sequence[Any]) -> bool:
    packet = func.overloadpacket
    if packet in INDEXING:
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return packet in WAITING or func in (aten.repeat_interleave.Tensor, aten.where.default)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
