"""The device that kernels are launched on: the thread's current one, whatever device their tensors are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from selective_compile.model_facts import device_of


def on(device: torch.device) -> AbstractContextManager[object]:
    """Within, kernels are launched on this device; of a CPU, nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_device_of(model: object) -> AbstractContextManager[object]:
    """As `on`, for where a model's weights are; of what is none, nothing changes."""
    return on(device_of(model)) if isinstance(model, nn.Module) else nullcontext()
