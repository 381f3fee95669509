"""What a trace holds for: the conditions that Dynamo guards, told in words that are the same in another process.

Dynamo's guards are on objects of one process, by their addresses.  Here each is what its object is: a value; a class, a
module or a function by its name, and a function by its code, too; which keys a dictionary has.  What cannot be told,
as which one an object is, is refused, so that a trace is either held to all of its guards or not kept at all.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo.guards import _get_closure_vars
from torch._dynamo.source import AttrSource
from torch._guards import Source

from selective_compile.told_objects import PLAIN, Words

ALIAS: Final = "__import_"  # Dynamo's names for modules among the globals
BUILTINS: Final = "__builtins_dict__"
# Of the process and not of an object: `settings_of_process` has those that a graph depends on, and the number of
# tokens is looked at where it is traced (`capture.longest_of_graph`).
OF_PROCESS: Final = frozenset(
    {
        "GRAD_MODE",
        "FSDP_TRAINING_STATE",
        "GLOBAL_STATE",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "TORCH_FUNCTION_STATE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "SHAPE_ENV",
    }
)
# A table of transformers with every class of which the process has made a model, in the order that they came. A model
# looks up its own, which a kept capture tells apart (`kept_captures.recorders_of`); Dynamo guards them all.
RECORDERS: Final = "._CAN_RECORD_REGISTRY"
UNKNOWN: Final = "unknown"  # the kind of what is asked in another way
# Whose question has a part beside the object; what others are given is of Dynamo's own use.
ASKED_WITH: Final = frozenset(
    {
        "DUPLICATE_INPUT",
        "HASATTR",
        "NOT_PRESENT_IN_GENERIC_DICT",
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "SET_CONTAINS",
        "SET_NOT_CONTAINS",
    }
)


@dataclass(frozen=True)
class Condition:
    """``source`` is an expression of the locals ``L`` and globals ``G`` of the traced call, ``kind`` one of Dynamo's
    names, and ``given`` what it was asked with: plain values, or another expression."""

    source: str
    kind: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Conditions:
    """``code``: an expression, compiled, that gives the objects of all ``traced``; ``digest``: of what was told."""

    traced: tuple[Condition, ...]
    code: bytes
    digest: str


def conditions_of(guards: Iterable[Any]) -> tuple[Condition, ...]:
    """Of Dynamo's guards; of the kind `UNKNOWN` where one is asked in a way that is not known here."""
    found: dict[Condition, None] = {}
    for guard in guards:
        kind, asked = guard.create_fn_name(), guard.originating_source
        if kind in OF_PROCESS or RECORDERS in asked.name:
            continue
        given: tuple[Any, ...] = ()
        if kind in ASKED_WITH and isinstance(guard.create_fn, functools.partial):
            arguments = (*guard.create_fn.args, *guard.create_fn.keywords.values())
            given = tuple(told_source(value) if isinstance(value, Source) else value for value in arguments)
        elif kind == "HASATTR":  # of torch 2.11, which asks with the attribute itself, though it may not be there
            if not isinstance(asked, AttrSource):
                kind = UNKNOWN
            else:
                given, asked = (asked.member,), asked.base
        if not all(isinstance(value, PLAIN) for value in given):
            kind, given = UNKNOWN, ()
        found[Condition(told_source(asked), kind, given)] = None
    return tuple(found)


def told_source(source: Source) -> str:
    """Dynamo names PyTorch, where a class is asked for, by its address."""
    return re.sub(rf"G\['_{id(torch)}_c[^']*'\]", f"G['{alias_of('torch')}']", source.name)


def told(conditions: tuple[Condition, ...], call: Callable[..., Any], arguments: list[Tensor]) -> Conditions:
    """The ``conditions`` of the traced ``call`` as they are now.

    Raises:
        ValueError: one cannot be told.
    """
    sources = [f"({one.source},{others_of(one)})" for one in conditions]
    code = compile(f"[{','.join(sources)}]", "<guards>", "eval")
    return Conditions(conditions, marshal.dumps(code), digest_of(code, conditions, call, arguments))


def others_of(condition: Condition) -> str:
    return f"{condition.given[0]}," if condition.kind == "DUPLICATE_INPUT" else ""


def hold(known: Conditions, call: Callable[..., Any], arguments: list[Tensor]) -> bool:
    """Whether all of it is told in the same words of a ``call`` of this process.

    Raises:
        Exception: something is not there any more, or cannot be told.
    """
    return digest_of(marshal.loads(known.code), known.traced, call, arguments) == known.digest


def digest_of(
    code: CodeType, conditions: tuple[Condition, ...], call: Callable[..., Any], arguments: list[Tensor]
) -> str:
    namespace = {**_get_closure_vars(), "L": locals_of(call, arguments), "G": Globals(call)}
    digest = hashlib.sha256()
    words = Words()
    for one, objects in zip(conditions, eval(code, namespace), strict=True):
        digest.update(f"{one.kind} {one.given} {words.of(one.kind, one.given, objects)}\n".encode())
    return digest.hexdigest()


def locals_of(call: Callable[..., Any], arguments: list[Tensor]) -> dict[str, Any]:
    assert isinstance(call, FunctionType)
    return {
        **dict(zip(inspect.signature(call).parameters, arguments, strict=True)),
        **inspect.getclosurevars(call).nonlocals,
    }


class Globals(dict[str, Any]):
    """Of a function, and the names that Dynamo adds for modules that are loaded."""

    def __init__(self, call: Callable[..., Any]) -> None:
        assert isinstance(call, FunctionType)
        super().__init__({name: value for name, value in call.__globals__.items() if not name.startswith(ALIAS)})
        self._modules = {alias_of(name): module for name, module in list(sys.modules.items())}

    def __missing__(self, name: str) -> Any:
        if name.startswith(BUILTINS):
            return vars(sys.modules["builtins"])
        return self._modules[name]


def alias_of(module: str) -> str:
    return ALIAS + module.replace(">", "_").replace("<", "_").replace(".", "_dot_")
