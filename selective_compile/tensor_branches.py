"""What a model's code asks of a tensor that tells nothing but how long a request is: answered while Dynamo traces.

    if torch.max(position_ids) + 1 > 4096: ...

Dynamo ends a graph there, for it does not know what tensors hold.  Here it does where what is asked is made of the
positions that `generate` hands a model, by nothing but functions that grow, or fall, with these: then it turns once at
most, and where is looked for.  It must be the same of a request's last tokens alone, as a step of `generate` has them.

    if attention_mask is not None and not attention_mask.all(): ...

It does not end there either where what is asked is made of the attention mask, which an engine hands a model as ones
and nothing else, by functions of which the result is the same for as many ones as there may be; or where it is asked of
all of a table that the request's length alone makes, and is the same for all lengths (`length_tables`); or of the
model's own buffers, which are to keep their values then (`buffer_questions`).

Whether what is asked was written to meanwhile is seen when the trace is done (`graph_writes`).
"""

from __future__ import annotations

import dis
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.buffer_questions import question_of
from selective_compile.length_tables import nodes_in, table_of
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.passes.axes import size_expression
from selective_compile.passes.lengths import ALL_LENGTHS, CAPTURE_TOKENS, Answer, answer
from selective_compile.passes.normalise import source_name

# Python's instructions that go one way or the other by what a value is, which most take off the stack.
JUMPS = {number: name for name, number in dis.opmap.items() if "JUMP" in name and ("TRUE" in name or "FALSE" in name)}
NOT = dis.opmap["UNARY_NOT"]
KEEPS = "OR_POP"  # those that leave it there where they jump
TABLE = "dispatch_table"
NUMBER = "method_item"  # Dynamo's, for `item`, by which it also knows whether a tensor is true
NUMBER_ASKED = getattr(TensorVariable, NUMBER)
POSITIONS = "positions_of_tokens"  # the function of `model_call` that makes them
# Of one tensor and numbers, and monotonic in the former.
FUNCTIONS = {
    *(torch.max, torch.amax, torch.add, torch.sub, torch.mul, torch.gt, torch.ge, torch.lt, torch.le),
    *(operator.getitem, operator.add, operator.sub, operator.mul),
    *(operator.gt, operator.ge, operator.lt, operator.le),
}
METHODS = {
    *("max", "amax", "add", "sub", "mul", "gt", "ge", "lt", "le"),
    *("to", "long", "int", "float", "unsqueeze", "squeeze", "view", "reshape", "contiguous", "clone"),
}
# Of one tensor of ones and numbers: beside these, what does not grow with their count.
COMPARED = {operator.eq, operator.ne, torch.eq, torch.ne, "eq", "ne", "__eq__", "__ne__"}
SUMS = {torch.sum, "sum"}  # which grow with them, and are known where they are compared with their count
OF_ONES = {
    *SUMS,
    *(torch.all, torch.any, torch.min, torch.amin, torch.eq, torch.ne, torch.logical_not, torch.bitwise_not),
    *(operator.eq, operator.ne, operator.invert, operator.not_),
    *("all", "any", "min", "amin", "eq", "ne", "__eq__", "__ne__", "logical_not", "bitwise_not", "bool", "item"),
}
WIDE = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)  # others begin anew, or have no such number
CANNOT_BE_MADE = (RuntimeError, TypeError, ValueError, AttributeError)
WHOLE = 2**14  # tokens of a request of which all are looked at, and not only the last ones


class ThreadsOwn(threading.local):
    branches: Branches | None = None  # those that answer in this thread


ASKED: Final = ThreadsOwn()
LOCK: Final = threading.Lock()
ORIGINALS: Final[list[tuple[list[Any], list[Any]]]] = []  # Dynamo's tables, and what was in them, while any trace asks
ASKING: Final[list[Branches]] = []


