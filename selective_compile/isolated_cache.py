"""How a module is called with a request's own Hugging Face cache, found by watching the model prepare one.

`generate` prepares a cache for a request and hands it to every layer.  Which argument of which module that is, is seen
by its identity; what else such a call is given is taken over where it is a plain value, such as ``use_cache=True``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from selective_compile.model_facts import device_of
from selective_compile.module_state import own_attributes
from selective_compile.sequential_program import prepared, why_not_run
from selective_compile.skeleton import Forward, others_in, skeleton

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """What is other in the arguments of a module that is called with a cache: by name, or by place."""

    cache: str | int
    constants: Mapping[str | int, Any]

    def takes(self, structure: Any) -> bool:
        """Whether the cache is all that a call is given besides tensors and plain values (see `structure_of`)."""
        (_, args), (_, kwargs) = structure[1]
        found = {name: len(others_in(part)) for name, part in [*enumerate(args), *kwargs]}
        return found.get(self.cache) == 1 and sum(found.values()) == 1

    def put(self, args: list[Any], kwargs: dict[str, Any], cache: Any) -> None:
        for name, value in ((self.cache, cache), *self.constants.items()):
            put_at(name, value, args, kwargs)


def put_at(name: str | int, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    if isinstance(name, int):
        args[name] = value
    else:
        kwargs[name] = value


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The caches of a model's requests, and the modules that are called with them."""

    unused: Any
    calls: Mapping[str, CachedCall]

    def new(self) -> Any:
        """A cache for another request."""
        return copy.deepcopy(self.unused)


@torch.no_grad()
def caches_of(model: nn.Module, paths: Iterable[str]) -> Caches | None:
    """None if `generate` cannot begin with the model, or prepares no cache that its modules at ``paths`` are given."""
    if why_not_run(model):
        return None
    paths = set(paths)
    plain, cached = watched(model, paths, use_cache=False), watched(model, paths, use_cache=True)
    given = {id(value): value for value in cached.given.values() if not isinstance(value, (torch.Tensor, *PLAIN))}
    calls: dict[str, CachedCall] = {}
    for path, (args, kwargs) in cached.calls.items():
        if path not in plain.calls:
            continue
        arguments, before = by_place(args, kwargs), by_place(*plain.calls[path])
        places = [name for name, value in arguments.items() if id(value) in given]
        others = {
            name: value
            for name, value in arguments.items()
            if name not in places and isinstance(value, PLAIN) and value != before.get(name)
        }
        if len(places) == 1 and arguments[places[0]] is cached.cache and path not in cached.repeated:
            calls[path] = CachedCall(cache=places[0], constants=others)
    return Caches(unused=cached.unused, calls=calls) if calls else None


def by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str | int, Any]:
    return dict([*enumerate(args), *kwargs.items()])


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One run of a model as `generate` begins it: what it was given, and what its modules were called with."""

    given: Mapping[str, Any]
    cache: Any
    unused: Any
    calls: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]
    repeated: frozenset[str]


def watched(model: Any, paths: set[str], *, use_cache: bool) -> Watched:
    calls: Calls = {}
    repeated: set[str] = set()

    def watching(path: str) -> Callable[[nn.Module], Forward]:
        def of(module: nn.Module) -> Forward:
            own = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                if path in calls:
                    repeated.add(path)
                calls[path] = (args, kwargs)
                return own(*args, **kwargs)

            return forward

        return of

    twin: Any = skeleton(model, {path: watching(path) for path in paths})
    ids = torch.zeros(1, 5, dtype=torch.int64, device=device_of(model))
    with own_attributes(twin, {}):
        return run_watched(twin, ids, calls, repeated, use_cache=use_cache)


def run_watched(twin: Any, ids: torch.Tensor, calls: Calls, repeated: set[str], *, use_cache: bool) -> Watched:
    given = prepared(twin, ids)
    found = [value for value in given.values() if not isinstance(value, (torch.Tensor, *PLAIN))]
    cache = found[0] if len(found) == 1 else None
    unused = copy.deepcopy(cache)
    if not use_cache:
        given = {name: value for name, value in given.items() if value is not cache} | {"use_cache": False}
    arguments = twin.prepare_inputs_for_generation(ids, next_sequence_length=None, is_first_iteration=True, **given)
    twin(**arguments, return_dict=True)
    return Watched(given=given, cache=cache, unused=unused, calls=calls, repeated=frozenset(repeated))
