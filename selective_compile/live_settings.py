"""What a compiled graph takes for granted of a model beside its tensors: hooks, objects' forwards, attributes read.

A graph is that of the model as it was captured.  A LoRA adapter that is switched off afterwards, or a hook that comes
later, changes no tensor, and would go unnoticed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from selective_compile.passes import Refusal

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOK = "hook"  # the node of refusals that are for a hook
PLAIN = (bool, int, float, str, type(None), torch.dtype)
# What torch keeps in every module: hooks are looked at by themselves, tensors and modules elsewhere.
TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
DEPTH = 2  # of containers in containers


class LiveSettings:
    """Plain attributes of ``model`` called one of ``names``, its hooks and its modules' own forwards, as they are now.

    It holds dictionaries of modules and copies of values, so that the model itself can be freed.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] = ()) -> None:
        wanted = frozenset(names) - TORCHS_OWN
        self._values: list[tuple[dict[str, Any], str, str, Any]] = []
        self._forwards: list[tuple[dict[str, Any], str, weakref.ref[Any] | None]] = []
        for path, module in model.named_modules():
            own = vars(module)
            forward = own.get("forward")
            self._forwards.append((own, path, None if forward is None else weakref.ref(forward)))
            for name in wanted & own.keys():
                if is_plain(own[name]):
                    self._values.append((own, path, name, copy.deepcopy(own[name])))

    def change(self) -> str:
        """What is not as it was, in words; empty if all is."""
        for own, path, forward in self._forwards:
            # Spelt out, as it is asked of each module at each step.
            if (own["_forward_hooks"] or own["_forward_pre_hooks"]) and any(is_felt(hook) for hook in hooks_in(own)):
                return f"hooks must not come after compiling, got one of {path or 'the model'!r}"
            if own.get("forward") is not (None if forward is None else forward()):
                return f"forwards must stay those compiled, got another of {path or 'the model'!r}"
        if any(everywhere()):
            return "hooks must not come after compiling, got one of all modules"
        for own, path, name, value in self._values:
            # Identity would not do: a list may be changed in place.
            if name not in own or own[name] != value:
                where = f"{path}.{name}".strip(".")
                return f"{where!r} must stay {value!r}, as compiled, got {own.get(name)!r}"
        return ""


def follow(own: nn.Module, copied: nn.Module) -> bool:
    """Give a copy of a module the plain attributes that the module has by now; whether one was another."""
    theirs, changed = vars(copied), False
    for name, value in vars(own).items():
        if name not in TORCHS_OWN and is_plain(value) and (name not in theirs or theirs[name] != value):
            theirs[name] = copy.deepcopy(value)
            changed = True
    return changed


def is_plain(value: object, depth: int = DEPTH) -> bool:
    if isinstance(value, PLAIN):
        return True
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return all(is_plain(item, depth - 1) for pair in value.items() for item in pair)
    return False


def names_read(guards: Iterable[Any]) -> frozenset[str]:
    """Names of the attributes and keys that Dynamo's guards of a trace look at, anywhere on their way."""
    found: set[str] = set()
    seen: set[int] = set()
    for guard in guards:
        source = getattr(guard, "originating_source", None)
        while source is not None and id(source) not in seen:
            seen.add(id(source))
            base = getattr(source, "base", None)
            # A key counts in an object's own dictionary alone: in that of its class it is a property or a method.
            own = getattr(base, "member", None) == "__dict__"
            name = getattr(source, "index", None) if own else getattr(source, "member", None)
            if isinstance(name, str):
                found.add(name)
            source = base
    return frozenset(found)


def hooks_in(own: dict[str, Any]) -> list[Any]:
    """Forward hooks in the dictionary of a module."""
    return [hook for kind in HOOKS for hook in own[kind].values()]


def is_felt(hook: Any) -> bool:
    """Not the hooks by which transformers records hidden states: once asked for, they stay, and wait to be asked."""
    module, name = str(getattr(hook, "__module__", "")), name_of(hook)
    return not (module.startswith("transformers.") and name.endswith("output_capturing_hook"))


def everywhere() -> tuple[dict[int, Any], ...]:
    """Hooks of every module of the process."""
    return torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks


def hook_refusals(model: nn.Module) -> list[Refusal]:
    """One for each forward hook: a step would give it the tokens of all requests, or capture would lose it."""
    found = [(hook, "") for hooks in everywhere() for hook in hooks.values()]
    for path, module in model.named_modules():
        found += [(hook, path) for hook in hooks_in(vars(module)) if is_felt(hook)]
    return [
        Refusal(
            node=HOOK,
            operator="forward hook",
            reason=f"{name_of(hook)} is to see each call of the module by itself",
            source_line=line_of(hook),
            module=path,
        )
        for hook, path in found
    ]


def name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def line_of(hook: Any) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return "source line unknown" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Within, calls of the model are trials of ours, of which its own hooks hear nothing."""
    kept = [(hooks, dict(hooks)) for module in model.modules() for hooks in (getattr(module, kind) for kind in HOOKS)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)
