"""The order in which a device does what it is given: at once on a CPU, and some time later on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from selective_compile.whole_device import ALONE

Work = Callable[[], object]
T = TypeVar("T")
# From this torch on a graph lets go of its pool though its capture has failed: to do it, too, would take the memory of
# other graphs.
GRAPHS_LET_GO = (2, 14)
# Of what else goes on in a process, as its garbage, little comes in each of so many times.
TRIES = 3


class DeviceStream:
    """Of a CPU: what is enqueued is done when `enqueue` returns.

    Attributes:
        separate: what the device reads has to be copied from the host's memory, which must not change until then.
        captures: work can be captured, to be done again later without the host.
    """

    separate = False
    captures = False

    def enqueue(self, work: Work) -> None:
        """Have it done after all that was enqueued before; it must not wait for the device."""
        work()

    def call(self, work: Callable[[], T]) -> T:
        """As `enqueue`; its result, which is a tensor that may be on its way."""
        return work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between memory of the host, pinned, and of the device."""
        self.enqueue(lambda: _copy(target, source))

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        """On the device, values that must not change any more: maybe no copy. Nothing waits for it."""
        return values.to(device)

    def aside(self) -> AbstractContextManager[object]:
        """What is given to the device within comes behind what the host has last waited for, behind what else the
        device was given before the next work was enqueued, and behind what came so before; not behind that next work:
        to read of it waits for no more. For code of the user's."""
        return nullcontext()

    def capture(self, work: Work, keep: Sequence[Tensor]) -> Work:
        """What does the same again, on the same memory, when it is enqueued.

        The work is done now, too, before that and after all that was enqueued, so that whatever it needs is compiled.

        Args:
            keep: tensors that it writes, and that have their values of before afterwards, also where it raises.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        raise NotImplementedError("the device captures nothing")

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives a tensor that work has computed to the host, once that is done; where the work is captured,
        whenever it has been done again, until other captured work is. No memory is kept for it there."""
        return lambda: tensor

    def alone(self) -> AbstractContextManager[object]:
        """What memory is found free within is so until it is taken, also where engines are made in several threads;
        where it is the host's, nobody waits: others use that, too."""
        return nullcontext()

    def peak_bytes(self, work: Work) -> int:
        """Memory of its own that the device takes for work while it is done; 0 where that is the host's, which others
        use, too: then it is not done."""
        return 0

    def seconds(self, work: Work) -> tuple[float, float]:
        """From when the host begins, how long it takes to give work to the device, and how long until that has done it;
        of several times the shortest, after one that compiles."""
        self.enqueue(work)
        tries = [self._timed(work) for _ in range(TRIES)]
        return min(given for given, _ in tries), min(done for _, done in tries)

    def _timed(self, work: Work) -> tuple[float, float]:
        self.mark()()
        began = time.perf_counter()
        self.enqueue(work)
        given = time.perf_counter()
        self.mark()()
        return given - began, time.perf_counter() - began

    def mark(self) -> Work:
        """What waits until all that has been enqueued is done."""
        return _nothing


