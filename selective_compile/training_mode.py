"""Models that are asked for tokens between two steps of training, as by loops of reinforcement learning: in training
mode, which most decoders compute nothing else in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from selective_compile.forks import lock_of_any_process
from selective_compile.model_call import logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import unchanged
from selective_compile.same_logits import ids_for

_held: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()
_lock = lock_of_any_process()


class _Held:
    """Modules of a model that were in training mode, and how many calls have need of them as they are not."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if module.training]
        self.calls = 0

    def set(self, training: bool) -> None:
        for module in self.modules:
            module.training = training


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A model in training mode is in evaluation mode, until the last of all blocks ends that threads are in; then each
    of its modules is as it was.

    Only the flag changes: a `train` of a module's own, which may do more, is not called.
    """
    with _lock:
        held = _held.get(model)
        if held is None:
            held = _Held(model)
            if model.training:
                _held[model] = held
                held.set(False)
        held.calls += 1
    try:
        yield
    finally:
        with _lock:
            held.calls -= 1
            if not held.calls and _held.pop(model, None) is held:
                held.set(True)


@torch.no_grad()
def differs_in_training(model: nn.Module) -> bool:
    """Whether the modules that are in training mode make other logits than they would in evaluation mode: dropout that
    drops something, and what a run on some tokens shows, as noise on a router. What that leaves in the model, and in
    torch's generators, is gone afterwards.

    Raises:
        Exception: whatever the model raises.
    """
    if any(isinstance(module, _DropoutNd) and module.training and module.p > 0 for module in model.modules()):
        return True
    device = device_of(model)
    call, arguments = logits_call(model, ids_for(model))
    kinds: dict[str, Any] = {} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**(kinds or {"devices": []})), unchanged(model):
        trained = call(*arguments)
        with evaluated(model):
            return not torch.equal(trained, call(*arguments))
