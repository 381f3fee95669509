"""Which modules to isolate next: those around what was refused, and all that are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from selective_compile.passes import Refusal, RefusedError, Rewrite
from selective_compile.passes.refusals import module_path
from selective_compile.skeleton import Results

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class UnprovedError(RefusedError):
    """Also knows the modules that go on to compute with what was refused, by the name of its node; and whether other
    modules would run for one request after another."""

    def __init__(self, rewritten: Rewrite) -> None:
        super().__init__(rewritten.refusals)
        self.isolates = any(not call.token_wise for call in rewritten.traced.isolated)
        nodes = {node.name: node for node in rewritten.traced.graph.nodes}
        self.readers = {
            refusal.node: readers_of(nodes[refusal.node]) for refusal in rewritten.refusals if refusal.node in nodes
        }


def readers_of(node: fx.Node) -> tuple[str, ...]:
    """Paths of the modules in which a value of another module is used first, and what is computed from it there."""
    found: dict[str, None] = {}
    own, seen, stack = module_path(node), {node}, [node]
    while stack:
        for user in stack.pop().users:
            path = module_path(user)
            if path != own:
                found[path] = None
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return tuple(found)


def more_modules(
    model: nn.Module, results: Mapping[str, Results], chosen: Mapping[str, Refusal], error: RefusedError
) -> dict[str, Refusal]:
    """For each refusal the innermost module around it that can be isolated and is not yet; and all that are alike.

    Around what is computed for all layers, as a mask is, there is none; then these are around those that use it.
    """
    modules = dict(model.named_modules())
    found: dict[str, Refusal] = {}
    readers = error.readers if isinstance(error, UnprovedError) else {}
    for refusal in error.refusals:
        around = module_around(modules, results, chosen, refusal.module)
        paths = (
            [around]
            if around
            else [module_around(modules, results, chosen, path) for path in readers.get(refusal.node, ())]
        )
        for path in paths:
            if path is None or path in found:
                continue
            for other in modules:
                if other in results and alike(modules, path, other):
                    found.setdefault(other, refusal)
    return found


def module_around(
    modules: Mapping[str, nn.Module], results: Mapping[str, Results], chosen: Mapping[str, Refusal], path: str
) -> str | None:
    """The innermost module at or above ``path`` that can be isolated, above all that are already."""
    around = next((outer for outer in chosen if path == outer or path.startswith(outer + ".")), None)
    path = path if around is None else around.rpartition(".")[0]
    while path:
        if path in modules and path in results and any(results[path].token_wise) and is_part(modules, path):
            return path
        path = path.rpartition(".")[0]
    return None


def is_part(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Whether the module is one of a list, or in one, or has no list in it: not what holds the model's layers."""
    parents = [path.rsplit(".", depth)[0] for depth in range(1, path.count(".") + 1)]
    inside = any(isinstance(modules.get(parent), LISTS) for parent in parents)
    return inside or not any(isinstance(module, LISTS) for module in modules[path].modules())


def alike(modules: Mapping[str, nn.Module], path: str, other: str) -> bool:
    """Whether both are the same module of two layers: their paths differ in numbers alone, the classes in them not."""
    if re.sub(r"\d+", "*", path) != re.sub(r"\d+", "*", other):
        return False
    return classes_in(modules[path]) == classes_in(modules[other])


def classes_in(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, type(part)) for name, part in module.named_modules(remove_duplicate=False)]


def outermost(paths: Mapping[str, Refusal]) -> dict[str, Refusal]:
    """Without modules that lie in others of them."""
    return {
        path: refusal for path, refusal in paths.items() if not any(path.startswith(outer + ".") for outer in paths)
    }
