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
from functools import partial
from typing import Any, Final

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.evaluate import concrete, constants_in, moved_to
from selective_compile.passes.length_conditions import DENSE, LARGEST
from selective_compile.passes.lengths import ALL_LENGTHS, CAPTURE_TOKENS, Answer, answer, lengths_around

# Python's instructions that go one way or the other by what a value is, which most take off the stack.
JUMPS = {number: name for name, number in dis.opmap.items() if "JUMP" in name and ("TRUE" in name or "FALSE" in name)}
KEEPS = "OR_POP"  # those that leave it there where they jump
TABLE = "dispatch_table"
CALLS = ("call_function", "call_method")
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


class ThreadsOwn(threading.local):
    branches: Branches | None = None  # those that answer in this thread


ASKED: Final = ThreadsOwn()
LOCK: Final = threading.Lock()
ORIGINALS: Final[list[tuple[list[Any], list[Any]]]] = []  # Dynamo's tables, and what was in them, while any trace asks
ASKING: Final[list[Branches]] = []


class Branches:
    """The answers of one trace, for requests of ``shortest`` tokens and more.

    ``asked`` has, in order, nodes of Dynamo's graph, by name, and what is known of them.
    """

    def __init__(self, shortest: int) -> None:
        self.asked: list[tuple[str, Answer]] = []
        self._shortest = shortest
        self._known: dict[str, Answer] = {}

    @property
    def longest(self) -> int:
        """How long requests may be; `ALL_LENGTHS` if as long as one likes."""
        return min((answer.longest for _, answer in self.asked), default=ALL_LENGTHS)

    @property
    def turning(self) -> tuple[str, Answer] | None:
        """By which it is told which requests are longer than that."""
        longest = self.longest
        return next((each for each in self.asked if each[1].longest == longest < ALL_LENGTHS), None)

    def answer(self, node: fx.Node) -> bool | None:
        """None where it is not known, or stays so for a few lengths only."""
        needed = computed_from(node)
        computed = formula(needed)
        try:
            if computed not in self._known:
                self._known[computed] = self._answer(node, needed)
        except UnknownError:
            return None
        found = self._known[computed]
        if found.longest <= CAPTURE_TOKENS:
            return None
        self.asked.append((node.name, found))
        return found.holds

    def _answer(self, node: fx.Node, needed: Sequence[fx.Node]) -> Answer:
        numbers = constants_in(node, behind=[each for each in needed if each.op in CALLS])
        lengths = lengths_around(numbers, self._shortest, dense=DENSE, largest=LARGEST)
        with _disable_current_modes(), torch.no_grad():
            return answer(partial(value_at, needed), sorted({self._shortest, *lengths}))

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Dynamo asks here, in this thread, before it gives up."""
        before = ASKED.branches
        with LOCK:
            ASKING.append(self)
            if not ORIGINALS:
                watch_jumps()
        ASKED.branches = self
        try:
            yield
        finally:
            ASKED.branches = before
            with LOCK:
                ASKING.remove(self)
                if not ASKING:
                    for table, original in ORIGINALS:
                        table[:] = original
                    ORIGINALS.clear()


def watch_jumps() -> None:
    """In the tables by which Dynamo calls its functions of instructions; one is of the classes that have one."""
    for table in [kind.dispatch_table for kind in kinds_of(InstructionTranslatorBase) if TABLE in vars(kind)]:
        ORIGINALS.append((table, list(table)))
        for number, name in JUMPS.items():
            if table[number] is not None:
                table[number] = jump_instead_of(table[number], name)


def jump_instead_of(original: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
    def jump(tx: Any, instruction: Any) -> Any:
        known = answered_at(tx)
        if known is None:
            return original(tx, instruction)
        jumps = known == ("TRUE" in name)
        if not (jumps and name.endswith(KEEPS)):
            tx.pop()
        if jumps:
            tx.jump(instruction)
        return None

    return jump


def answered_at(tx: Any) -> bool | None:
    """What is known of the value on the stack, if it is a tensor of the model's own graph."""
    branches = ASKED.branches
    if branches is None or not tx.stack[-1].is_tensor():
        return None
    node = tx.stack[-1].as_proxy().node
    return branches.answer(node) if node.graph is tx.output.root_tracer.graph else None


class UnknownError(Exception):
    """What a tensor holds depends on more than the number of tokens."""


def value_at(needed: Sequence[fx.Node], length: int) -> bool:
    """Of the last of these nodes of Dynamo's graph. Raises `UnknownError`."""
    values: dict[fx.Node, Any] = {}
    for current in needed:
        example: Any = current.meta.get("example_value")
        if is_symbolic(example):
            values[current] = concrete(example, dict.fromkeys(example.node.expr.free_symbols, length))
        elif current.op in CALLS:
            values[current] = called(current, values)
        else:
            raise UnknownError(current.name)
    try:
        return bool(values[needed[-1]])
    except RuntimeError as error:  # of more values than one
        raise UnknownError(str(error)) from error


def formula(needed: Sequence[fx.Node]) -> str:
    """By which nodes are told that are computed alike."""
    places = {node: place for place, node in enumerate(needed)}

    def told(node: fx.Node) -> str:
        if node.op not in CALLS:
            return str(node.meta.get("example_value") if is_symbolic(node.meta.get("example_value")) else node.name)
        given = fx.node.map_arg((node.args, node.kwargs), lambda each: f"#{places.get(each)}")
        return f"{node.target} {given}"

    return "\n".join(map(told, needed))


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
        raise UnknownError(node.name)
    args, kwargs = moved_to(CPU, node, values)
    try:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnknownError(node.name) from error


def writes(node: fx.Node) -> bool:
    """Whether it may be there for what it does, and not for what it gives."""
    if getattr(operator, str(getattr(node.target, "__name__", None)), None) is node.target:
        return node.target in IN_PLACE
    name = str(getattr(node.target, "__name__", node.target))
    return (name.endswith("_") and not name.endswith("__")) or name in WRITING or not WRITTEN.isdisjoint(node.kwargs)


def kinds_of(kind: Any) -> list[Any]:
    derived: list[Any] = kind.__subclasses__()
    return [kind, *(each for one in derived for each in kinds_of(one))]