class Branches:
    """The answers of one trace, for requests of ``shortest`` tokens and more.

    ``asked`` has, in order, nodes of Dynamo's graph, by name, and what is known of them; ``read``: the buffers that
    answers were read from, and ``behind`` the names of what was made of these and then asked.
    """

    def __init__(self, shortest: int, buffers: Collection[Tensor] = ()) -> None:
        """``buffers``: those of the model, which may be asked for their values."""
        self.asked: list[tuple[str, Answer]] = []
        self.read: list[Tensor] = []
        self.behind: set[str] = set()
        self._shortest, self.buffers = shortest, tuple(buffers)

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
        try:
            with _disable_current_modes(), torch.no_grad():
                found = self._found(node)
        except UnknownError:
            return None
        if found is None or found.longest <= CAPTURE_TOKENS:
            return None
        self.asked.append((node.name, found))
        return found.holds

    def _found(self, node: fx.Node) -> Answer | None:
        """Raises `UnknownError`."""
        chain, table = chain_of(node), table_of(node)
        if chain is not None:
            powers = (2**power for power in range(24) if 2**power > self._shortest)
            return answer(partial(value_at, chain), sorted({self._shortest, *powers, ALL_LENGTHS}))
        if table is None:
            return self._of_buffers(node)
        try:  # of more places, all and any turn once at most
            found = answer(table.holds, [self._shortest, ALL_LENGTHS])
        except CANNOT_BE_MADE as error:
            raise UnknownError(str(error)) from error
        return found if found.longest == ALL_LENGTHS else None

    def _of_buffers(self, node: fx.Node) -> Answer | None:
        """Raises `UnknownError`."""
        question = question_of(node, {id(buffer) for buffer in self.buffers})
        if question is None:
            return None
        try:
            holds = question.holds()
        except CANNOT_BE_MADE as error:
            raise UnknownError(str(error)) from error
        self.read += question.buffers.values()
        self.behind |= {each.name for each in question.nodes}
        return Answer(holds=holds, longest=ALL_LENGTHS, once=False)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Dynamo asks here, in this thread, before it gives up."""
        before = ASKED.branches
        with LOCK:
            ASKING.append(self)
            if not ORIGINALS:
                watch_jumps()
                setattr(TensorVariable, NUMBER, number_known)
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
                    setattr(TensorVariable, NUMBER, NUMBER_ASKED)


def watch_jumps() -> None:
    """In the tables by which Dynamo calls its functions of instructions; one is of the classes that have one."""
    for table in [kind.dispatch_table for kind in kinds_of(InstructionTranslatorBase) if TABLE in vars(kind)]:
        ORIGINALS.append((table, list(table)))
        for number, name in JUMPS.items():
            if table[number] is not None:
                table[number] = jump_instead_of(table[number], name)
        table[NOT] = negated_instead_of(table[NOT])


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


def negated_instead_of(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def negated(tx: Any, instruction: Any) -> Any:
        known = answered_at(tx)
        if known is None:
            return original(tx, instruction)
        tx.pop()
        return tx.push(ConstantVariable.create(not known))

    return negated


def number_known(value: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    known = known_of(value, tx) if value.dtype is torch.bool else None
    return NUMBER_ASKED(value, tx, *args, **kwargs) if known is None else ConstantVariable.create(known)


def answered_at(tx: Any) -> bool | None:
    """What is known of the value on the stack, if it is a tensor of the model's own graph."""
    value = tx.stack[-1]
    return known_of(value, tx) if value.is_tensor() or isinstance(value, SymNodeVariable) else None


def known_of(value: Any, tx: Any) -> bool | None:
    branches = ASKED.branches
    if branches is None:
        return None
    node = value.as_proxy().node
    return branches.answer(node) if node.graph is tx.output.root_tracer.graph else None


class UnknownError(Exception):
    """It is not the same of a request and of its last tokens, or may turn more than once."""


def nodes_behind(node: fx.Node) -> Sequence[fx.Node]:
    """What ``node``, of which something is known, is made of."""
    table = table_of(node)
    return chain_of(node) or (() if table is None else table.nodes)


