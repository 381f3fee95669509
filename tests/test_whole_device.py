"""What concerns the whole device is done by one thread at a time, and others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from selective_compile import joined_weights
from selective_compile.joined_weights import JoinedWeights
from selective_compile.runtime import device_stream, model_runner
from selective_compile.runtime.device_stream import CudaStream, DeviceStream
from selective_compile.tensor_state import states
from selective_compile.whole_device import ALONE
from tests.runtime.recorded_cuda import RecordedCuda
from tests.runtime.simulated import simulated_engine

CPU = torch.device("cpu")


def others_wait() -> bool:
    """Whether another thread would have to, if it came now."""
    found: list[bool] = []

    def come() -> None:
        found.append(not ALONE.acquire(blocking=False))
        if not found[0]:
            ALONE.release()

    thread = threading.Thread(target=come)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("what", ["capture", "peak_bytes"])
def test_others_wait_for_a_capture_and_for_who_measures_memory(
    what: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_stream, "torch", RecordedCuda().namespace)
    stream, waited = CudaStream(CPU), []

    def work() -> None:
        waited.append(others_wait())
        if fails:
            raise RuntimeError("no more")

    assert not others_wait()
    try:
        stream.capture(work, []) if what == "capture" else stream.peak_bytes(work)
    except RuntimeError:
        assert fails
    assert waited and all(waited) and not others_wait()


def test_others_wait_until_weights_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, joined = [], joined_weights.joined

    def noted(*arguments: Any) -> Any:
        waited.append(others_wait())
        return joined(*arguments)

    monkeypatch.setattr(joined_weights, "joined", noted)
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    JoinedWeights([(0, 1)]).gather(weights, states(weights))
    assert waited == [True] and not others_wait()


@pytest.mark.parametrize("kind", [CudaStream, DeviceStream])
def test_others_wait_until_an_engine_has_taken_the_memory_that_it_found_free(
    kind: type[DeviceStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the device's own: that of the host others take, too, whoever waits."""
    monkeypatch.setattr(device_stream, "torch", RecordedCuda().namespace)
    waited: dict[str, bool] = {}

    def noted(name: str) -> None:
        function = getattr(model_runner, name)

        def called(*arguments: Any, **given: Any) -> Any:
            waited.setdefault(name, others_wait())  # the first: the second may be of memory of the host
            return function(*arguments, **given)

        monkeypatch.setattr(model_runner, name, called)

    names = ("num_slots", "num_blocks", "allocate_pools", "allocate_states")
    for name in names:
        noted(name)
    simulated_engine(stream=kind(CPU) if kind is CudaStream else kind(), cuda_graphs=False)
    assert waited == dict.fromkeys(names, kind is CudaStream) and not others_wait()


@pytest.mark.parametrize("change", ["nothing", "values"])
def test_who_moves_no_weights_waits_for_nobody(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine whose weights have other values in the same memory: its requests would wait, too."""
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    joined = JoinedWeights([(0, 1)])
    joined.gather(weights, states(weights))
    if change == "values":
        with torch.no_grad():
            weights[1].fill_(3.0)
    seen = states(weights)

    @contextmanager
    def taken() -> Iterator[None]:
        raise AssertionError("it would wait for another engine")
        yield

    monkeypatch.setattr(joined_weights, "ALONE", taken())
    joined.gather(weights, seen)
    (operand,) = joined.of(weights, seen)
    assert operand is joined.of(weights, seen)[0], "it is not kept"
    assert torch.equal(operand, torch.cat([weight.detach() for weight in weights]))


def test_weights_that_are_moved_while_somebody_looks_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    values = torch.cat([weight.detach() for weight in weights])
    JoinedWeights([(0, 1)]).gather(weights, states(weights))
    over, moved = joined_weights.over, []

    def moving(group: Any) -> torch.Tensor:
        found = over(group)
        if not moved:
            for weight in weights:
                moved.append(weight.data)
                weight.data = weight.data.clone()
        return found

    monkeypatch.setattr(joined_weights, "over", moving)
    joined = JoinedWeights([(0, 1)])
    joined.gather(weights, states(weights))
    (operand,) = joined.of(weights, states(weights))
    assert operand.data_ptr() == weights[0].data_ptr() != moved[0].data_ptr() and torch.equal(operand, values)


def test_who_has_the_device_alone_may_ask_for_it_again() -> None:
    """As an engine that is made while another one's work is measured, in one thread."""
    with ALONE, ALONE:
        assert others_wait()
    assert not others_wait()
