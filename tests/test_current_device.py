"""Kernels are launched on the thread's current device, and so that has to be the model's, whatever the user's is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile import current_device, isolation, isolation_trial, padded_program, prefix_trial, step_program
from selective_compile.backend import compile_step_program
from selective_compile.current_device import on, on_device_of
from tests.exactness import fast
from tests.models import tiny
from tests.padded_calls import IDS, MASK
from tests.prefix_models import prefix_model
from tests.test_isolation import Decay, Mixed

GPU = torch.device("cuda", 1)
CONFIG = sc.EngineConfig(compile=False)


class Current:
    """In the place of `torch.cuda.device`, and of what enters it.

    Attributes:
        devices: that have been made current, the innermost last.
        seen: for each call that was watched, what was current then.
    """

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.seen: dict[str, list[Any]] = {}

    @contextmanager
    def __call__(self, device: Any) -> Iterator[None]:
        self.devices.append(device)
        try:
            yield
        finally:
            self.devices.pop()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.setdefault(function.__name__, []).append(self.devices[-1] if self.devices else None)
            return function(*args, **kwargs)

        return call


def test_a_gpu_is_made_current_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Current()
    monkeypatch.setattr(torch.cuda, "device", current)
    with on(GPU):
        assert current.devices == [GPU]
    with on(torch.device("cpu")), on_device_of(nn.Linear(2, 2)), on_device_of(nn.Identity()), on_device_of(5):
        assert current.devices == []
    monkeypatch.setattr(current_device, "device_of", lambda model: GPU)
    with on_device_of(nn.Linear(2, 2)):
        assert current.devices == [GPU]


@pytest.mark.parametrize(
    ("make", "trials"),
    [
        (
            lambda: Mixed(Decay),
            [(isolation, "buffers_written"), (isolation_trial, "in_steps"), (isolation, "one_token_refusal")],
        ),
        (
            lambda: prefix_model(5),
            [(prefix_trial, "both"), (prefix_trial, "by_program"), (isolation, "handed_refusal")],
        ),
    ],
    ids=["isolated", "prefix"],
)
def test_models_are_tried_where_they_are(
    make: Callable[[], Any], trials: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    current, model = Current(), make()
    monkeypatch.setattr(isolation, "on_device_of", current, raising=False)
    for module, name in trials:
        monkeypatch.setattr(module, name, current.watched(getattr(module, name)))
    compile_step_program(model, CONFIG)
    assert sorted(current.seen) == sorted(name for _, name in trials)
    assert all(device is model for devices in current.seen.values() for device in devices)
    assert not current.devices


def test_padded_calls_run_where_their_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without Inductor, whose code sees to it by itself."""
    current, model = Current(), tiny("llama")
    compiled = padded_program.compiled
    monkeypatch.setattr(padded_program, "on", current, raising=False)
    monkeypatch.setattr(padded_program, "compiled", lambda flat, **options: current.watched(compiled(flat, **options)))
    with torch.no_grad():
        fast(model)(IDS, attention_mask=MASK)
    assert list(current.seen.values()) == [[torch.device("cpu")]] and not current.devices


def test_scales_are_measured_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Current()
    monkeypatch.setattr(step_program, "on", current, raising=False)
    monkeypatch.setattr(step_program, "measure_scales", current.watched(step_program.measure_scales))
    compile_step_program(tiny("llama"), sc.EngineConfig(compile=False, kv_dtype="fp8"))
    assert current.seen == {"measure_scales": [torch.device("cpu")]} and not current.devices