def chain_of(node: fx.Node) -> list[fx.Node] | None:
    """From the positions, as `capture` makes them, or the mask; None where ``node`` is made of anything else."""
    chain = [node]
    while not is_positions(node) and not is_mask(node):
        total = sum_of_all(node)
        if total is not None:
            chain.append(total)
            node = total
        if len(node.all_input_nodes) != 1 or node.kwargs.keys() & {"out", "dim", "axis"} or len(nodes_read(node)) != 1:
            return None
        if getattr(node.meta.get("example_value"), "dtype", torch.int64) not in WIDE:
            return None
        (node,) = node.all_input_nodes
        chain.append(node)
    beside = OF_ONES if is_mask(node) else set()
    known = {"call_function": FUNCTIONS | beside, "call_method": METHODS | beside}
    counted = all(before in map(sum_of_all, chain) for before in chain if before.target in SUMS)
    return chain[::-1] if counted and all(node.target in known.get(node.op, ()) for node in chain[:-1]) else None


def sum_of_all(node: fx.Node) -> fx.Node | None:
    """What ``node`` compares with how many numbers it is the sum of: of ones it is as many, however many there are."""
    reads = nodes_read(node)
    if node.target not in COMPARED or len(reads) != 2 or reads[0].target not in SUMS or len(reads[0].args) != 1:
        return None
    total, count = reads
    summed = nodes_read(total)[0].meta.get("example_value")
    if total.kwargs or not isinstance(summed, Tensor) or not is_size(count):
        return None
    return total if size_expression(summed.numel()) == size_expression(count.meta["example_value"]) else None


def is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymInt)


def is_mask(node: fx.Node) -> bool:
    return node.op == "placeholder" and source_name(node) == ATTENTION_MASK


def is_positions(node: fx.Node) -> bool:
    """Whether it is the one function that numbers the tokens of a request, called where `capture` does so."""
    return node.target is torch.arange and f"in {POSITIONS}" in (node.meta.get("stack_trace") or "")


def nodes_read(node: fx.Node) -> list[fx.Node]:
    """In the order of its arguments, each as often as it is there."""
    return nodes_in((node.args, node.kwargs))


def value_at(chain: Sequence[fx.Node], length: int) -> bool:
    """Of the last node, for requests of ``length`` tokens. Raises `UnknownError`."""
    numbers = torch.arange(max(length - WHOLE, 0), length, dtype=torch.int64, device="cpu")
    given = [numbers[-1:], numbers[-2:], *([numbers] if length <= WHOLE else [])]
    if is_mask(chain[0]):
        given = [torch.ones_like(positions)[None] for positions in given]
    try:
        results = [float(follow(chain, positions)) for positions in given]
    except Exception as error:
        raise UnknownError(str(error)) from error
    if len(set(results)) != 1 or (results[0] <= 0 and is_number(chain[-1])):
        raise UnknownError(f"{results} of {length} tokens")
    return bool(results[0])


def is_number(node: fx.Node) -> bool:
    """And neither true nor false."""
    value = node.meta["example_value"]
    return not isinstance(value, torch.SymBool) and getattr(value, "dtype", None) != torch.bool


def follow(chain: Sequence[fx.Node], value: Tensor) -> Tensor:
    """What the last node gives where the first one gives ``value``."""
    count = value.numel()  # of what a sum is over that is compared with it
    for node in chain[1:]:
        given = partial(number_or_count, value, count)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
        call: Any = getattr(type(value), str(node.target)) if node.op == "call_method" else node.target
        count, value = value.numel(), call(*args, **kwargs)
    return value


def number_or_count(value: Tensor, count: int, node: fx.Node) -> Any:
    return count if is_size(node) else value


def kinds_of(kind: Any) -> list[Any]:
    derived: list[Any] = kind.__subclasses__()
    return [kind, *(each for one in derived for each in kinds_of(one))]
