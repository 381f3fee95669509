"""What `CudaStream` asks of `torch.cuda`, without a device: which work happens after which other work, by the rules of
streams and events alone."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.runtime.played_stream import Tape


class Recorded:
    """A stream: the work that is certain to be done before what comes into it next."""

    def __init__(self, cuda: RecordedCuda | None = None) -> None:
        self.done: set[str] = set()

    def wait_stream(self, other: Recorded) -> None:
        self.done |= other.done

    def wait_event(self, event: RecordedEvent) -> None:
        self.done |= event.done


class RecordedPools:
    """Memory of graphs, by the rules of torch's allocator; of a capture that has failed, torch 2.11 neither stops to
    record what is allocated nor lets go of the pool, 2.12 and 2.13 stop, and those of later do both.

    Attributes:
        recording: pools that what is allocated comes from.
        uses: how often each pool is held.
    """

    def __init__(self) -> None:
        self.release = (2, 13)
        self.recording: set[Any] = set()
        self.uses: Counter[Any] = Counter()
        self.handles: list[Any] = []

    def begin(self, pool: Any) -> None:
        self.uses[pool] += 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def let_go(self, device: int, pool: Any) -> None:
        assert self.uses[pool] > 0, "somebody else's graphs would lose their memory"
        self.uses[pool] -= 1
        self.uses += Counter()  # of those that are 0 nothing is left


class RecordedGraph:
    def __init__(self, pools: RecordedPools) -> None:
        self._pools = pools
        self._pool: Any = None
        self._holds = False
        self.ended = False
        self.done: Callable[[], None] = lambda: None

    def begin(self, pool: Any) -> None:
        self._pool = pool
        self._pools.begin(pool)
        self._holds = self._pools.release >= (2, 14)

    def end(self, *, invalid: bool) -> None:
        if not invalid or self._pools.release >= (2, 12):
            self._pools.end(0, self._pool)
        if invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._holds = self.ended = True

    def pool(self) -> Any:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        assert self.ended
        self.done()

    def reset(self) -> None:
        if self._holds:
            self._pools.let_go(0, self._pool)
        self._holds = self.ended = False

    def __del__(self) -> None:
        self.reset()


class RecordedCuda:
    """In the place of `torch.cuda`: work is done at once, and noted with all that was certain to be done before.

    Attributes:
        current: the thread's stream.
        before: for each work, what happens before it.
        reserved: bytes that torch has taken from the device.
        captures: what `torch.cuda.graph` was given.
        pools: of graphs.
        kept: tensors that captures leave alone, as all that a device captures without computing it; played, it is
            computed.
    """

    def __init__(self) -> None:
        self.current = self.default = Recorded()
        self.before: dict[str, set[str]] = {}
        self.reserved = 0
        self.captures: list[dict[str, Any]] = []
        self.kept: list[Tensor] = []
        self._host = Recorded()  # what it has waited for, and so happens before all that it does next
        self._streams = [self.current]
        self._copies: list[tuple[str, Tensor, Tensor]] = []
        self._capturing = self._invalid = False
        self.pools = RecordedPools()
        self.namespace = SimpleNamespace(cuda=self, as_tensor=_of_another, __version__="2.13.0+recorded")
        self.namespace._C = SimpleNamespace(_cuda_endAllocateToPool=self.pools.end, _cuda_releasePool=self.pools.let_go)

    def work(self, name: str, act: Callable[[], object] = lambda: None) -> Callable[[], None]:
        """What leaves a note of itself in the stream that it comes into."""

        def noted() -> None:
            self.current.wait_stream(self._host)
            self.before[name] = set(self.current.done)
            self.current.done.add(name)
            act()

        return noted

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Of memory that must not change before the host has waited for this."""
        name = f"copy {len(self.before)}"
        self.work(name, lambda: target.copy_(source))()
        self._copies.append((name, source, source.clone()))

    def of_release(self, major: int, minor: int) -> None:
        """Behave as that one of torch."""
        self.pools.release = major, minor
        self.namespace.__version__ = f"{major}.{minor}.0.dev1+recorded"

    def invalidate(self) -> None:
        """As what must not be done while a stream is captured, by this or by another thread."""
        self._invalid = self._capturing

    def rewritten(self) -> list[str]:
        """Copies whose source has changed since, of those that the host has not waited for before it looked."""
        return [name for name, source, values in self._copies if not torch.equal(source, values)]

    # What is asked of torch.cuda.

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools.handles.append((0, len(self.pools.handles) + 1))
        return self.pools.handles[-1]

    def Stream(self) -> Recorded:
        self._streams.append(Recorded())
        return self._streams[-1]

    def Event(self) -> RecordedEvent:
        return RecordedEvent(self)

    def CUDAGraph(self) -> RecordedGraph:
        return RecordedGraph(self.pools)

    def is_current_stream_capturing(self) -> bool:
        return self._capturing

    def current_stream(self) -> Recorded:
        return self.current

    def set_stream(self, stream: Recorded) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Recorded) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: RecordedGraph, *, stream: Recorded, **given: Any) -> Iterator[None]:
        """Where the work raises, the stream stays that of the capture, as it may with torch."""
        self.synchronize()
        self.captures.append(given)
        before, self.current, tape = self.current, stream, Tape()
        graph.begin(given["pool"])
        values = [tensor.clone() for tensor in self.kept]
        self._capturing, self._invalid = True, False
        try:
            with tape:
                yield
        finally:
            self._capturing = False
            graph.end(invalid=self._invalid)
        self.current = before
        for tensor, value in zip(self.kept, values, strict=True):
            tensor.copy_(value)
        graph.done = self.work(f"replay {len(self.captures)}", tape)

    def synchronize(self) -> None:
        for stream in self._streams:
            self.waited(stream.done)

    def memory_reserved(self) -> int:
        return self.reserved

    def empty_cache(self) -> None:
        self.reserved = 0

    def waited(self, done: set[str]) -> None:
        assert not [name for name in self.rewritten() if name in done], "memory changed before it was read"
        self._copies = [each for each in self._copies if each[0] not in done]
        self._host.done |= done


def _of_another(memory: Any, *, device: torch.device) -> Tensor:
    """In the place of `torch.as_tensor`: memory that its owner describes, without any part in keeping it."""
    described = memory.__cuda_array_interface__
    assert described["typestr"] == "|u1" and described["data"][1] is False, "torch refuses what is read only"
    (count,), (address, _) = described["shape"], described["data"]
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


class RecordedEvent:
    def __init__(self, cuda: RecordedCuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self.done = set(self._cuda.current.done)

    def synchronize(self) -> None:
        self._cuda.waited(self.done)
