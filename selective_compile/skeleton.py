"""Copies of a model's module tree that share its weights, in which single modules are called in another way.

The model itself is never touched: whoever calls it meanwhile, in whatever thread, meets its own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.isolated_op import TOKENS, OutputSizes
from selective_compile.model_call import logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import own_attributes, share_lock

LENGTHS = (5, 8)  # two lengths tell a size that is the tokens' from a constant
Forward = Callable[..., Any]


def skeleton(model: nn.Module, forwards: Mapping[str, Callable[[nn.Module], Forward]]) -> nn.Module:
    """A copy of the tree with the same parameters; the module at each path is called by ``forwards[path](copy)``.

    Plain attributes and buffers that the copy's modules set are the copy's own.  Who runs it waits for who runs
    ``model``, whose buffers it has.
    """
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            # Not by copy.copy, which a class may have made to do more.
            twin = module.__class__.__new__(module.__class__)
            copies[id(module)] = twin
            twin.__dict__.update(module.__dict__)
            twin.__dict__["_buffers"] = dict(module._buffers)
            twin.__dict__["_modules"] = {
                name: None if child is None else copied(child) for name, child in module._modules.items()
            }
        return copies[id(module)]

    root = copied(model)
    for path, forward in forwards.items():
        module = root.get_submodule(path)
        module.__dict__["forward"] = forward(module)
    share_lock(root, model)
    return root


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a module returns: its structure as `rebuilt` takes it, and for each tensor dtype and sizes.

    A tensor whose sizes are not all constants or the number of tokens has those of one call; it must not be used.
    """

    structure: Any
    sizes: OutputSizes
    known: tuple[bool, ...]

    @property
    def token_wise(self) -> tuple[bool, ...]:
        """Which tensors have tokens in one dimension."""
        return tuple(
            known and sum(n == TOKENS for n in sizes) == 1
            for known, (_, sizes) in zip(self.known, self.sizes, strict=True)
        )


def results_of_modules(model: nn.Module) -> dict[str, Results]:
    """What each module of ``model`` returns, by running it on a few tokens; modules that return else are left out."""
    seen: dict[str, list[list[tuple[Any, list[Tensor]]]]] = {}

    def recording(path: str, calls: dict[str, list[Any]]) -> Callable[[nn.Module], Forward]:
        def of(module: nn.Module) -> Forward:
            own = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                tensors: list[Tensor] = []
                calls.setdefault(path, []).append((structure_of(result, tensors), tensors))
                return result

            return forward

        return of

    for length in LENGTHS:
        calls: dict[str, list[Any]] = {}
        paths = [path for path, _ in model.named_modules() if path]
        copy = skeleton(model, {path: recording(path, calls) for path in paths})
        ids = torch.arange(1, length + 1, device=device_of(model))[None]
        call, arguments = logits_call(copy, ids)
        with torch.no_grad(), own_attributes(copy, {}):  # lists and dictionaries are the model's own
            call(*arguments)
        for path in paths:
            seen.setdefault(path, []).append(
                [(structure, [shape_of(t) for t in tensors]) for structure, tensors in calls.get(path, [])]
            )
    found = {path: common(*both) for path, both in seen.items()}
    return {path: results for path, results in found.items() if results is not None}


def shape_of(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def common(short: list[Any], long: list[Any]) -> Results | None:
    """What all calls of a module have in common; None if they differ in more than the number of tokens."""
    every = [one(*pair) for pair in zip(short, long, strict=False)]
    if not every or len(short) != len(long) or any(results != every[0] for results in every):
        return None
    return every[0]


def one(short: tuple[Any, Any], long: tuple[Any, Any]) -> Results | None:
    (structure, few), (other, many) = short, long
    if structure != other or "other" in str(structure):
        return None
    sizes: OutputSizes = []
    known = []
    for (dtype, a), (_, b) in zip(few, many, strict=True):
        pairs = list(zip(a, b, strict=False)) if len(a) == len(b) else []
        known.append(len(a) == len(b) and all(x == y or (x, y) == LENGTHS for x, y in pairs))
        sizes.append((dtype, [TOKENS if x != y else x for x, y in pairs] if known[-1] else b))
    return Results(structure=structure, sizes=sizes, known=tuple(known))


def structure_of(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` as nested lists that `rebuilt` reads; its tensors go to ``tensors``, and the lists have their numbers.

    Dynamo traces this code.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["constant", value]
    if type(value) is tuple:
        return ["tuple", [structure_of(v, tensors) for v in value]]
    if type(value) is list:
        return ["list", [structure_of(v, tensors) for v in value]]
    if type(value) is dict:
        return ["dict", [[k, structure_of(v, tensors)] for k, v in value.items()]]
    return ["other", type(value).__name__]


def rebuilt(structure: Any, tensors: Any) -> Any:
    """The value that `structure_of` took apart.  Dynamo traces this code."""
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple([rebuilt(part, tensors) for part in content])
    if kind == "list":
        return [rebuilt(part, tensors) for part in content]
    if kind == "dict":
        return {name: rebuilt(part, tensors) for name, part in content}
    return content


def others_in(structure: Any) -> list[str]:
    """Class names of what `structure_of` could not take apart."""
    kind, content = structure
    if kind in ("tuple", "list"):
        return [name for part in content for name in others_in(part)]
    if kind == "dict":
        return [name for _, part in content for name in others_in(part)]
    return [content] if kind == "other" else []


def stand_in(path: str, results: Results) -> Callable[[nn.Module], Forward]:
    """What calls ``selective::isolated`` in the place of the module at ``path``.  Dynamo traces the result."""
    sizes, structure = repr(results.sizes), results.structure

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        arguments = structure_of([list(args), kwargs], tensors)
        return rebuilt(structure, torch.ops.selective.isolated(tensors, path, f"{arguments}", sizes))

    return lambda module: forward
