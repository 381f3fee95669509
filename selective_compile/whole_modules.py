"""Copies of a model's modules that capture left whole, to be run and traced by themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from selective_compile.module_state import contents_of, own_attributes, same_buffers
from selective_compile.own_stores import Store, set_before_read, stores_of
from selective_compile.skeleton import rebuilt, skeleton, structure_of
from selective_compile.tensor_memory import as_it_is

CONSTANTS = (int, float, str, bool, type(None))
CONTAINERS = (dict, list, set, tuple)


class ModulesOf:
    """The modules of ``model``, by path; see `passes.isolated_call.WholeModules`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Of modules that are alike: attributes that a call may set, and those that one has set where it may not.
        self._stores: dict[Hashable, frozenset[Store]] = {}
        self._seen: dict[Hashable, frozenset[Store]] = {}

    def let_store(self, path: str) -> bool:
        """Whether runs of the module have raised for attributes that it sets; from now on it may, if it reads none of
        them before."""
        alike = self.likeness(path)
        found = self._seen.pop(alike, None)
        if found is None or alike in self._stores:
            return False
        self._stores[alike] = found
        return True

    def stored(self, path: str) -> list[str]:
        """The attributes that runs of the module may set, and nothing reads."""
        return sorted(".".join(filter(None, (path, *store))) for store in self._stores.get(self.likeness(path), ()))

    def run(self, path: str, structure: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the module returns, in the order of `structure_of`.

        Raises:
            RuntimeError: it keeps something of the call, so that the next may be another.
            What the module raises.
        """
        module, alike = skeleton(self._model.get_submodule(path), {}), self.likeness(path)
        args, kwargs = rebuilt(structure, tensors)
        found: list[Tensor] = []
        # What is assigned to `data` of a weight or a buffer has no memory where the tensors have none, and counts as no
        # change.
        with same_buffers(module) as written, own_attributes(module, {}), same_memory(module):
            before, _alive = contents_of(module)  # so that no other object has the id of one of it
            with set_before_read(module, self._stores.get(alike, ())) as given:
                structure_of(module(*args, **kwargs), found)
            after = contents_of(module)[0]
            stores = frozenset() if after == before else stores_of(module, before, after)
            if stores is None or not stores <= given:
                if stores is not None:
                    self._seen[alike] = stores | self._seen.get(alike, frozenset())
                raise RuntimeError("it keeps something of its call in its attributes")
        if written:
            raise RuntimeError("it keeps something of its call in its buffers")
        return found

    def likeness(self, path: str) -> Hashable:
        """Class, constants and shapes of all parts; other attributes must be the same objects."""
        return tuple(
            (name, type(part), attributes_of(part), shapes_of(part._parameters), shapes_of(part._buffers))
            for name, part in self._model.get_submodule(path).named_modules(remove_duplicate=False)
        )


@contextmanager
def same_memory(module: nn.Module) -> Iterator[None]:
    """Weights that a run has given tensors without memory have theirs again."""
    with as_it_is():
        own = [(weight, weight.data) for weight in module.parameters()]
    try:
        yield
    finally:
        for weight, before in own:
            if weight.is_meta:
                weight.data = before


def attributes_of(part: nn.Module) -> tuple[Any, ...]:
    """Without weights and parts, and without containers that are empty, as those of hooks mostly are."""
    return tuple(
        (name, type(value), value if isinstance(value, CONSTANTS) else id(value))
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers", "_modules") and not (isinstance(value, CONTAINERS) and not value)
    )


def shapes_of(tensors: dict[str, Tensor | None]) -> tuple[Any, ...]:
    return tuple((name, None if t is None else (t.dtype, tuple(t.shape))) for name, t in tensors.items())
