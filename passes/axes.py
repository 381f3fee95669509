"""The abstract value of token-axis marking: which factors of which dimensions enumerate tokens.

A dimension is written as its factors, major to minor: a batch of ``B`` requests, their ``S`` tokens, and plain
integers.  ``[B, S, 64]`` is ``((BATCH,), (TOKEN,), (64,))``; after ``view(B * S, 64)`` it is
``((BATCH, TOKEN), (64,))``; a dimension of size 1 has no factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.utils._sympy.functions import Max, Min

from selective_compile.passes.lengths import SHORTEST, longest

if TYPE_CHECKING:
    from torch import fx


MAXIMA = (sympy.Max, Max)


def size_expression(size: Any) -> sympy.Expr:
    """A size, symbolic or not, as an expression."""
    return size.node.expr if hasattr(size, "node") else sympy.sympify(size)


class Axis(Enum):
    """A factor of a dimension that is not a plain constant."""

    BATCH = "batch"
    TOKEN = "token"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Permuted:
    """A factor: the elements of a dimension ``of``, put in the order that the node ``order`` sorts them into."""

    order: fx.Node
    of: Dim

    def __repr__(self) -> str:
        return f"{self.of} by {self.order.name}"


@dataclass(frozen=True)
class Extended:
    """A factor: the tokens of a request and ``count`` constants behind them, as an attention's sinks are."""

    count: int

    def __repr__(self) -> str:
        return f"TOKEN+{self.count}"


@dataclass(frozen=True)
class Part:
    """A factor: of the elements of ``of``, those of one ``group``; None before one of the ``groups`` is taken."""

    of: Permuted
    groups: int
    group: int | None = None

    def __repr__(self) -> str:
        return f"group {self.group} of {self.of}"


@dataclass(frozen=True)
class Chosen:
    """A factor: of the elements of the dimensions ``of``, the ``size`` many that ``finder`` found not to be 0."""

    finder: fx.Node
    of: tuple[Dim, ...]
    size: sympy.Expr

    def __repr__(self) -> str:
        return f"chosen by {self.finder.name}"


@dataclass(frozen=True)
class Selected:
    """A factor: the keys of a query that the node ``by`` selects, ``count`` of them or all that there are."""

    by: fx.Node
    count: int

    def __repr__(self) -> str:
        return f"{self.count} keys by {self.by.name}"