class CudaStream(DeviceStream):
    """Of a CUDA or ROCm device: kernels and copies queue up in the thread's current stream, and the host goes on.

    All that an engine gives to the device is done in the order in which it came, also where threads take turns that
    have streams of their own (`_follow`). That is why the host may plan ahead of what it knows:

    - A block that a request gives back while a step that writes to it is on its way belongs to somebody else at once:
      whatever that one writes comes later, and nobody reads a slot before it is written in that order.
    - Memory on the device that each step reads anew (inputs, changes of block tables, the last tokens, what graphs
      compute in) is there once: what is written for the next step comes after what the last one reads.
    - Memory on the host has no such order. What the device reads or writes there is there `TURNS` times, and written
      again when the host has waited for the step before the last.
    """

    separate = True
    captures = True
    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device  # kernels are launched on the thread's current one
        with torch.cuda.device(device):
            # Graphs take turns, so that they can share what they compute in.
            self._memory = torch.cuda.graph_pool_handle()
            self._beside = torch.cuda.Stream()
            self._aside = torch.cuda.Stream()
            # What is made beside this, as the zeros of pools, is made in this thread; steps may run in another.
            self._last = torch.cuda.current_stream()
        self._marked: Mark | None = None  # the last mark, if nothing has come since
        self._waited: Mark | None = None

    def enqueue(self, work: Work) -> None:
        self.call(work)

    def call(self, work: Callable[[], T]) -> T:
        with torch.cuda.device(self._device):
            self._follow()
            return work()

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        # From memory that is not pinned, the copy would begin when all before it is done, and the host wait for that.
        # torch keeps the pinned copy until it has been read.
        return self.call(lambda: values.pin_memory().to(device, non_blocking=True))

    @contextmanager
    def aside(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            if self._waited is None or self._waited.next is None:
                self._follow()
                self._aside.wait_stream(torch.cuda.current_stream())
            else:
                self._aside.wait_event(self._waited.next)
            with torch.cuda.stream(self._aside):
                yield

    def _follow(self) -> None:
        """What comes now is behind what came before, in whatever stream that was."""
        current = torch.cuda.current_stream()
        if self._last != current:
            current.wait_stream(self._last)
        self._last = current
        if self._marked is not None:
            self._marked.next = torch.cuda.Event()
            self._marked.next.record()
            self._marked = None

    def capture(self, work: Work, keep: Sequence[Tensor]) -> Work:
        with torch.cuda.device(self._device), ALONE:
            self._follow()
            torch.cuda.synchronize()
            kept = [tensor.clone() for tensor in keep]
            before = torch.cuda.current_stream()
            self._beside.wait_stream(before)
            try:
                with torch.cuda.stream(self._beside):
                    work()
            finally:
                before.wait_stream(self._beside)
                for tensor, values in zip(keep, kept, strict=True):
                    tensor.copy_(values)
            try:
                graph = self._graph(work)
            finally:
                torch.cuda.set_stream(before)  # where torch fails to end a capture, it stays in its stream
        return graph.replay

    def _graph(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        began = False
        raised: BaseException | None = None
        try:
            # Not the stream that torch has for captures, which is of the device that captured first. Other threads, of
            # the user's, may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._beside, capture_error_mode="thread_local"):
                began = True
                try:
                    work()
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:
            self._leave_pool(graph, began=began)
            # At the end the device says no more than that one was; of what is no error, as Ctrl-C, it knows nothing.
            if isinstance(error, RuntimeError) and raised is not None and _tells_more(raised):
                raise raised from None
            raise
        finally:
            raised = None  # or it would be held by a frame that it holds, with all that the work holds
        return graph

    def _leave_pool(self, graph: torch.cuda.CUDAGraph, *, began: bool) -> None:
        """A capture has failed: what torch leaves of it would take what others allocate, and hold the pool for ever."""
        try:
            graph.pool()
            ended = True  # where Python alone has failed: then the graph lets go of the pool when it goes
        except RuntimeError:
            ended = False
        device, pool = torch.cuda.current_device(), self._memory
        with suppress(RuntimeError):  # from torch 2.12 on this is done already
            torch._C._cuda_endAllocateToPool(device, pool)
            began = True
        if began and not ended and _release() < GRAPHS_LET_GO:
            torch._C._cuda_releasePool(device, pool)
        graph.reset()
        # In torch 2.11 the host's allocator, which nobody can tell to stop, goes on to ask the graph whether memory is
        # its own; that is also why the pool is not used again.
        self._failed.append(graph)
        self._memory = torch.cuda.graph_pool_handle()

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        # Kept as it is, it would be memory that no other graph can compute in.
        return Lent(tensor).tensor if torch.cuda.is_current_stream_capturing() else super().lend(tensor)

    def alone(self) -> AbstractContextManager[object]:
        return ALONE

    def peak_bytes(self, work: Work) -> int:
        with torch.cuda.device(self._device), ALONE:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # or the work would be given what lies there
            # What torch takes from the device it keeps until it is told to, so that this tells the peak, and the user's
            # own statistics of peaks are left alone.
            before = torch.cuda.memory_reserved()
            work()
            torch.cuda.synchronize()
            taken = torch.cuda.memory_reserved() - before
            torch.cuda.empty_cache()  # or what the work has left would not count as free
            return taken

    def mark(self) -> Work:
        with torch.cuda.device(self._device):
            self._follow()
            mark = Mark(torch.cuda.Event())
            mark.event.record()
        self._marked = mark

        def wait() -> None:
            mark.event.synchronize()
            self._waited = mark

        return wait


@dataclass
class Mark:
    """`event`: after the work that was enqueued before.  `next`: before what was enqueued then, if anything was, and
    after what the user's code has given to that stream in between."""

    event: torch.cuda.Event
    next: torch.cuda.Event | None = None


class Lent:
    """The memory of a tensor that belongs to a captured graph, as the CUDA array interface describes it (version 3, in
    Numba's documentation), by which torch takes memory that is another's."""

    def __init__(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device).view(self._dtype).as_strided(*self._layout)


def stream_of(device: torch.device) -> DeviceStream:
    return CudaStream(device) if device.type == "cuda" else DeviceStream()


def _tells_more(raised: BaseException) -> bool:
    return isinstance(raised, RuntimeError) or not isinstance(raised, Exception)


def _release() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _nothing() -> None:
    pass
