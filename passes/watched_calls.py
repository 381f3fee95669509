"""Which operators a call runs, and what autocast casts for them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from selective_compile.unheard import unheard

aten = torch.ops.aten
ATTEMPTS = logging.getLogger("torch._subclasses.fake_tensor")  # where an operator that cannot run is an error
COPIES = (aten.clone.default, aten._unsafe_view.default)
Autocasts = tuple[tuple[Any, ...], ...]  # the arguments of `torch.autocast`, of the outermost first
Cast = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Call:
    """An operator with all that it is given and gives, tensors by their types, but for what only moves numbers; and if
    it is nothing but a cast, from which type to which."""

    told: str
    cast: Cast | None


class Watch(TorchDispatchMode):
    """What runs while it is on: below autocast, where its casts are operators like others.

    ``given``: what a call reads, by its number; ``casts``: the first type that each of these is cast to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, Any] = {}
        self.casts: dict[int, torch.dtype] = {}
        self._calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        cast = (args[0].dtype, result.dtype) if func is aten._to_copy.default and set(kwargs) == {"dtype"} else None
        for number, each in self.given.items():
            if cast is not None and each is args[0]:
                self.casts.setdefault(number, result.dtype)
        told = like if func.is_view or func in COPIES else typed
        self._calls.append(Call(str((func, *(tree_map(told, each) for each in (args, kwargs, result)))), cast))
        return result

    def cast_from_to(self) -> set[Cast]:
        return {call.cast for call in self._calls if call.cast is not None}

    def calls(self, but: Container[Cast] = ()) -> list[str]:
        return [call.told for call in self._calls if call.cast is None or call.cast not in but]


def typed(value: Any) -> Any:
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else value


def like(value: Any) -> Any:
    return value.dim() if isinstance(value, Tensor) else value


@contextmanager
def without_numbers(examples: Iterable[Any]) -> Iterator[None]:
    """Where tensors have no numbers, and sizes like those of ``examples``, which Dynamo made in several modes."""
    fakes = [each for each in tree_leaves(list(examples)) if isinstance(each, FakeTensor)]
    environment = fakes[0].fake_mode.shape_env if fakes else None
    with unheard(ATTEMPTS), FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True):
        yield


def alike(example: Any) -> Any:
    """A tensor like it.

    Raises:
        ValueError: there is none, or its class has more than shape, strides and type.
    """
    if example is None or is_traceable_wrapper_subclass(example):
        raise ValueError(f"an example must be a plain tensor or a number, got {type(example).__name__}")
    if not isinstance(example, Tensor):
        return example
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)


@contextmanager
def autocasts(entered: Autocasts) -> Iterator[None]:
    """Where they were entered; of a device that is not there PyTorch would warn."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for device, dtype, enabled, _ in entered:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield
