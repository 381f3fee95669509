"""Copies of a model's modules that capture left whole, to be run and traced by themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from selective_compile.module_state import contents_of, own_attributes, same_buffers
from selective_compile.skeleton import rebuilt, skeleton, structure_of
from selective_compile.tensor_memory import as_it_is

CONSTANTS = (int, float, str, bool, type(None))
CONTAINERS = (dict, list, set, tuple)


class ModulesOf:
    """The modules of ``model``, by path; see `passes.isolated_call.WholeModules`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def run(self, path: str, structure: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the module returns, in the order of `structure_of`.

        Raises:
            RuntimeError: it keeps something of the call, so that the next may be another.
            What the module raises.
        """
        module = skeleton(self._model.get_submodule(path), {})
        args, kwargs = rebuilt(structure, tensors)
        found: list[Tensor] = []
        # What is assigned to `data` of a weight or a buffer has no memory where the tensors have none, and counts as no
        # change.
        with same_buffers(module) as written, own_attributes(module, {}), same_memory(module):
            before, _alive = contents_of(module)  # so that no other object has the id of one of it
            structure_of(module(*args, **kwargs), found)
            if contents_of(module)[0] != before:
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
