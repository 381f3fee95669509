"""A batch manager of simulated engines, and the callbacks of a server that keeps everything."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from selective_compile.runtime import BatchManager, Engine, InferenceRequest, RequestProcessor
from selective_compile.runtime.stats import StepFloor, StepRecord
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine


class Client:
    """The callbacks of a server that keeps everything; `done` ids have had their last response."""

    def __init__(self) -> None:
        self.queue: deque[InferenceRequest] = deque()
        self.asked: list[int] = []
        self.parts: dict[Any, list[dict[str, Tensor]]] = {}
        self.errors: dict[Any, str] = {}
        self.done: list[Any] = []
        self.stops: set[Any] = set()
        self.stats: list[dict[str, Any]] = []
        self.on_response: Callable[[Any, bool], None] = lambda request_id, is_final: None

    def get(self, max_count: int) -> list[InferenceRequest]:
        self.asked.append(max_count)
        count = len(self.queue) if max_count < 0 else min(max_count, len(self.queue))
        return [self.queue.popleft() for _ in range(count)]

    def send(self, request_id: Any, tensors: dict[str, Tensor], is_final: bool, error: str) -> None:
        if error:
            assert is_final and not tensors
            self.errors[request_id] = error
        else:
            self.parts.setdefault(request_id, []).append(tensors)
        self.on_response(request_id, is_final)
        if is_final:
            self.done.append(request_id)

    def ask(self, request_id: Any, input_ids: Any = (1, 2, 3), streaming: bool = False, **options: Any) -> None:
        options.setdefault("max_new_tokens", 5)
        self.queue.append(
            InferenceRequest(request_id=request_id, input_ids=input_ids, streaming=streaming, options=options)
        )

    def wait(self, count: int) -> None:
        until(lambda: len(self.done) >= count, told=self.done)


def until(ready: Callable[[], object], *, told: object = None) -> None:
    """Wait for what another thread does; a test that waits for a minute has hung."""
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, told
        time.sleep(0.001)


def slow_from(step: int) -> Callable[[], None]:
    """A `before_run`: hundreds of further steps take so long that whoever ends a request on the way is in time."""
    steps = itertools.count()
    return lambda: time.sleep(0.01 if next(steps) >= step else 0)


def manage(client: Client, *programs: SimulatedProgram | None, **config: Any) -> BatchManager:
    """Of as many engines as there are programs, at least one."""
    limit = config.pop("max_active", None)
    engines = [simulated_engine(program, **config) for program in programs or [None]]
    engine = RequestProcessor(engines, routing="round_robin") if len(engines) > 1 else engines[0]

    def on_stats(text: str) -> None:
        client.stats.append(json.loads(text))

    def poll_stop() -> set[Any]:
        return set(client.stops)

    return BatchManager(engine, client.get, client.send, poll_stop, on_stats, max_active=limit, floor=least)


def least(record: StepRecord) -> StepFloor:
    return StepFloor(0.25 * record.seconds, "compute" if any(share.is_prefill for share in record.shares) else "memory")


def engines_of(manager: BatchManager) -> tuple[Engine, ...]:
    return manager._engine.engines if isinstance(manager._engine, RequestProcessor) else (manager._engine,)


def assert_nothing_left(manager: BatchManager) -> None:
    for engine in engines_of(manager):
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not engine._requests
        engine._scheduler.check()
    assert not manager._open and manager.num_active == 0 and not manager.alive


def tokens_of(prompt: list[int], **options: Any) -> list[int]:
    return expected_tokens(prompt, simulated_engine().submit(prompt, **options).params)


class Blocking(Client):
    """Its readers of these ids block until `reading` is set."""

    def __init__(self, *blocked: Any) -> None:
        super().__init__()
        self.blocked = blocked
        self.reading = threading.Event()
        self.on_response = self.block

    def block(self, request_id: Any, is_final: bool) -> None:
        if request_id in self.blocked:
            assert self.reading.wait(60)


class SlowIds(list[int]):
    """Token ids that take until `ready` to be read, as stop strings do for a large vocabulary."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.ready = threading.Event()

    def tolist(self) -> list[int]:
        assert self.ready.wait(60)
        return list(self)
