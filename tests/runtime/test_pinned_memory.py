"""What goes to a GPU and comes from it in a step lies in pinned memory: else its copies would wait, and the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from selective_compile.runtime.captured_inputs import CapturedMemory
from selective_compile.runtime.device_chooser import TURNS, DeviceChooser, Staged
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.graph_sizes import Size
from selective_compile.runtime.step_layout import StepMemory

GPU, SIZE = torch.device("cuda", 0), Size(tokens=4, requests=4, rows=4)
STREAM = DeviceStream()
MADE: dict[str, tuple[Callable[[torch.device], Any], int]] = {
    "inputs of captured steps": (
        lambda device: CapturedMemory(STREAM, [SIZE], num_tables=1, device=device, turns=TURNS),
        TURNS,
    ),
    "inputs of other steps": (lambda device: StepMemory(64, device, STREAM), 1),
    "staged": (lambda device: Staged(STREAM, (4,), torch.int64, device), 1),
    # Sources, slots, what tokens are drawn by, and the tokens that come back; and what of a request was seen.
    "choices": (
        lambda device: DeviceChooser(STREAM, device, token_budget=4, rows=4, slots=4, vocab_size=8, known_ids=8),
        4 * TURNS,
    ),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_memory_of_the_host_is_pinned_for_a_gpu(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[bool] = []
    zeros = torch.zeros

    def noted(*args: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        if device == "cpu":  # the host's, by its name; that which is given is a `torch.device`
            pinned.append(pin_memory)
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", noted)
    make, least = MADE[name]
    make(device)
    assert len(pinned) >= least and set(pinned) == {device is GPU}
