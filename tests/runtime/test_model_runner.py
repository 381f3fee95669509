"""What the model runner gives to a device that is only played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selective_compile.runtime import StepError
from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.model_runner import ModelRunner
from selective_compile.runtime.request_state import RequestState
from selective_compile.step import Reach
from selective_compile.step_program import CallSite, StateSite
from tests.runtime.engine_checks import expect, run_until_idle
from tests.runtime.played_stream import INDEXING, PlayedStream
from tests.runtime.simulated import CPU, SimulatedProgram, simulated_engine


class SentStream(PlayedStream):
    """Keeps what was sent: all else that a device is given without waiting is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor] = []

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        self.sent.append(values.clone())
        return self.sent[-1]


class Indexed(TorchDispatchMode):
    """Within, what memory of the device is indexed with has been sent: a list of numbers would be copied, and waited
    for, each time that it is used."""

    def __init__(self, stream: SentStream, runner: ModelRunner) -> None:
        super().__init__()
        self.stream, self.seen = stream, 0
        pools = [*runner._states, *(pool for pair in runner._pools for pool in pair)]
        self.memory = {pool.data_ptr() for pool in pools}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in INDEXING and args[0].data_ptr() in self.memory:
            self.seen += 1
            places = {tensor.untyped_storage().data_ptr() for tensor in self.stream.sent}
            assert all(index.untyped_storage().data_ptr() in places for index in args[1] if index is not None), func
        return func(*args, **(kwargs or {}))


def simulated_runner(stream: PlayedStream, *, states: bool = True, **config: Any) -> ModelRunner:
    """Of pools for two reaches, two calls each, and of two states."""
    program: Any = SimulatedProgram()
    sizes = {"num_query_heads": 1, "num_kv_heads": 1, "key_head_size": 1, "value_head_size": 2}
    program.call_sites = tuple(
        CallSite(name=f"call {place}", **sizes, window=window, dtype=torch.float64, device=CPU)
        for place, window in enumerate((0, 8, 0, 8))
    )
    program.state_sites = tuple(
        StateSite(name=name, shape=(2,), dtype=torch.float64, device=CPU) for name in ("state 0", "state 1") if states
    )
    runner = simulated_engine(program, stream=stream, max_kv_tokens=32, block_size=4, **config)._runner
    assert [reach.window for reach in runner.num_blocks] == [0, 8] and isinstance(next(iter(runner.num_blocks)), Reach)
    return runner


def test_places_of_blocks_that_are_copied_are_sent_once_for_each_table() -> None:
    stream = SentStream()
    runner = simulated_runner(stream)
    for pair in runner._pools:
        for pool in pair:
            pool.copy_(torch.arange(len(pool)).double().view(-1, 1, 1, 1).expand_as(pool))
    copies = [BlockCopy(table, source, block) for source, block in ((0, 1), (2, 3), (0, 4)) for table in (0, 1)]
    with Indexed(stream, runner) as indexed:
        runner.copy(copies)
    assert len(stream.sent) == 2 and indexed.seen == 2 * 8
    for pair in runner._pools:
        assert all(pool[:6, 0, 0, 0].tolist() == [0, 0, 2, 2, 0, 5] for pool in pair)


def test_places_of_blocks_that_go_to_the_host_and_back_are_sent_once_for_each_table() -> None:
    stream = SentStream()
    runner = simulated_runner(stream, states=False, host_kv_bytes=2**14)
    for pair in runner._pools:
        for pool in pair:
            pool.copy_(torch.arange(len(pool)).double().view(-1, 1, 1, 1).expand_as(pool))
    out = [Copy(True, table, block, slot) for table in (0, 1) for block, slot in ((1, 0), (2, 3), (1, 2))]
    back = [Copy(False, table, block, slot) for table in (0, 1) for block, slot in ((0, 3), (4, 0), (3, 2))]
    with Indexed(stream, runner) as indexed:
        runner.copy([*out, *back])
    assert len(stream.sent) == 4 and indexed.seen == 2 * 8 and stream.left == 0
    for pair in runner._pools:
        assert all(pool[:6, 0, 0, 0].tolist() == [2, 1, 2, 1, 1, 5] for pool in pair)


def test_slots_of_states_that_requests_go_on_from_are_sent_once() -> None:
    stream = SentStream()
    runner = simulated_runner(stream)
    states = [RequestState(number, number, [1], max_new_tokens=4) for number in range(3)]
    slots = runner._slots.of(states)
    for pool in runner._states:
        pool[slots] = torch.arange(3.0).double()[:, None].expand(3, 2)
    with Indexed(stream, runner) as indexed:
        runner.go_on_from(states, [states[1], states[0], states[0]])
    assert len(stream.sent) == 1 and indexed.seen == 2 * 2
    for pool in runner._states:
        assert pool[slots][:, 0].tolist() == [1, 0, 0]


def test_requests_go_on_from_what_steps_on_their_way_leave() -> None:
    stream = PlayedStream()
    runner = simulated_runner(stream)
    states = [RequestState(number, number, [1], max_new_tokens=4) for number in range(2)]
    source, target = runner._slots.of(states)
    (pool, _), order = runner._states, []
    stream.enqueue(lambda: pool[source].fill_(7.0))
    runner.program.go_on_from = lambda *given: order.append(stream.left)  # type: ignore[method-assign]
    runner.go_on_from([states[1]], [states[0]])
    stream.call(lambda: None)
    assert pool[target].tolist() == [7.0, 7.0] and order == [0]


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("fails_there", [False, True])
def test_a_failed_step_is_waited_for_before_its_blocks_are_anybodys(captures: bool, fails_there: bool) -> None:
    """Whether it fails on the host, with a part of it on the device, or there."""
    stream = PlayedStream(captures=captures)
    engine = simulated_engine(SimulatedProgram(captured=captures), stream=stream, block_size=2, max_kv_tokens=64)
    doomed = engine.submit([1, 2, 3], max_new_tokens=9)
    engine.step()
    copy, left = stream.copy, []

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def copy_to_the_host(target: Tensor, source: Tensor) -> None:
        if source.data_ptr() != engine._runner._chooser.last.data_ptr():
            return copy(target, source)
        if not fails_there:
            raise MemoryError("no more")
        stream.enqueue(fail)
        return fail()

    leave = engine._roster.leave

    def leaving(request: Any) -> None:
        left.append(stream.left)
        leave(request)

    stream.copy, engine._roster.leave = copy_to_the_host, leaving  # type: ignore[method-assign]
    with pytest.raises(StepError, match="illegal memory access" if fails_there else "no more"):
        engine.step()
    stream.copy = copy  # type: ignore[method-assign]
    assert doomed.finish_reason == "error" and left == [0]
    request = engine.submit([1, 2, 3], max_new_tokens=5)
    run_until_idle(engine)
    expect(request)
