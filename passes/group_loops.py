"""Traces Python that loops over the groups which some token chose, as over the experts that were hit, into one graph.

    for expert in (mask.sum((-1, -2)) > 0).nonzero():    # mask [E, k, S]: which token chose which expert
        rows = torch.where(mask[expert])[...]
        if rows.numel() == 0: continue
        out.index_add_(0, rows, compute(x[rows]))

How often such a loop goes round depends on the tokens.  The trace goes round for the groups that it is told, and where
the code asks whether nothing was found it is told for which groups the answer is yes: so one graph can be had for any
answer, and `group_proof` compares them.  A loop over all experts that asks so is told by the number of what is asked
about.  How many were found it is told as a number only where Python takes nothing else, and for several numbers.
Whatever else the code asks of values ends the trace with a `RuntimeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from selective_compile.passes.found_rows import FoundRows
from selective_compile.passes.functional import make_functional
from selective_compile.passes.group_sizes import UNBINDS, GroupSizes
from selective_compile.passes.lengths import CAPTURE_TOKENS
from selective_compile.passes.normalise import Symbols, tidy
from selective_compile.passes.scattered_rows import add_rows
from selective_compile.passes.spellings import SPELT_OUT
from selective_compile.passes.unique_choices import UniqueChoices

NONZEROS = (Tensor.nonzero, torch.nonzero)
MANY = 2**40  # more tokens than there are
LENGTHS = (1, 2, 2**17 + 1)  # that are told: not all that are too large for one loop to go round for


@dataclass(frozen=True, kw_only=True)
class Given:
    """A tensor that the code is called with: with one entry for each token along ``token_dim``, unless it is None."""

    value: Tensor
    token_dim: int | None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """For which groups the loop goes round, all if None; for which of them nothing is said to be found; and of which
    finds outside of such a loop, by the order in which the code first asks.  ``length``: how many are found, else."""

    entered: frozenset[int] | None = None
    empty: frozenset[int] = frozenset()
    empty_alone: frozenset[int] = frozenset()
    length: int = LENGTHS[0]


@dataclass(frozen=True, kw_only=True)
class GroupTrace:
    """``module``'s graph is that of the code; ``hits`` are the nodes in it that found the groups of its loops.

    ``entered`` are the groups that a loop went round for; ``asked``: for each of them, the sizes of which was asked
    whether they are 0; ``asked_alone``: those that were asked about outside of such a loop.  ``told_length``: whether
    the code was told how many were found.  ``read``: by symbol, which size in which node's vector the host has read.
    """

    module: fx.GraphModule
    hits: tuple[fx.Node, ...]
    symbols: Symbols
    entered: frozenset[int]
    asked: dict[int, set[sympy.Symbol]]
    asked_alone: tuple[sympy.Symbol, ...]
    told_length: bool
    read: dict[sympy.Symbol, tuple[fx.Node, int]]


class GroupError(Exception):
    """The code fails for ``group`` of ``groups``: a model in which some token chose it would fail as well."""

    def __init__(self, group: int, groups: int) -> None:
        self.group, self.groups = group, groups


class GroupLoops(TorchFunctionMode):
    """Within, a loop over the rows of ``nonzero(vector)`` goes over the groups that ``answers`` says."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers
        self.found: list[tuple[Tensor, int]] = []  # what was found in a vector, and its length
        self.looped: list[Tensor] = []  # of these, what a loop went over
        self.entered: set[int] = set()
        self.asked: dict[int, set[sympy.Symbol]] = {}
        self.asked_alone: dict[sympy.Symbol, int] = {}
        self.current: int | None = None
        self.groups = 0
        self.rows = FoundRows(self.length_of)
        self.sizes = GroupSizes(self.was_told_empty, self.is_told_empty)
        self.unique = UniqueChoices(self.sizes.groups_of, self.has_none)
        self.told_length = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in UNBINDS and len(args) == 2 and args[1] == 0 and not kwargs:
            for hits, groups in self.found:
                if hits is args[0]:
                    self.looped.append(hits)
                    return self.rounds(groups, hits.device)
        args = self.unique.with_numbers(func, args)
        result = self.unique.call(func, args, kwargs)
        result = self.sizes.call(func, args, kwargs) if result is None else result
        result = self.rows.call(func, args, kwargs) if result is None else result
        self.sizes.note(func, args, kwargs, result)
        self.unique.note(func, args, result)
        if func in NONZEROS and isinstance(result, Tensor) and args[0].dim() == 1 and isinstance(args[0].shape[0], int):
            self.found.append((result, args[0].shape[0]))
        return result

    def rounds(self, groups: int, device: torch.device) -> Iterator[Tensor]:
        chosen, self.groups = self.answers.entered, groups
        for group in range(groups):
            if chosen is None or group in chosen:
                self.entered.add(group)
                self.current = group
                yield torch.tensor([group], device=device)
        self.current = None

    def has_none(self, chosen: Tensor, group: int) -> bool:
        """Whether the code is told that no token chose the group."""
        mask = self.rows.call(Tensor.__eq__, (chosen, group), {})
        return bool(self.rows.places(mask)[0].shape[0] == 0)

    def length_of(self, size: torch.SymInt) -> int:
        if size == 0:
            return 0
        self.told_length = True
        return self.answers.length

    def is_empty(self, expression: Any) -> bool | None:
        """What ``expression`` is, if it asks whether a size that depends on values is 0; else None."""
        if not isinstance(expression, sympy.core.relational.Relational) or expression.has(sympy.Function):
            return None
        difference = sympy.expand(expression.lhs - expression.rhs)  # of a bound and the next, which is a size
        symbols = list(difference.free_symbols)
        if len(symbols) != 1 or not difference.is_polynomial(*symbols) or sympy.degree(difference, *symbols) != 1:
            return None
        symbol = symbols[0]
        asked = type(expression)(difference, 0)
        nothing, *others = (bool(asked.subs(symbol, size)) for size in (0, 1, 2, MANY))
        if any(other == nothing for other in others):
            return None
        return nothing if self.is_told_empty(symbol) else not nothing

    def was_told_empty(self, symbol: sympy.Symbol) -> bool:
        return self.asked_alone.get(symbol) in self.answers.empty_alone

    def is_told_empty(self, symbol: sympy.Symbol) -> bool:
        if self.current is None:
            return self.asked_alone.setdefault(symbol, len(self.asked_alone)) in self.answers.empty_alone
        self.asked.setdefault(self.current, set()).add(symbol)
        return self.current in self.answers.empty


