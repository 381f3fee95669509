"""A decode step in which the host reads what it computes from the device's memory is told, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.engine_checks import expect, run_until_idle
from tests.runtime.simulated import simulated_engine
from tests.runtime.watched_stream import Kernels, WatchedStream

# Of the last tokens, which are the device's; each has the host wait for a GPU.
READING: dict[str, Callable[[Tensor], object]] = {
    "a sum's item": lambda last: last.sum().item(),
    "an if": lambda last: 1 if last[0] > 3 else 0,
    "any": lambda last: bool(torch.any(last > 3)),
    "Python's max": lambda last: max(last),
    "what was made of two": lambda last: torch.stack([last, last + 1]).tolist(),
    "a copy by torch.tensor": lambda last: torch.tensor(last).tolist(),
    "a slice": lambda last: last[: last[0].clamp(0, 2)],
    "a range": lambda last: torch.arange(last[0].clamp(0, 2)),
    "a value to fill with": lambda last: torch.full((2,), last[0]),
    "a factor": lambda last: torch.add(last, last, alpha=last[0]),
    "a list's numbers": lambda last: torch.tensor([last[0], 1]),
    "an array's numbers": lambda last: np.array([last[0], last[1]]),
    "where": lambda last: torch.where(last > 3),
    "argwhere": lambda last: torch.argwhere(last),
    "booleans": lambda last: last[last + 1 > 3],
    "unique_consecutive": lambda last: torch.unique_consecutive(last),
    "bincount": lambda last: torch.bincount(last.clamp(0)),
    "repeat_interleave": lambda last: torch.repeat_interleave(last.clamp(0, 3)),
    "multinomial": lambda last: torch.multinomial(torch.ones_like(last).float(), 1),
    "allclose": lambda last: torch.allclose(last, last + 1),
    "a type's name": lambda last: last.type("torch.LongTensor"),
    "a type": lambda last: last.float().type(torch.LongTensor),
    "repr": lambda last: repr(last + 1),
    "format": lambda last: f"{last[0]}",
    "dlpack": lambda last: np.from_dlpack(last),
    "inv": lambda last: torch.linalg.inv(torch.diag(last.float() + 1e3)),
    "to the host": lambda last: last.to("cpu"),
    "to the host behind it": lambda last: last.to("cpu", non_blocking=True),
    "to another's place": lambda last: last.to(torch.zeros(2)),
    "as the host's": lambda last: torch.as_tensor(last, device="cpu"),
    "copied to its like": lambda last: torch.empty_like(last, device="cpu").copy_(last),
    "numbers beside it": lambda last: last.new_tensor([1, 2]),
}
HOST = torch.arange(2)
# Those wait for nothing; in work, all that is computed is the device's.
STAYING: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda last: None,
    "a sum": lambda last: torch.where(last > 3, last, last.sum()).float() @ torch.ones_like(last).float(),
    "an index": lambda last: last[(last + 1).clamp(0, 1)],
    "a number to fill with": lambda last: torch.zeros_like(last).fill_(last[0]),
    "a tensor of one": lambda last: torch.tensor(last) + last.new_tensor(last) + last.new_zeros(last.shape),
    "a type": lambda last: last.type(torch.float32),
    "its type's name": lambda last: last.type(),
    "pieces": lambda last: list(last + 1),
    "sizes": lambda last: last.shape[0] + len(last + 1) + (last + 1).stride(0),
    "the host's numbers": lambda last: bool((HOST + 1 > 1).any()) and HOST.sum().item() and repr(HOST),
    "the host's like": lambda last: torch.zeros_like(last, device="cpu").tolist(),
}
BACK = torch.zeros(2, dtype=torch.int64)
BLOCKING: dict[str, Callable[[Any, Tensor], object]] = {
    "a list": lambda stream, last: last[[0, 1]],
    "a list among others": lambda stream, last: last[None][:, [0, 1]],
    "numpy's numbers": lambda stream, last: last[np.array([0, 1])],
    "a host tensor": lambda stream, last: last[HOST],
    "a range that does not say where": lambda stream, last: last[torch.arange(2)],
    "put by a list": lambda stream, last: last.__setitem__([7], 0),
    "put by a host tensor": lambda stream, last: last.index_put_((HOST,), last[:2].clone()),
    "put from the host": lambda stream, last: last.__setitem__(slice(6, 8), HOST),
    "made there": lambda stream, last: torch.tensor([1, 2], device=last.device),
    "made there of an array": lambda stream, last: torch.as_tensor(np.arange(2), device=last.device),
    "brought there": lambda stream, last: HOST.to(last.device),
    "brought to its like": lambda stream, last: HOST.to(last),
    "copied there": lambda stream, last: last[6:8].copy_(HOST),
    "copied from there": lambda stream, last: BACK.copy_(last[:2]),
    "not pinned": lambda stream, last: stream.copy(HOST.clone(), last[:2]),
}


def reads(
    captures: bool, place: str, look: Callable[[Any, Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Of a decode step that ends so: behind its launch, or in the work that the device was given."""
    stream = WatchedStream(captures=captures)
    with stream.built():
        engine = simulated_engine(Kernels(stream, captured=captures), stream=stream, max_requests=8)
    requests = [engine.submit([1, 2, 3 + n], max_new_tokens=9) for n in range(2)]
    for _ in range(4):
        engine.step()
    owner: Any = {"launch": engine._runner, "choose": engine._runner._chooser}[place]
    original = getattr(owner, place)
    looked = []

    def looking(*arguments: Any) -> Any:
        found = original(*arguments)
        look(stream, engine._runner._chooser.last)
        looked.append(place)
        return found

    monkeypatch.setattr(owner, place, looking)
    with stream.watched():
        for _ in range(2):
            engine.step()
    monkeypatch.undo()
    assert looked, "nobody came there"
    run_until_idle(engine)
    for request in requests:
        expect(request)
    return stream.reads


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize(("captures", "place"), [(False, "launch"), (False, "choose"), (True, "choose")])
@pytest.mark.parametrize("sabotage", READING)
def test_what_is_computed_from_the_device_is_the_devices(
    captures: bool, place: str, sabotage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads(captures, place, lambda stream, last: READING[sabotage](last), monkeypatch)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("place", ["launch", "choose"])
@pytest.mark.parametrize("look", STAYING)
def test_what_waits_for_nothing_is_not_told(place: str, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_host = look == "the host's numbers"
    assert bool(reads(False, place, lambda stream, last: STAYING[look](last), monkeypatch)) == (
        of_host and place == "choose"
    )


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("place", ["launch", "choose"])
@pytest.mark.parametrize("sabotage", BLOCKING)
def test_a_decode_step_in_which_the_host_would_wait_for_a_copy_is_told(
    captures: bool, place: str, sabotage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads(captures, place, BLOCKING[sabotage], monkeypatch)