Factor = Axis | int | Permuted | Extended | Part | Chosen | Selected
Dim = tuple[Factor, ...]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How many elements each group has after ``order`` sorted them by group, or where each group ends.

    ``one``: the size of that group alone.  ``unsorted``: ``order`` is no sorting, but holds the groups' numbers.
    """

    order: fx.Node
    ends: bool = False
    one: int | None = None
    unsorted: bool = False


class Mixes(Exception):
    """Raised by a transfer rule: the node mixes tokens, or the rule cannot show that it does not."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What is known of one tensor.

    The claim: the element at batch index b and token index s is a function of token (b, s) alone (of the two tokens
    it names, where two dimensions carry TOKEN), of constants, and of nothing else.  Along a `Permuted` dimension it is
    a function of the token that was put there, and along a `Chosen` one of the token that was chosen.  ``inputs`` are
    the token-carrying graph inputs that the value depends on.  ``probed`` says that the claim rests on evaluation
    (`positional`), not on a rule.

    Two kinds of value make no such claim.  ``numbers``, unless empty: the value is an index into a dimension with these
    factors, of the element it stands for.  ``groups``: it holds the sizes or ends of groups of sorted tokens.  Only
    rules that know them may read them, see `opaque`.
    """

    dims: tuple[Dim, ...]
    numbers: Dim = ()
    inputs: frozenset[fx.Node] = frozenset()
    probed: bool = False
    groups: Groups | None = None

    def holding(self, axis: Axis) -> tuple[int, ...]:
        """Dimensions that have ``axis`` among their factors."""
        return tuple(i for i, dim in enumerate(self.dims) if axis in dim)

    @property
    def is_constant(self) -> bool:
        return all(isinstance(f, int) for dim in self.dims for f in dim)

    @property
    def opaque(self) -> bool:
        """Whether the value depends on what other tokens there are, as a place in an order of all of them does."""
        if not self.numbers:
            return self.groups is not None or any(isinstance(f, Selected) for dim in self.dims for f in dim)
        reordered = self.is_permuted or self.holding_parts or self.holding_chosen
        return reordered or self.numbers not in ((Axis.TOKEN,), (Axis.BATCH,))

    @property
    def is_permuted(self) -> bool:
        return any(isinstance(f, Permuted) for dim in self.dims for f in dim)

    @property
    def holding_parts(self) -> bool:
        return any(isinstance(f, Part) for dim in self.dims for f in dim)

    @property
    def holding_chosen(self) -> bool:
        return any(isinstance(f, Chosen) for dim in self.dims for f in dim)

    @property
    def is_pair(self) -> bool:
        return len(self.key_dims) == 2

    @property
    def key_dims(self) -> tuple[int, ...]:
        """Dimensions that enumerate a request's tokens, whether or not constants follow them."""
        return tuple(
            i for i, dim in enumerate(self.dims) if Axis.TOKEN in dim or any(isinstance(f, Extended) for f in dim)
        )

    def labelled(self, index: int) -> bool:
        return not all(isinstance(f, int) for f in self.dims[index])

    @property
    def flat_sizes(self) -> list[int]:
        """In a flat graph, -1 for the tokens; a batch, alone or merged with heads, counts 1."""
        plain = ([factor for factor in dim if isinstance(factor, int)] for dim in self.dims)
        return [-1 if Axis.TOKEN in dim else prod(sizes) for dim, sizes in zip(self.dims, plain, strict=True)]

    def plain(self) -> Axes:
        return replace(self, numbers=(), probed=False)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The two symbols of a captured graph.  ``batch`` is None where the batch is the constant 1.

    ``limit`` is the largest number of tokens that the graph is for, None if it is for any.
    """

    batch: sympy.Symbol | None
    token: sympy.Symbol
    limit: int | None = None

    def dim(self, size: object) -> Dim:
        """The factors of a freshly created dimension of ``size`` (int or SymInt); `Mixes` if it has none."""
        coefficient, batch, token = self.monomial(size)
        if batch > 1 or token > 1:
            raise Mixes(f"a new dimension of size {size}, which is no multiple of batch and tokens")
        factors: list[Factor] = [*[Axis.BATCH] * batch, *[Axis.TOKEN] * token]
        return tuple(factors) + ((coefficient,) if coefficient != 1 else ())

    def monomial(self, size: object) -> tuple[int, int, int]:
        """``size`` as coefficient * batch**i * token**j; `Mixes` where it is no such product."""
        if isinstance(size, int):
            return size, 0, 0
        expression = self.expression(size)
        powers = dict(expression.as_powers_dict())
        counts = [int(powers.pop(s, 0)) if s is not None else 0 for s in (self.batch, self.token)]
        rest = sympy.Mul(*(base**power for base, power in powers.items()))
        if not rest.is_Integer:
            raise Mixes(f"size {expression} is not a product of batch, tokens and a constant")
        return int(rest), counts[0], counts[1]

    def expression(self, size: Any) -> sympy.Expr:
        """A size as it is up to ``limit``: ``64 - max(0, 64 - S)`` is ``S`` for up to 64 tokens."""
        expression = size_expression(size)
        if self.limit is None:
            return expression
        return sympy.expand(expression.replace(is_extreme, lambda found: self.chosen(found)))

    def chosen(self, found: sympy.Expr) -> sympy.Expr:
        """The one argument that a maximum or minimum is for up to ``limit`` tokens; else that itself."""
        assert self.limit is not None
        sign = 1 if found.func in MAXIMA else -1
        for each in found.args:
            least = [sign * (each - other) for other in found.args if other is not each]
            if all(d.free_symbols <= {self.token} and longest(d >= 0, SHORTEST) >= self.limit for d in least):
                return each
        return found


def is_extreme(expression: sympy.Expr) -> bool:
    return expression.func in (*MAXIMA, sympy.Min, Min)


def is_symbolic(value: object) -> bool:
    """Whether a value computed at trace time depends on the number of requests or tokens."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def regroup(dims: tuple[Dim, ...], sizes: Sizes, shape: tuple[object, ...]) -> tuple[Dim, ...]:
    """The factors of ``dims`` over a new ``shape`` (a row-major view); `Mixes` if a factor is cut unevenly."""
    factors = [f for dim in dims for f in dim]
    regrouped: list[Dim] = []
    for size in shape:
        if factors and isinstance(factors[0], Chosen) and factors[0].size == sizes.expression(size):
            regrouped.append((factors.pop(0),))
            continue
        coefficient, batch, token = sizes.monomial(size)
        taken: list[Factor] = []
        while (coefficient, batch, token) != (1, 0, 0):
            if not factors:
                raise Mixes("a view that the factors of its input do not fill")
            head = factors.pop(0)
            if head is Axis.BATCH and batch:
                batch -= 1
            elif head is Axis.TOKEN and token:
                token -= 1
            elif isinstance(head, Permuted) and (left := without(head.of, (coefficient, batch, token))) is not None:
                coefficient, batch, token = left
            elif isinstance(head, int) and head and coefficient % head == 0:
                coefficient //= head
            elif isinstance(head, int) and coefficient > 1 and head % coefficient == 0:
                factors.insert(0, head // coefficient)
                head, coefficient = coefficient, 1
            else:
                raise Mixes("a view that cuts across the token dimension")
            taken.append(head)
        regrouped.append(tuple(taken))
    return tuple(merge_plain(dim) for dim in regrouped)


def without(dim: Dim, left: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """What is left of (coefficient, batches, tokens) when the factors of ``dim`` are taken out; None if they are not
    in it."""
    coefficient, batch, token = left
    plain = prod(f for f in dim if isinstance(f, int))
    batch, token = batch - dim.count(Axis.BATCH), token - dim.count(Axis.TOKEN)
    if coefficient % plain or batch < 0 or token < 0:
        return None
    return coefficient // plain, batch, token


def merge_plain(dim: Dim) -> Dim:
    """Neighbouring plain factors multiplied together."""
    merged: list[Factor] = []
    for factor in dim:
        last = merged[-1] if merged else None
        if isinstance(factor, int) and isinstance(last, int):
            merged[-1] = last * factor
        elif factor != 1:
            merged.append(factor)
    return tuple(merged)
