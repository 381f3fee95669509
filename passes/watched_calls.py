"""Which operators a call runs, and what autocast casts for them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from selective_compile.unheard import unheard

aten = torch.ops.aten
ATTEMPTS = logging.getLogger("torch._subclasses.fake_tensor")  # where an operator that cannot run is an error
COPIES = (aten.clone.default, aten._unsafe_view.default)
Autocasts = tuple[tuple[Any, ...], ...]  # the arguments of `torch.autocast`, of the outermost first


@dataclass(frozen=True)
class Call:
    """An operator with all that it is given and gives, tensors by their types, but for what only moves numbers; and if
    it is nothing but a cast of what the watched call reads, of the how manieth and from which type to which."""

    told: str
    cast: tuple[int, torch.dtype, torch.dtype] | None


class Watch(TorchDispatchMode):
    """What runs while it is on: below autocast, where its casts are operators like others."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._sources: dict[int, tuple[Tensor, int]] = {}  # what is read, and what that is after moves: by its identity

    def give(self, number: int, value: Any) -> None:
        """The call is to read a value, by its number."""
        for each in tree_leaves(value):
            if isinstance(each, Tensor):
                self._sources[id(each)] = each, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        moves = func.is_view or func in COPIES
        _, number = self._sources.get(id(args[0]), (None, None)) if args else (None, None)
        cast = None
        if number is not None and moves:
            self.give(number, result)
        if number is not None and func is aten._to_copy.default and set(kwargs) == {"dtype"}:
            cast = number, args[0].dtype, result.dtype
        told = (tree_map(like if moves else typed, each) for each in (args, kwargs, result))
        self._calls.append(Call(str((func, *told)), cast))
        return result

    def calls(self, but: Mapping[int, torch.dtype] | None = None) -> list[str]:
        """All, without the casts of some of what is read to some type."""
        dropped = (but or {}).items()
        return [each.told for each in self._calls if each.cast is None or (each.cast[0], each.cast[2]) not in dropped]

    def casts(self) -> Iterator[dict[int, torch.dtype]]:
        """Those of what is read: all of them, and all that are of one type to another."""
        found = [each.cast for each in self._calls if each.cast is not None]
        yield {number: dtype for number, _, dtype in found}
        for pair in dict.fromkeys(each[1:] for each in found):
            yield {number: dtype for number, source, dtype in found if (source, dtype) == pair}


def typed(value: Any) -> Any:
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else value


def like(value: Any) -> Any:
    return value.dim() if isinstance(value, Tensor) else value


@contextmanager
def without_numbers(examples: Iterable[Any]) -> Iterator[None]:
    """Where tensors have no numbers, and sizes like those of ``examples``, which Dynamo made in several modes."""
    fakes = [each for each in tree_leaves(list(examples)) if isinstance(each, FakeTensor)]
    environment = fakes[0].fake_mode.shape_env if fakes else None
    fake = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    with unheard(ATTEMPTS), enable_python_dispatcher(), fake:  # without it some have no rule for symbolic sizes
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
