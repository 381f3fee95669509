"""What a forward leaves in a model: plain attributes of its modules and buffers, kept apart from the model's own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from selective_compile.tensor_state import class_of

MACHINERY: Final = frozenset(vars(nn.Module()))  # hooks, parameters, modules: of every module, and no state
FLAGS: Final = (bool, int, float, str)
GONE: Final = object()
NO_STATE: Final = (
    nn.Module,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    torch.dtype,
    torch.device,
)

Place = tuple[nn.Module, Literal["attribute", "buffer"], str]
# What is other than the model's own, or may be: an attribute or buffer that a run has set, taken out (`GONE`), or might
# have changed where it is, as a list or a tensor.
State = Mapping[Place, Any]


@contextmanager
def own_attributes(module: nn.Module, state: State, written: Collection[Place] = ()) -> Iterator[dict[Place, Any]]:
    """Within, attributes and buffers of the modules are those of ``state``, where it has them; what they are at the end
    is put into what this yields, as far as it may be another, and then they are again what they were.

    Tensors and containers of the model's own are copies meanwhile, and so are buffers at ``written``: others must not
    be changed in place.  If a run changes weights it sets the model up, as some do when first called: then its flags
    stay as the run has set them.
    """
    parts = list(module.modules())  # those that a run puts in their places are new, and stay as it leaves them
    own = attributes(parts)
    weights = versions(module.parameters())
    put({**own, **replaced(module, own, written), **state}, own)
    left: dict[Place, Any] = {}
    try:
        yield left
    finally:
        now = attributes(parts)
        left.update({place: value for place, value in now.items() if place not in own or value is not own[place]})
        left.update(dict.fromkeys(own.keys() - now.keys(), GONE))
        if versions(module.parameters()) != weights:
            flags = {
                place: v for place, v in left.items() if isinstance(v, FLAGS) and isinstance(own.get(place), FLAGS)
            }
            own.update(flags)
        put(own, now)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[set[Place]]:
    """Within, ``model`` may be run; what that writes into attributes and buffers is gone afterwards.

    Yields a set that has, at the end, the buffers that were written in place.
    """
    with same_buffers(model) as found, own_attributes(model, {}):
        yield found


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[set[Place]]:
    """As `unchanged` of buffers alone.  If weights change within, the model sets itself up: its buffers, which may say
    so, stay as they are."""
    every = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    buffers = [each for each in every if class_of(each[-1]) is Tensor]
    values = [(buffer.clone(), version(buffer)) for *_, buffer in buffers]
    weights = versions(model.parameters())
    found: set[Place] = set()
    try:
        yield found
    finally:
        set_up = versions(model.parameters()) != weights
        for (module, name, buffer), (value, before) in zip(buffers, values, strict=True):
            if version(buffer) != before:
                found.add((module, "buffer", name))
            # One that is as it was keeps its version: compiled programs watch it.
            if not set_up and not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def attributes(parts: Iterable[nn.Module]) -> dict[Place, Any]:
    """Every plain attribute and buffer of the modules, with its value."""
    found: dict[Place, Any] = {}
    for module in parts:
        found.update(((module, "attribute", n), v) for n, v in vars(module).items() if n not in MACHINERY)
        found.update(((module, "buffer", n), v) for n, v in module._buffers.items())
    return found


def put(wanted: Mapping[Place, Any], now: Mapping[Place, Any]) -> None:
    """Make attributes and buffers of modules, which are ``now``, those of ``wanted``, no more, and in its order."""
    wanted = {place: value for place, value in wanted.items() if value is not GONE}
    if list(now) != list(wanted):
        for place in now:
            del table_of(place)[place[2]]
        now = {}
    for place, value in wanted.items():
        if place not in now or now[place] is not value:
            table_of(place)[place[2]] = value


def table_of(place: Place) -> dict[str, Any]:
    module, kind, _ = place
    return vars(module) if kind == "attribute" else module._buffers


def replaced(model: nn.Module, own: Mapping[Place, Any], written: Collection[Place]) -> dict[Place, Any]:
    """Copies of what a run might change in place, each as often the same as the model's own is."""
    places = {place: value for place, value in own.items() if place[1] == "attribute" or place in written}
    copied = {id(value) for place, value in own.items() if place in written}
    memo = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in copied}
    found = {place: copy_of(value, memo) for place, value in places.items()}
    return {place: value for place, value in found.items() if value is not own[place]}


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of tensors and containers, down to objects in them, which stay, as do those in ``memo`` by their ids."""
    if id(value) in memo:
        return memo[id(value)]
    new: Any = value
    if isinstance(value, Tensor):
        new = value.clone()
    elif isinstance(value, tuple):
        items = [copy_of(item, memo) for item in value]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            new = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, dict):
        new = memo[id(value)] = copy.copy(value)
        for key, item in value.items():
            new[key] = copy_of(item, memo)
    elif isinstance(value, (list, deque)):
        new = memo[id(value)] = copy.copy(value)
        new.clear()
        new.extend(copy_of(item, memo) for item in value)
    elif isinstance(value, set):
        new = copy.copy(value)
    memo[id(value)] = new
    return new


def deep_copy(model: nn.Module, value: Any) -> Any:
    """Of all that a request keeps; ``model`` and its tensors stay what they are in it."""
    shared = (*model.modules(), *model.parameters(), *model.buffers(), GONE)
    return copy.deepcopy(value, {id(one): one for one in shared})


@contextmanager
def watched_objects(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Yields a set that has, at the end, module and name of each attribute that leads to an object that was changed.

    Such an object is neither copied nor put back by `own_attributes`, as nothing is known of it.
    """
    places = [(path, name, value) for path, part in model.named_modules() for name, value in vars(part).items()]
    places = [(path, name, value) for path, name, value in places if name not in MACHINERY]
    seen: dict[int, Any] = {}  # what is in it stays alive, so that no other object has its id meanwhile
    before = [contents(value, {}, seen) for *_, value in places]
    found: set[tuple[str, str]] = set()
    yield found
    for (path, name, value), was in zip(places, before, strict=True):
        if contents(value, {}, seen) != was:
            found.add((path, name))


def contents_of(model: nn.Module) -> tuple[dict[Place, Any], dict[int, Any]]:
    """All `contents` of attributes and buffers; and what must stay alive as long as others are compared with them."""
    seen: dict[int, Any] = {}
    return {place: contents(value, {}, seen) for place, value in attributes(model.modules()).items()}, seen


def contents(value: Any, within: dict[int, Any], seen: dict[int, Any]) -> Any:
    """Something that is equal as long as nothing in ``value`` has changed."""
    if isinstance(value, (*FLAGS, type(None))):
        return value
    seen[id(value)] = value
    if id(value) in within or isinstance(value, NO_STATE):
        return id(value)
    within[id(value)] = value
    if isinstance(value, Tensor):
        return id(value), version(value)
    if isinstance(value, dict):
        return [(contents(key, within, seen), contents(item, within, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [contents(item, within, seen) for item in value]
    return id(value), contents(getattr(value, "__dict__", None), within, seen)


def versions(tensors: Iterator[Any]) -> list[tuple[int, int]]:
    return [(id(tensor), version(tensor)) for tensor in tensors]


def version(tensor: Tensor) -> int:
    """How often it was written in place; one made in inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version
