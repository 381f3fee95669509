"""Matrix products of every spelling as one form: operands and their dimensions named by letters, as in an einsum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Mixes
from selective_compile.passes.rules_pointwise import broadcast, meet

aten = torch.ops.aten
Letters = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """``left[left_letters] * right[right_letters]`` summed over every letter that ``out`` lacks, plus ``bias``."""

    left: fx.Node
    right: fx.Node
    left_letters: Letters
    right_letters: Letters
    out: Letters
    bias: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def summed(self) -> Letters:
        return tuple(letter for letter in self.left_letters if letter not in self.out)

    def dim(self, operand: int, letter: str) -> int | None:
        letters = (self.left_letters, self.right_letters)[operand]
        return letters.index(letter) if letter in letters else None


def contraction_of(node: fx.Node) -> Contraction | None:
    """The contraction that a node computes, or None."""
    reader = READERS.get(getattr(node.target, "overloadpacket", None))
    return reader(node) if reader is not None else None


def rank(node: fx.Node) -> int:
    return node.meta["val"].dim()


def read_matmul(node: fx.Node) -> Contraction | None:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if rank(left) >= 2 and rank(right) == 1:  # one row of weights for all
        batch = tuple(f"b{i}" for i in range(rank(left) - 1))
        return Contraction(left=left, right=right, left_letters=(*batch, "k"), right_letters=("k",), out=batch)
    return product(left, right) if rank(left) >= 2 and rank(right) >= 2 else None


def product(left: fx.Node, right: fx.Node, **terms: Any) -> Contraction:
    """``[..., m, k] @ [..., k, n]`` with the leading dimensions aligned from the right."""
    depth = max(rank(left), rank(right)) - 2
    batch = tuple(f"b{i}" for i in range(depth))
    return Contraction(
        left=left,
        right=right,
        left_letters=(*batch[depth - rank(left) + 2 :], "m", "k"),
        right_letters=(*batch[depth - rank(right) + 2 :], "k", "n"),
        out=(*batch, "m", "n"),
        **terms,
    )


def read_linear(node: fx.Node) -> Contraction:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    batch = tuple(f"b{i}" for i in range(rank(left) - 1))
    bias = node.args[2] if len(node.args) > 2 else None
    assert bias is None or isinstance(bias, fx.Node)
    columns = ("n",) if rank(right) == 2 else ()  # one row of weights makes one number
    out = (*batch, *columns)
    return Contraction(
        left=left, right=right, left_letters=(*batch, "k"), right_letters=(*columns, "k"), out=out, bias=bias
    )


def read_added(node: fx.Node) -> Contraction:
    """``addmm`` and ``baddbmm``: beta * bias + alpha * left @ right."""
    bias, left, right = node.args[:3]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node) and isinstance(bias, fx.Node)
    scale = {name: float(node.kwargs.get(name, 1)) for name in ("alpha", "beta")}  # type: ignore[arg-type]
    return product(left, right, bias=bias, **scale)


def read_einsum(node: fx.Node) -> Contraction | None:
    equation, operands = node.args[:2]
    assert isinstance(equation, str)
    inputs, _, out = equation.partition("->")  # as `spellings` has left it
    first, second = inputs.split(",")
    left, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else node.all_input_nodes * 2
    return Contraction(left=left, right=right, left_letters=tuple(first), right_letters=tuple(second), out=tuple(out))


READERS: dict[Any, Callable[[fx.Node], Contraction | None]] = {
    aten.matmul: read_matmul,
    aten.mm: read_matmul,
    aten.mv: read_matmul,
    aten.bmm: read_matmul,
    aten.linear: read_linear,
    aten.addmm: read_added,
    aten.baddbmm: read_added,
    aten.einsum: read_einsum,
}


def contraction_axes(node: fx.Node, axes_of: Callable[[Any], Axes]) -> Any:
    """Transfer rule: Axes; ``(kind, Axes)`` where keys are summed away; None where the node is no contraction."""
    found = contraction_of(node)
    if found is None:
        return None
    left, right = axes_of(found.left), axes_of(found.right)
    columns: dict[str, list[Dim]] = {}
    for axes, letters in ((left, found.left_letters), (right, found.right_letters)):
        for letter, dim in zip(letters, axes.dims, strict=True):
            columns.setdefault(letter, []).append(dim)
    over_keys = [summed_over_tokens(columns[letter]) for letter in columns if letter not in found.out]
    out = Axes(dims=tuple(meet(columns[letter]) for letter in found.out), inputs=left.inputs | right.inputs)
    if found.bias is not None:
        bias = axes_of(found.bias)
        out = Axes(dims=broadcast([out.dims, bias.dims]), inputs=out.inputs | bias.inputs)
    return ("sum over the key axis", out) if any(over_keys) else out


def summed_over_tokens(column: list[Dim]) -> bool:
    if all(isinstance(factor, int) for dim in column for factor in dim):
        return False
    if len(column) == 2 and column[0] == column[1] == (Axis.TOKEN,):
        return True
    raise Mixes(f"sums over a dimension that enumerates {column}")
