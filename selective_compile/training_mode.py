"""Models that are asked for tokens between two steps of training, as by loops of reinforcement learning: in training
mode, which most decoders compute nothing else in.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from selective_compile.forks import lock_of_any_process
from selective_compile.model_call import logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of, unchanged
from selective_compile.same_logits import ids_for

# Modules that were in training mode, and how many blocks have them in the other: models may share some.
_held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_lock = lock_of_any_process()
_trial = lock_of_any_process()


def in_training(model: nn.Module) -> bool:
    """Whether any of its modules is, or would be but for `evaluated`."""
    with _lock:
        return any(module.training or module in _held for module in model.modules())


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Modules in training mode are in evaluation mode, each until the last of all blocks ends that threads are in.

    Only the flag changes: a `train` of a module's own, which may do more, is not called.
    """
    mine: list[nn.Module] = []
    try:
        with _lock:
            for module in model.modules():
                if module.training or module in _held:
                    mine.append(module)
                    _held[module] = _held.get(module, 0) + 1
                    module.training = False
        yield
    finally:
        with _lock:
            for module in mine:
                _held[module] -= 1
                if not _held[module]:
                    del _held[module]
                    module.training = True


def differs_in_training(model: nn.Module) -> bool:
    """Whether the modules that are in training mode make other logits than they would in evaluation mode: dropout that
    drops something, and what a run on some tokens shows, as noise on a router, or that it draws. What that leaves in
    the model, and in the generators of torch, numpy and Python, is gone afterwards.

    Raises:
        Exception: whatever the model raises.
    """
    with lock_of(model), _trial:
        with _lock:
            # Those of calls: whoever holds some has found that they do not differ, and no other trial is under way.
            if any(module in _held for module in model.modules()):
                return False
        if any(isinstance(module, _DropoutNd) and module.training and module.p > 0 for module in model.modules()):
            return True
        return _tried(model)


@torch.no_grad()
def _tried(model: nn.Module) -> bool:
    device = device_of(model)
    call, arguments = logits_call(model, ids_for(model))
    kinds: dict[str, Any] = {} if device.type == "cpu" else {"device_type": device.type}
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], **kinds), unchanged(model):
            before = _generators(device)
            trained = call(*arguments)
            if any(not torch.equal(*each) for each in zip(before, _generators(device), strict=True)):
                return True
            if random.getstate() != states[0]:
                return True
            with evaluated(model):
                return not torch.equal(trained, call(*arguments))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _generators(device: torch.device) -> list[torch.Tensor]:
    """What tells whether somebody has drawn."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    numbers: Any = np.random.get_state(legacy=False)
    drawn = torch.tensor([numbers["state"]["pos"]], dtype=torch.int64, device="cpu")
    return [torch.get_rng_state(), drawn, *own]
