"""A model in words that are the same in another process as long as nothing that its calls could depend on is another.

Followed are its modules' attributes, with the objects in them, their functions' closures and the numbers of tensors,
each where it is met first; a second reference says which one it is.  The classes of its modules are told with all that
they have (`told_objects`), and so are those of transformers' caches, masks and `generate`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import cache_utils, masking_utils, modeling_utils
from transformers.generation import utils as generation

from selective_compile.kept_captures import kinds_of
from selective_compile.kept_weights import sums_of
from selective_compile.live_settings import is_object, words_of_code
from selective_compile.named_tensors import kind_of
from selective_compile.told_objects import OF_THE_INTERPRETER, Words, name_of

CONTAINERS = (list, tuple, dict, deque)
LIBRARIES = frozenset({"torch", "transformers", *sys.stdlib_module_names})
OF_THE_ENVIRONMENT = frozenset({"environ", "environb", "getenv"})
USED_BY_GENERATE = (cache_utils, masking_utils, generation)
HEAP_TYPE = 1 << 9  # CPython's flag of classes that were made by a statement
MOST = 100_000  # of what is told: a model that holds a data set is tried each time
# Hooks, of which none may be there, and what is told by itself.
OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers"}
OF_THIS_PROCESS = frozenset({"_original_object_hash"})  # of a `GenerationConfig`: of strings, which differ
OF_CLASSES = frozenset({"__annotations__", "__orig_bases__", "__parameters__", "__module__", "__qualname__"})


class ToldModel:
    """``digest``; `tell` adds to it.

    Raises:
        ValueError: something is told alike in one process alone, or there is too much of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._hash, self._words, self._count = hashlib.sha256(), Words(), 0
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # or another object could have its number
        self._modules = {id(module): path for path, module in model.named_modules()}
        for path, kind in kinds_of(model):
            self._add(f"{path} {self._words.of_class(kind)}")
        for kind in dict.fromkeys(base for _, each in kinds_of(model) for base in each.__mro__):
            self._tell_class(kind, all_of_it=not is_of_a_library(kind.__module__))
        for module in model.modules():
            self._tell_all({name: own for name, own in vars(module).items() if name not in OF_ANY_MODULE})
        for module in USED_BY_GENERATE:
            self._tell_code(module)
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        self.tell(modeling_utils.ALL_ATTENTION_FUNCTIONS.get(attention))

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:32]

    def tell(self, value: Any) -> None:
        if id(value) in self._modules:
            self._add(f"module {self._modules[id(value)]}")
        elif id(value) in self._numbers:
            self._add(f"again {self._numbers[id(value)]}")
        elif isinstance(value, (Tensor, *CONTAINERS, FunctionType, MethodType, partial)):
            self._begin(value)
            self._tell_parts(value)
        elif is_object(value) and not isinstance(value, (type, ModuleType, nn.Module)) and is_told_by_attributes(value):
            self._begin(value)
            self._add(self._words.of_class(type(value)))
            self._tell_all(vars(value))
        else:
            self._add(self._words.of_value(value))

    def _tell_parts(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tell_tensor(value)
        elif isinstance(value, dict):
            self._tell_all(value)
        elif isinstance(value, MethodType):
            self._tell_each(value.__func__, value.__self__)
        elif isinstance(value, partial):
            self._tell_each(value.func, value.args, value.keywords)
        elif isinstance(value, FunctionType):
            self._tell_function(value)
        else:
            self._tell_each(*value)
        if isinstance(value, CONTAINERS) and type(value) not in CONTAINERS:
            self._add(self._words.of_class(type(value)))
            self._tell_all(getattr(value, "__dict__", {}))

    def _tell_function(self, function: FunctionType) -> None:
        """With what its code may read beside its arguments; of a library's, which has a version, the functions that it
        has closed over alone."""
        self._add(words_of_code(function.__code__))
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
        if is_of_a_library(module_of(function)):
            self._tell_each(*(value for value in closure if isinstance(value, (FunctionType, MethodType))))
            return
        self._tell_each(function.__defaults__, function.__kwdefaults__, closure)
        names = names_in(function.__code__)
        if asked := names & OF_THE_ENVIRONMENT:
            raise ValueError(f"code must not read the environment, got {sorted(asked)} in {function.__qualname__}")
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            self._add(f"{name} {value.__name__}") if isinstance(value, (ModuleType, type)) else self.tell(value)

    def _tell_each(self, *values: Any) -> None:
        for value in values:
            self.tell(value)

    def _tell_all(self, named: dict[Any, Any]) -> None:
        for name, value in named.items():
            if name not in OF_THIS_PROCESS:
                self._tell_each(name, value)

    def _tell_tensor(self, value: Tensor) -> None:
        sums = sums_of(value).sums
        if sums is None:
            raise ValueError(f"tensors must have plain numbers, got one of {value.layout}")
        self._add(kind_of(value))
        self._hash.update(sums.cpu().numpy().tobytes())

    def _tell_class(self, kind: type, *, all_of_it: bool) -> None:
        """What its own code has put into it, and what its functions have closed over; or, of a class of a library,
        such functions as somebody else has put there."""
        for name, value in vars(kind).items():
            functions = [getattr(value, each, None) for each in ("__func__", "fget")]
            told = next((each for each in functions if each is not None), value)
            put_there = isinstance(told, FunctionType) and not is_of_a_library(module_of(told))
            if put_there or (all_of_it and name not in OF_THE_INTERPRETER | OF_CLASSES):
                self._tell_each(name, told)

    def _tell_code(self, module: ModuleType) -> None:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__:
                if isinstance(value, type):
                    self._add(self._words.of_class(value))
                elif isinstance(value, FunctionType):
                    self._add(f"{name} {words_of_code(value.__code__)}")

    def _begin(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        self._add(name_of(type(value)))
        if isinstance(value, CONTAINERS):
            self._add(str(len(value)))

    def _add(self, words: str) -> None:
        self._count += 1
        if self._count > MOST:
            raise ValueError(f"a model must be told by at most {MOST} values")
        self._hash.update(f"{len(words)} {words}".encode())


def is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def module_of(function: FunctionType) -> str:
    """Where its code is from, whatever it was named after what it wraps."""
    return str(function.__globals__.get("__name__", ""))


def names_in(code: CodeType) -> set[str]:
    """That it, and code within it, asks globals and objects for."""
    return set(code.co_names).union(*(names_in(part) for part in code.co_consts if isinstance(part, CodeType)))


def is_told_by_attributes(value: object) -> bool:
    """Whether it has no more than them: no slots, and nothing of a class that is written in C."""
    kinds = type(value).__mro__[:-1]
    return not any("__slots__" in vars(kind) and vars(kind)["__slots__"] for kind in kinds) and all(
        kind.__flags__ & HEAP_TYPE or kind is SimpleNamespace for kind in kinds
    )
