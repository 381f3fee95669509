"""What a forward leaves in a model: tensors in plain attributes and in buffers, kept apart from the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Tensors that lie in plain attributes of modules, neither weights nor buffers: by module and name.
State = dict[tuple[nn.Module, str], Tensor | None]


@contextmanager
def own_attributes(module: nn.Module, state: State) -> Iterator[State]:
    """Within, tensors in plain attributes of the modules are those of ``state``, or what they are at first if it is
    empty; what they are at the end is put into what this yields, and then they are again what they were."""
    own = plain_tensors(module)
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    put(state or {place: None if tensor is None else tensor.clone() for place, tensor in own.items()})
    left: State = {}
    try:
        yield left
    finally:
        left.update(plain_tensors(module))
        take_out(left.keys() - own.keys())
        put(own)
        for part, tensors in buffers:
            part._buffers.clear()
            part._buffers.update(tensors)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within, ``model`` may be run; what that writes into plain attributes and buffers is gone afterwards."""
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with own_attributes(model, {}):
        yield
    for buffer, value in values:
        if not torch.equal(buffer, value):  # one that is as it was keeps its version: compiled programs watch it
            buffer.copy_(value)


def plain_tensors(model: nn.Module) -> State:
    """Every plain attribute of a module that is a tensor, or nothing yet."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, Tensor)
    }


def put(state: State) -> None:
    for (module, name), tensor in state.items():
        setattr(module, name, tensor)


def take_out(places: Iterable[tuple[nn.Module, str]]) -> None:
    for module, name in places:
        delattr(module, name)
