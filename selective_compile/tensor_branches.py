"""What a model's code asks of a tensor that tells nothing but how long a request is: answered while Dynamo traces.

    if torch.max(position_ids) + 1 > 4096: ...

Dynamo ends a graph there, for it does not know what tensors hold.  Where no more than the number of tokens is needed to
compute it, it is computed: at the shortest length that a trace is to hold for, and, as `length_conditions` does, at all
others up to `DENSE` and around every constant and power of two beyond, which tells up to which length it stays so.
"""

from __future__ import annotations

import dis
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.evaluate import concrete, constants_in, moved_to
from selective_compile.passes.length_conditions import DENSE, LARGEST
from selective_compile.passes.lengths import CAPTURE_TOKENS, lengths_around

# Python's instructions that go one way or the other by what a value is, which most take off the stack.
JUMPS = {number: name for name, number in dis.opmap.items() if "JUMP" in name and ("TRUE" in name or "FALSE" in name)}
KEEPS = "OR_POP"  # those that leave it there where they jump
CPU = torch.device("cpu")
# What writes to its arguments: operators of Python's, methods of theirs, arguments of PyTorch's functions by name.
IN_PLACE = {
    getattr(operator, name)
    for name in (
        "setitem",
        "delitem",
        *(f"i{each}" for each in "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()),
    )
}
WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")
WRITTEN = {"out", "inplace"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``node`` of Dynamo's graph is as it was answered from the first length of a trace up to ``longest``."""

    node: str
    holds: bool
    longest: int


class Branches:
    """The answers of one trace, for requests of ``shortest`` tokens and more; ``asked`` has them in order."""

    def __init__(self, shortest: int) -> None:
        self.asked: list[Asked] = []
        self._shortest = shortest
        self._thread = threading.get_ident()

    @property
    def longest(self) -> int:
        """How long requests may be; `LARGEST` if as long as one likes."""
        return min((each.longest for each in self.asked), default=LARGEST)

    @property
    def turning(self) -> Asked | None:
        """By which it is told which requests are longer than that."""
        return next((each for each in self.asked if each.longest == self.longest < LARGEST), None)

    def answer(self, node: fx.Node) -> bool | None:
        """None where it is not known, or stays so for a few lengths only."""
        lengths = lengths_around(constants_in(node), self._shortest, dense=DENSE, largest=LARGEST)
        try:
            with _disable_current_modes(), torch.no_grad():
                values = [value_at(node, length) for length in lengths]
        except Unknown:
            return None
        change = next((place for place, value in enumerate(values) if value != values[0]), None)
        longest = LARGEST if change is None else lengths[change - 1]
        if longest <= CAPTURE_TOKENS:
            return None
        self.asked.append(Asked(node=node.name, holds=values[0], longest=longest))
        return values[0]

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Dynamo asks here, in this thread, before it gives up."""
        tables = [kind.dispatch_table for kind in kinds_of(InstructionTranslatorBase) if "dispatch_table" in vars(kind)]
        before = [list(table) for table in tables]
        try:
            for table in tables:
                for number, name in JUMPS.items():
                    if table[number] is not None:
                        table[number] = self._instead_of(table[number], name)
            yield
        finally:
            for table, original in zip(tables, before, strict=True):
                table[:] = original

    def _instead_of(self, original: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
        def jump(tx: Any, instruction: Any) -> Any:
            known = self._known(tx.stack[-1]) if threading.get_ident() == self._thread else None
            if known is None:
                return original(tx, instruction)
            jumps = known == ("TRUE" in name)
            if not (jumps and name.endswith(KEEPS)):
                tx.pop()
            if jumps:
                tx.jump(instruction)
            return None

        return jump

    def _known(self, value: Any) -> bool | None:
        return self.answer(value.as_proxy().node) if value.is_tensor() else None


class Unknown(Exception):
    """What a tensor holds depends on more than the number of tokens."""


def value_at(node: fx.Node, length: int) -> bool:
    """Of a node of Dynamo's graph. Raises `Unknown`."""
    values: dict[fx.Node, Any] = {}
    for current in computed_from(node):
        example: Any = current.meta.get("example_value")
        if is_symbolic(example):
            values[current] = concrete(example, dict.fromkeys(example.node.expr.free_symbols, length))
        elif current.op in ("call_function", "call_method"):
            values[current] = called(current, values)
        else:
            raise Unknown(current.name)
    try:
        return bool(values[node])
    except RuntimeError as error:  # of more values than one
        raise Unknown(str(error)) from error


def computed_from(node: fx.Node) -> list[fx.Node]:
    """In an order in which they can be computed, not looking behind sizes."""
    found: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, Sequence[fx.Node]]] = [(node, ())]
    while stack:
        current, ready = stack.pop()
        if current in found:
            continue
        parents = [] if is_symbolic(current.meta.get("example_value")) else current.all_input_nodes
        if ready or not parents:
            found[current] = None
        else:
            stack.append((current, parents))
            stack += [(parent, ()) for parent in parents]
    return list(found)


def called(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """On the CPU, wherever the model is."""
    if writes(node):
        raise Unknown(node.name)
    args, kwargs = moved_to(CPU, node, values)
    try:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Unknown(node.name) from error


def writes(node: fx.Node) -> bool:
    """Whether it may be there for what it does, and not for what it gives."""
    if getattr(operator, str(getattr(node.target, "__name__", None)), None) is node.target:
        return node.target in IN_PLACE
    name = str(getattr(node.target, "__name__", node.target))
    return (name.endswith("_") and not name.endswith("__")) or name in WRITING or not WRITTEN.isdisjoint(node.kwargs)


def kinds_of(kind: Any) -> list[Any]:
    derived: list[Any] = kind.__subclasses__()
    return [kind, *(each for one in derived for each in kinds_of(one))]
