"""Steps of optimizers: fused ones change weights in place and PyTorch counts no change of them (`Tensor._version`)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Reader(Protocol):
    """Of weights that an optimizer may have: who looks at versions to tell whether they are as they were."""

    def tensors(self) -> Iterable[Tensor]: ...


_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def count_steps_for(reader: Reader) -> None:
    """From now on, and as long as there is a ``reader``, each step of an optimizer counts as a change of its tensors.

    Others' versions stay as they are: autograd looks at them, too.
    """
    _listen()
    _readers.add(reader)


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    read = {id(tensor) for reader in list(_readers) for tensor in reader.tensors()}
    changed = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) in read]
    torch.autograd.graph.increment_version([weight for weight in changed if not weight.is_inference()])
