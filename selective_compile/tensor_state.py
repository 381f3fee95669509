"""What tells that a tensor is another, or has other values, without a look at those."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_version = attrgetter("_version")


class States:
    """Identity, memory and in-place version of tensors at one time; two are equal only if they are one object.

    A tensor's memory is known by its address and by a weak reference: with an address alone, a tensor that was given
    other memory twice could be back where it was, as an allocator hands out first what was freed last.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._told = _told(tensors)
        self._memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if _has_memory(tensor)]
        self._references = [reference.cdata for reference in self._memory]

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether they are those of ``tensors``: then these are the same tensors, in the same memory.

        Their values are the same too, unless they were changed in a way that PyTorch does not count, as in place
        through ``.data``.  Tensors made in inference mode count no versions, and what is no tensor has neither.
        """
        return _told(tensors) == self._told and not any(map(torch.UntypedStorage._expired, self._references))


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was made of some of a graph's weights, and the ``states`` of these then.

    ``seen``: the states of all the graph's tensors when the weights were last found to have those.  ``weights`` are
    held so that nothing else can get the identity of one.
    """

    operands: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    states: States
    seen: States


def states(tensors: Sequence[Any], known: States | None = None) -> States:
    """``known`` if these are the states of ``tensors`` still, else others."""
    return known if known is not None and known.hold(tensors) else States(tensors)


def read_by_graphs(tensors: Sequence[Any], device: torch.device) -> list[int]:
    """What graphs that were captured on ``device`` hold of tensors that they read: addresses there; of the host's, of
    which there are single numbers, values as they were, told by address and version."""
    elsewhere = [each for each in tensors if isinstance(each, Tensor) and each.device.type != device.type]
    return [*map(address_of, tensors), *map(version_of, elsewhere)]


def class_of(tensor: Tensor) -> Hashable:
    """Which functions a tensor's class has of its own, as quantised weights' have: of weights and buffers `Tensor`."""
    kind = type(tensor)
    if kind in (Tensor, nn.Parameter, nn.Buffer):
        return Tensor
    whole: Any = tensor
    parts = whole.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(whole) else ()
    inner = [(name, getattr(whole, name)) for name in parts]
    return kind, *((name, class_of(part), part.dtype, part.shape) for name, part in inner)


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Its strides; none of a tensor that has none, as a sparse or a nested one."""
    return tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()


def _told(tensors: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    identities = list(map(id, tensors))
    try:  # in loops of C: a model has hundreds, and is asked before each step
        return identities, list(map(Tensor.data_ptr, tensors)), list(map(_version, tensors))
    except (RuntimeError, TypeError, AttributeError):
        return identities, list(map(address_of, tensors)), list(map(version_of, tensors))


def _has_memory(tensor: Any) -> bool:
    return address_of(tensor) != 0


def address_of(tensor: Any) -> int:
    try:
        return tensor.data_ptr() if isinstance(tensor, Tensor) else 0
    except RuntimeError:  # a subclass that only wraps others
        return 0


def version_of(tensor: Any) -> int:
    """How often it was written in place; one whose memory was made in inference mode does not count it."""
    try:
        return tensor._version if isinstance(tensor, Tensor) else 0
    except RuntimeError:
        return 0
