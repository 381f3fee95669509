"""What a compiled graph takes for granted of a model beside its tensors: hooks, objects' forwards, attributes read.

A graph is that of the model as it was captured.  A LoRA adapter that is switched off afterwards, or a hook that comes
later, changes no tensor, and would go unnoticed.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from selective_compile.entries import MISSING, Entries
from selective_compile.passes import Refusal

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FORWARD = "forward"
# Hooks that change nothing of what is computed, by whose they are and how their names end.
UNFELT = {
    "transformers": ("output_capturing_hook", "make_inputs_require_grads"),
    "peft": ("make_inputs_require_grad",),
}
HOOK = "hook"  # the node of refusals that are for a hook
CONSTANTS = (bytes, complex, type(Ellipsis))  # that code may have beside
PLAIN = (bool, int, float, str, type(None), torch.dtype)
# What torch keeps in every module: hooks are looked at by themselves, tensors and modules elsewhere.
TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
NOT_FOLLOWED = TORCHS_OWN | {"forward"}  # by copies of modules, which may be called in another way
DEPTH = 8  # of containers in containers, and objects in objects
NOT_WATCHED = (nn.Module, ModuleType, type, dict, list, tuple, set, frozenset)  # modules are looked at elsewhere
FUNCTIONS = (FunctionType, BuiltinFunctionType)
NO_OBJECTS = (Tensor, *FUNCTIONS, MethodType)


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a trace of a forward has read beside tensors: names of attributes; keys, among which are those of classes'
    dictionaries; and the code that it ran."""

    names: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    code: frozenset[CodeType] = frozenset()

    def beside(self, functions: Iterable[CodeType]) -> Read:
        """With what code that was left whole reads by name."""
        codes = frozenset(functions)
        return replace(self, names=self.names.union(*(code.co_names for code in codes)), code=self.code | codes)


NOTHING: Final = Read()


class LiveSettings:
    """What was ``read`` of ``model``, as it is now, its hooks and its modules' own forwards.

    That is, of each module, of objects in it such as a configuration, and of its class: plain attributes, and which
    functions and tensors the others are.  It holds dictionaries of modules, not modules, so that the model itself can
    be freed.
    """

    def __init__(self, model: nn.Module, read: Read | None = None) -> None:
        self._attributes = (read.names if read is not None else frozenset()) - TORCHS_OWN
        self._same, self._containers = Entries(), Entries()
        self._classes: list[tuple[type, str, Any]] = []
        self._owners: list[tuple[str, dict[str, Any]]] = [(path, vars(m)) for path, m in model.named_modules()]
        # Of each module how many attributes it has, and the names of those that it must not get.
        self._dictionaries = [own for _, own in self._owners]
        self._sizes = list(map(len, self._dictionaries))
        self._not_own: list[frozenset[str]] = []
        objects: set[int] = set()
        of_classes: dict[type, frozenset[str]] = {}
        for path, module in model.named_modules():
            own, kind = vars(module), type(module)
            self._same.add(own, FORWARD, own.get(FORWARD, MISSING), path)
            self._watch(path, own, objects)
            if kind not in of_classes:
                of_classes[kind] = frozenset() if read is None else self._watch_class(kind, read)
            self._not_own.append(of_classes[kind] - own.keys())

    def _watch(self, path: str, own: dict[str, Any], objects: set[int], depth: int = DEPTH) -> None:
        """Attributes in ``own``, that of the module at ``path`` or of an object in it."""
        for name in self._attributes & own.keys():
            value = own[name]
            if isinstance(value, PLAIN):
                self._same.add(own, name, value, path)
            elif is_plain(value):
                self._containers.add(own, name, copy.deepcopy(value), path)
            elif not isinstance(value, NOT_WATCHED):
                self._same.add(own, name, value, path)
                if depth and is_object(value) and id(value) not in objects:
                    objects.add(id(value))
                    self._watch(path_of(path, name), vars(value), objects, depth - 1)

    def _watch_class(self, kind: type, read: Read) -> frozenset[str]:
        """Methods of a class whose code was traced, and its plain attributes that were read; their names."""
        found: set[str] = set()
        for base in kind.__mro__:
            if base is nn.Module or base is object:
                continue
            for name, value in vars(base).items():
                plain = (name in read.names or name in read.keys) and is_plain(value)
                if name not in found and (plain or not read.code.isdisjoint(own_codes_of(value))):
                    found.add(name)
                    now = getattr(kind, name)
                    self._classes.append((kind, name, copy.deepcopy(now) if plain else now))
        return frozenset(found)

    def change(self) -> str:
        """What is not as it was, in words; empty if all is."""
        if any(any(map(itemgetter(kind), self._dictionaries)) for kind in HOOKS):
            for path, own in self._owners:
                if any(is_felt(hook) for hook in hooks_in(own)):
                    return f"hooks must not come after compiling, got one of {path or 'the model'!r}"
        if any(everywhere()):
            return "hooks must not come after compiling, got one of all modules"
        for path, name, known, now in (*self._same.others(), *self._containers.unequal()):
            if name == FORWARD:
                return f"forwards must stay those compiled, got another of {path or 'the model'!r}"
            if not is_plain(known):
                return f"{path_of(path, name)!r} must stay the object that it was when compiled, got another"
            if now is MISSING or now != known:  # a value may be another object that is equal
                got = None if now is MISSING else now
                return f"{path_of(path, name)!r} must stay {known!r}, as compiled, got {got!r}"
        return self._change_of_classes()

    def told(self) -> tuple[str, ...]:
        """All of it in words that are the same in another process as long as nothing is another."""
        entries = (*self._same.known(), *self._containers.known())
        classes = ((f"class {kind.__module__}.{kind.__qualname__}", name, value) for kind, name, value in self._classes)
        found = [f"{path} {name} {words_of(value)}" for path, name, value in (*entries, *classes)]
        found += [
            f"{path} without its own {sorted(names)}"
            for (path, _), names in zip(self._owners, self._not_own, strict=True)
        ]
        return tuple(sorted(found))

    def _change_of_classes(self) -> str:
        for kind, name, value in self._classes:
            now = getattr(kind, name, None)
            if now is not value and now != value:  # a class makes some methods anew each time
                return f"{name!r} of {kind.__name__} must stay what it was when compiled, got another"
        sizes = list(map(len, self._dictionaries))
        if sizes != self._sizes:
            for (path, own), names in zip(self._owners, self._not_own, strict=True):
                if new := names & own.keys():
                    return f"{path_of(path, min(new))!r} must stay that of its class, as compiled, got one of its own"
            self._sizes = sizes
        return ""


