"""Objects of a process in words that are the same in another one as long as nothing is another.

A value is told as it is; a class by its name, its file and all that it and its bases have; a module by its name and
file; a function by its name and its code.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import sys
import typing
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, Final

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from transformers.utils import import_utils

from selective_compile.live_settings import words_of, words_of_code
from selective_compile.named_tensors import kind_of

PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
BUILT_IN: Final = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
# What is in the dictionaries of classes and none of their code.
OF_THE_INTERPRETER: Final = frozenset(
    {"__abstractmethods__", "_abc_impl", "__weakref__", "__dict__", "__doc__", "__slotnames__"}
)
OF_AUTOCAST: Final = ("device", "fast_dtype", "_enabled", "_cache_enabled")
OF_TORCH: Final = frozenset({"is_torch_available", "get_torch_version", "version", "parse", "base_version"})
PUT_BY_DYNAMO: Final = frozenset({"__init__", "__setstate__", "___needs_generation_tag_patch"})  # when it first traces


class Words:
    """Objects by what a guard of a kind asks of them."""

    def __init__(self) -> None:
        self._codes: dict[int, str] = {}
        self._classes: dict[type, str] = {}

    def of(self, kind: str, given: tuple[Any, ...], objects: tuple[Any, ...]) -> str:
        """Raises ValueError for what is the same in one process alone, and for guards that are not known here."""
        value = objects[0]
        match kind:
            case "TYPE_MATCH":
                return self.of_class(type(value))
            case (
                "CONSTANT_MATCH" | "EQUALS_MATCH" | "BOOL_MATCH" | "NONE_MATCH" | "ID_MATCH" | "FUNCTION_MATCH"
                | "CLOSURE_MATCH" | "BUILTIN_MATCH" | "CLASS_MATCH" | "MODULE_MATCH"
            ):  # fmt: skip
                return self.of_value(value)
            case "TENSOR_MATCH":
                return f"{name_of(type(value))} {kind_of(value)}"
            case "DUPLICATE_INPUT":
                return str(value is objects[1])
            case "EMPTY_NN_MODULE_HOOKS_DICT" | "SEQUENCE_LENGTH":
                return f"{name_of(type(value))} {len(value)}"
            case "DICT_KEYS_MATCH" | "MAPPING_KEYS_CHECK":
                return f"{name_of(type(value))} {[self.of_value(key) for key in value]}"
            case "HASATTR":
                return str(hasattr(value, given[0]))
            case "NOT_PRESENT_IN_GENERIC_DICT":
                return str(given[0] in vars(value))
            case "DICT_CONTAINS" | "DICT_NOT_CONTAINS":
                return str(dict.__contains__(value, given[0]))
            case "SET_CONTAINS" | "SET_NOT_CONTAINS":
                return str(set.__contains__(value, given[0]))
        raise ValueError(f"conditions must be told alike in every process, got {kind} of {type(value).__name__}")

    def of_value(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"{name_of(type(value))} {[self.of_value(part) for part in value]}"
        if isinstance(value, (set, frozenset)):
            return f"{name_of(type(value))} {sorted(map(self.of_value, value))}"
        if isinstance(value, (range, slice)):
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{name_of(type(value))} {value.name} {words_of(value.value)}"
        if isinstance(value, PLAIN):
            return f"{name_of(type(value))} {value!r}"
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, typing._SpecialForm):
            return f"typing.{value._name}"  # type: ignore[attr-defined]
        if isinstance(value, UnionType):
            return f"any of {[self.of_value(part) for part in value.__args__]}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__} {file_of(value)}"
        if isinstance(value, (OpOverload, OpOverloadPacket)):
            return f"operator {value}"
        if isinstance(value, BUILT_IN):
            return f"{name_of(type(value))} {getattr(value, '__module__', '')} {value.__qualname__}"
        if isinstance(value, FunctionType) and (not is_marked_constant(value) or asks_for_torch_alone(value)):
            return f"{value.__module__}.{value.__qualname__} {self.of_code(value.__code__)} {defaults_of(value)}"
        if isinstance(value, CodeType):
            return self.of_code(value)
        if type(value) is torch.autocast:  # around a forward, as accelerate puts it there
            return f"autocast {[getattr(value, name) for name in OF_AUTOCAST]}"
        raise ValueError(f"conditions must be told alike in every process, got one of a {type(value).__name__}")

    def of_code(self, code: CodeType) -> str:
        if id(code) not in self._codes:
            self._codes[id(code)] = words_of_code(code)
        return self._codes[id(code)]

    def of_class(self, kind: type) -> str:
        """By all that it and its bases have, as methods, which Dynamo does not look at again."""
        if kind not in self._classes:
            told = [part for base in kind.__mro__ if base.__module__ != "builtins" for part in self._parts(base)]
            self._classes[kind] = f"{name_of(kind)} {hashlib.sha256(repr(told).encode()).hexdigest()}"
        return self._classes[kind]

    def _parts(self, base: type) -> list[str]:
        names = sorted(vars(base).keys() - OF_THE_INTERPRETER - (PUT_BY_DYNAMO if base is nn.Module else set()))
        own = [f"{name} {words_of(vars(base)[name])} {defaults_of(vars(base)[name])}" for name in names]
        if isinstance(base, abc.ABCMeta) and base.__module__.partition(".")[0] not in sys.stdlib_module_names:
            known = [reference() for reference in abc._get_dump(base)[0]]  # type: ignore[attr-defined]
            own += sorted(name_of(kind) for kind in known if kind is not None)
        return [name_of(base), file_of(sys.modules.get(base.__module__)), *own]


def is_marked_constant(function: FunctionType) -> bool:
    """Whether Dynamo takes what it answers for constant, and does not look at what it reads."""
    return bool(getattr(function, "_dynamo_marked_constant", False))


def asks_for_torch_alone(function: FunctionType) -> bool:
    """Whether it compares torch's version with what it is given, as transformers does in mixtures of experts; that
    version is told of the process."""
    known = function.__module__ == import_utils.__name__ and not function.__closure__
    if not known or not set(function.__code__.co_names) <= OF_TORCH:
        return False
    known_as = {torch.__version__, torch.__version__.partition("+")[0]}  # a wheel need not tell what it was built for
    return import_utils.is_torch_available() and import_utils.get_torch_version() in known_as


def defaults_of(value: Any) -> str:
    """Of a function's arguments, or a method's as it stands in a class."""
    function = getattr(value, "__func__", value)
    return words_of((getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)))


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def file_of(module: ModuleType | None) -> str:
    """Without asking a module that imports what it is asked for."""
    return str(getattr(module, "__dict__", {}).get("__file__", ""))
