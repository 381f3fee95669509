"""What a forward leaves in a model: attributes, buffers and parts of its modules, kept apart from the model's own."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import IOBase
from threading import RLock
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final, Literal
from weakref import ProxyTypes, WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from selective_compile.forks import lock_of_any_process
from selective_compile.kept_buffers import KeptBuffer, kept_buffer
from selective_compile.kept_weights import Weights, summed_weights
from selective_compile.state_copies import Copies
from selective_compile.tensor_state import version_of

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

Place = tuple[nn.Module, Literal["attribute", "buffer", "part"], str]
# What is other than the model's own, or may be: an attribute, buffer or module in it that a run has set, taken out
# (`GONE`), or might have changed where it is, as a list or a tensor.
State = Mapping[Place, Any]


_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_LOCKS_KNOWN = lock_of_any_process()


def lock_of(model: object) -> RLock:
    """Held by who runs ``model`` itself or its modules: what they keep in themselves is one run's at a time.

    Who traces, too, takes this first: a run may come to something that is compiled.
    """
    if not isinstance(model, nn.Module):  # which is said elsewhere
        return lock_of_any_process()
    with _LOCKS_KNOWN:
        return _LOCKS.setdefault(itself(model), lock_of_any_process())


def itself(model: nn.Module) -> nn.Module:
    """Of a proxy, as an engine has that does not hold its model: nothing refers weakly to that."""
    return next(model.modules()) if isinstance(model, ProxyTypes) else model


def share_lock(copy: nn.Module, model: nn.Module) -> None:
    """The copy has buffers of ``model``: who runs one of them has both to himself."""
    own = lock_of(model)
    with _LOCKS_KNOWN:
        _LOCKS[copy] = own


@contextmanager
def own_attributes(module: nn.Module, state: State, written: Collection[Place] = ()) -> Iterator[dict[Place, Any]]:
    """Within, attributes, buffers and parts of the modules are those of ``state``, where it has them; what they are at
    the end is put into what this yields, as far as it may be another, and then they are again what they were.

    Tensors and containers of the model's own are copies meanwhile, and so are buffers at ``written``: others must not
    be changed in place.  If a run changes weights it sets the model up, as some do when first called: then its flags
    and buffers stay as the run has set them, and so do modules that it put in the place of others.
    """
    parts = list(module.modules())  # what is in those that a run puts in their places is that run's own
    own, weights = attributes(parts), Weights(parts)
    put({**own, **replaced(module, own, written), **state}, own)
    left: dict[Place, Any] = {}
    now = None
    try:
        yield left
    finally:
        try:
            now = attributes(parts)
            left.update({place: value for place, value in now.items() if place not in own or value is not own[place]})
            left.update(dict.fromkeys(own.keys() - now.keys(), GONE))
            staying = {place: value for place, value in left.items() if stays(place, value, own)}
            if staying and weights.are_others():
                own.update(staying)
        finally:  # also where that is interrupted
            put(own, attributes(parts) if now is None else now)


def stays(place: Place, value: Any, own: Mapping[Place, Any]) -> bool:
    """Whether it says that the model is set up, as a buffer may, or is a part of what was set up."""
    module, kind, name = place
    if kind in ("part", "buffer"):
        return True
    before = own.get(place, getattr(type(module), name, None))
    if isinstance(value, list) and isinstance(before, list):  # of adapters that are in the weights, say
        return all(isinstance(item, FLAGS) for item in (*value, *before)) and value != before
    return isinstance(value, bool) if before is None else isinstance(value, FLAGS) and isinstance(before, FLAGS)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[set[Place]]:
    """Within, ``model`` may be run; what that writes into attributes, buffers and `same_objects` is gone afterwards.

    Yields a set that has, at the end, the buffers that were written or given other memory.
    """
    with same_buffers(model) as found, own_attributes(model, {}), same_objects(model):
        yield found


@contextmanager
def same_objects(model: nn.Module) -> Iterator[None]:
    """Within, a run may set attributes of objects that are attributes of modules, as flags in a configuration: they are
    then again what they were, unless weights change, as in `own_attributes`."""
    parts = list(model.modules())
    values = [value for part in parts for name, value in vars(part).items() if name not in MACHINERY]
    plain = {id(value): value for value in values if not isinstance(value, (Tensor, *NO_STATE))}
    before = [(value, dict(vars(value))) for value in plain.values() if hasattr(value, "__dict__")]
    weights = Weights(parts)
    try:
        yield
    finally:
        changed = [(value, was) for value, was in before if are_others(vars(value), was)]
        if changed and not weights.are_others():
            for value, was in changed:
                vars(value).clear()
                vars(value).update(was)


def are_others(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return list(now) != list(before) or any(now[name] is not value for name, value in before.items())


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[set[Place]]:
    """As `unchanged` of buffers alone.  If weights change within, the model sets itself up: its buffers, which may say
    so, stay as they are."""
    parts, found = list(model.modules()), set[Place]()
    every: list[tuple[Place, Tensor | None]] = [
        ((part, "buffer", name), buffer) for part in parts for name, buffer in part._buffers.items()
    ]
    with ExitStack() as stack:  # each of them is looked at and put back, whatever becomes of others
        stack.enter_context(summed_weights(parts))
        are_others = functools.cache(Weights(parts).are_others)

        def look_at(place: Place, buffer: Tensor, kept: KeptBuffer, version: int) -> None:
            other, written = None, True
            try:
                other = kept.is_other()
                written = bool(other) or version_of(buffer) != version
            except torch.OutOfMemoryError:  # there is no room to look at it
                pass
            finally:  # also where that is interrupted
                if written:
                    found.add(place)
                if written and other is not False:
                    stays = False
                    try:
                        stays = are_others()
                    finally:
                        if not stays:
                            kept.put_back()

        for place, buffer in every:
            if buffer is not None:
                kept = stack.enter_context(kept_buffer(buffer))
                stack.callback(look_at, place, buffer, kept, version_of(buffer))
        yield found


def attributes(parts: Iterable[nn.Module]) -> dict[Place, Any]:
    """Every plain attribute, buffer and part of the modules, with its value."""
    found: dict[Place, Any] = {}
    for module in parts:
        found.update(((module, "attribute", n), v) for n, v in vars(module).items() if n not in MACHINERY)
        found.update(((module, "buffer", n), v) for n, v in module._buffers.items())
        if not isinstance(module, torch.jit.ScriptModule):  # what it has cannot be replaced
            found.update(((module, "part", n), v) for n, v in module._modules.items())
    return found


def put(wanted: Mapping[Place, Any], now: Mapping[Place, Any]) -> None:
    """Make attributes, buffers and parts of modules, which are ``now``, those of ``wanted``, no more, in its order."""
    wanted = {place: value for place, value in wanted.items() if value is not GONE}
    if list(now) != list(wanted):
        # Those that stay are not taken out meanwhile: others may look at the model.
        order, was = names_of(wanted), names_of(now)
        others = {table for table in was if was[table] != order.get(table)}
        for place in [place for place in now if place[:2] in others]:
            del table_of(place)[place[2]]
        now = {place: value for place, value in now.items() if place[:2] not in others}
    for place, value in wanted.items():
        if place not in now or now[place] is not value:
            table_of(place)[place[2]] = value


def names_of(places: Iterable[Place]) -> dict[tuple[nn.Module, str], list[str]]:
    """By module and kind, in their order."""
    found: dict[tuple[nn.Module, str], list[str]] = {}
    for module, kind, name in places:
        found.setdefault((module, kind), []).append(name)
    return found


def table_of(place: Place) -> dict[str, Any]:
    module, kind, _ = place
    return {"attribute": vars(module), "buffer": module._buffers, "part": module._modules}[kind]


def replaced(model: nn.Module, own: Mapping[Place, Any], written: Collection[Place]) -> dict[Place, Any]:
    """Copies of what a run might change in place, each as often the same as the model's own is."""
    places = {place: value for place, value in own.items() if place[1] == "attribute" or place in written}
    copied = {id(value) for place, value in own.items() if place in written}
    kept = (tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in copied)
    copies = Copies(places.values(), kept)
    found = {place: copies.of(value) for place, value in places.items()}
    return {place: value for place, value in found.items() if value is not own[place]}


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
        return id(value), version_of(value)
    if isinstance(value, dict):
        return [(contents(key, within, seen), contents(item, within, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [contents(item, within, seen) for item in value]
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if is_iterator(value):
        return contents(place_of(value), within, seen)
    return id(value), contents(getattr(value, "__dict__", None), within, seen)


def is_iterator(value: Any) -> bool:
    """Of which calls may take one thing after another; files and the like are of no concern."""
    return isinstance(value, Iterator) and not isinstance(value, IOBase)


def place_of(iterator: Any) -> Any:
    """How far it has come, as a copy of it would be told; `Unlike` anything where that is not known."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, dict(frame.f_locals))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what later Pythons cannot copy
        try:
            return iterator.__reduce_ex__(2)
        except (TypeError, AttributeError):
            return Unlike()


class Unlike:
    """Equal to nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False