def words_of(value: Any) -> str:
    """A value by what it is; of what is no plain value or function only of which class."""
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(words_of, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {list(map(words_of, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__} {[(words_of(key), words_of(part)) for key, part in value.items()]}"
    if isinstance(value, (*PLAIN, *CONSTANTS)):
        return f"{type(value).__name__} {value!r}"
    codes = sorted(map(words_of_code, codes_of(value)))
    return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')} {codes}"


def words_of_code(code: CodeType) -> str:
    return _words_of_code(code, code.co_qualname)  # which two that are equal may have another of


@functools.lru_cache(2**13)  # methods of the same classes are told for every model
def _words_of_code(code: CodeType, _: str) -> str:
    """A digest: the words of all methods of a class are long."""
    constants = [words_of_code(c) if isinstance(c, CodeType) else words_of(c) for c in code.co_consts]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    told = f"{counts} {names} {code.co_code.hex()} {constants}"
    return f"{code.co_qualname} {hashlib.sha256(told.encode()).hexdigest()}"


def path_of(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def is_object(value: object) -> bool:
    """Whether a value is nothing but its attributes, as a configuration is."""
    return not isinstance(value, NO_OBJECTS) and isinstance(getattr(value, "__dict__", None), dict)


def codes_of(value: Any) -> set[CodeType]:
    """The code of a method or property as it stands in a class, with that of what it wraps."""
    found: set[CodeType] = set()
    parts: list[Any] = [value.fget] if isinstance(value, property) else [getattr(value, "__func__", value)]
    while parts:
        part = parts.pop()
        code = getattr(part, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
        if hasattr(part, "__wrapped__"):
            parts.append(part.__wrapped__)
    return found


def own_codes_of(value: Any) -> set[CodeType]:
    """Without that of decorators of PyTorch's and transformers', as `torch.no_grad`, which is the same around every
    function: a trace that has run it for one has not run the others, as `generate`."""
    part: Any = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while hasattr(part, "__wrapped__") and is_of_libraries(part):
        part = part.__wrapped__
    return codes_of(part)


def is_of_libraries(function: Any) -> bool:
    """By the file that it was written in, which `functools.wraps` leaves as it was."""
    package, _, _ = str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")
    return package in ("torch", "transformers")


def follow(own: nn.Module, copied: nn.Module) -> bool:
    """Give a copy of a module the plain attributes that the module has by now; whether one was another."""
    theirs, changed = vars(copied), False
    for name, value in vars(own).items():
        if name in NOT_FOLLOWED:
            continue
        if is_plain(value) and (name not in theirs or theirs[name] != value):
            theirs[name] = copy.deepcopy(value)
            changed = True
        elif not is_plain(value) and theirs.get(name) is not value:
            theirs[name] = value
            changed = True
    for name in theirs.keys() - vars(own).keys() - NOT_FOLLOWED:
        del theirs[name]
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


def names_read(guards: Iterable[Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the attributes, and keys, that Dynamo's guards of a trace look at, anywhere on their way."""
    found: set[str] = set()
    keys: set[str] = set()
    seen: set[int] = set()
    for guard in guards:
        source = getattr(guard, "originating_source", None)
        while source is not None and id(source) not in seen:
            seen.add(id(source))
            base = getattr(source, "base", None)
            # A key counts in an object's own dictionary alone: in that of its class it is of the class.
            own = getattr(base, "member", None) == "__dict__"
            name, key = getattr(source, "member", None), getattr(source, "index", None)
            if own:
                name = key
            if isinstance(name, str):
                found.add(name)
            if isinstance(key, str):
                keys.add(key)
            source = base
    return frozenset(found), frozenset(keys)


def hooks_in(own: dict[str, Any]) -> list[Any]:
    """Forward hooks in the dictionary of a module."""
    return [hook for kind in HOOKS for hook in own[kind].values()]


def is_felt(hook: Any) -> bool:
    """Not the hooks by which transformers records hidden states: once asked for, they stay, and wait to be asked. Nor
    those by which it, or peft, has embeddings require gradients: training leaves them there."""
    module, _, _ = str(getattr(hook, "__module__", "")).partition(".")
    return not (module in UNFELT and name_of(hook).rpartition(".")[2].endswith(UNFELT[module]))


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