class AnsweringEnv(ShapeEnv):
    """Asks ``loops`` what nothing else can say."""

    loops: GroupLoops

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = self.loops.is_empty(orig_expr)
            if answer is None:
                raise
            return sympy.true if answer else sympy.false


def trace_groups(
    run: Callable[[list[Tensor]], list[Tensor]], given: Sequence[Given], answers: Answers | None = None
) -> GroupTrace:
    """The graph of ``run``, with inputs for ``given``.

    Raises:
        GroupError: the code fails in the round of a group.
        What else the code raises, and `RuntimeError` where it depends on the values of its tensors in another way.
    """
    env = AnsweringEnv()
    symbols = Symbols(env)
    loops = env.loops = GroupLoops(answers or Answers())
    with symbols.mode, torch.no_grad():
        total = symbols.size("token", CAPTURE_TOKENS)
        fakes = [fake_of(one, total) for one in given]

        def traced(*values: Tensor) -> list[Tensor]:
            with loops:
                results = run(list(values))
            if not loops.rows.once.are_as_made():
                raise RuntimeError("writes to what it computes in the same way again")
            return [*results, *loops.looped, *(read.sizes for read in loops.sizes.read)]

        try:
            module = make_fx(traced, SPELT_OUT, tracing_mode="real", pre_dispatch=True)(*fakes)
        except IndexError as error:
            if loops.current is None:
                raise
            raise GroupError(loops.current, loops.groups) from error
    make_functional(module)
    add_rows(module)
    tidy(module)
    (*hits,) = apart(module.graph, len(loops.looped) + len(loops.sizes.read))
    counts = [hits.pop() for _ in loops.sizes.read][::-1]
    return GroupTrace(
        module=module,
        hits=tuple(hits),
        symbols=symbols,
        entered=frozenset(loops.entered),
        asked=loops.asked,
        asked_alone=tuple(loops.asked_alone),
        told_length=loops.told_length,
        read={
            symbol: (node, group)
            for node, read in zip(counts, loops.sizes.read, strict=True)
            for group, symbol in enumerate(read.symbols)
        },
    )


def apart(graph: fx.Graph, last: int) -> tuple[fx.Node, ...]:
    """The ``last`` results, which are taken out of them."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    results: list[Any] = list(output.args[0])
    split = len(results) - last
    output.args = (results[:split],)
    return tuple(results[split:])


def fake_of(given: Given, total: Any) -> Tensor:
    value = given.value
    shape = [total if dim == given.token_dim else size for dim, size in enumerate(value.shape)]
    return torch.empty(shape, dtype=value.dtype, device=value.device)
