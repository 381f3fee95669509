"""Steps for the tests of rotary attention: a `Turn` says how heads are rotated, `rotary` draws tables and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.ragged_cases import Inputs


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How the heads of a step are normed and rotated; `last`: the rotated part is the last of a head, not the first."""

    name: str
    rotated: int
    interleaved: bool = False
    last: bool = False
    pairs: bool = False  # tables have a column for each pair
    eps: float | None = None
    weight: bool = False
    offset: float = 0.0

    def __str__(self) -> str:
        return self.name


# Of heads of 16 elements, or as many as `rotated` at least.
TURNS = (
    Turn(name="halves", rotated=16),
    Turn(name="neighbours", rotated=16, interleaved=True),
    Turn(name="first_part", rotated=6),
    Turn(name="last_part", rotated=6, last=True),
    Turn(name="neighbours_of_the_last_part", rotated=10, interleaved=True, last=True, pairs=True),
    Turn(name="pairs", rotated=16, pairs=True),
    Turn(name="one_pair", rotated=2),
    Turn(name="norm", rotated=16, eps=1e-6, weight=True),
    Turn(name="norm_without_weight", rotated=16, eps=1e-5),
    Turn(name="norm_with_an_offset", rotated=8, eps=1e-2, weight=True, offset=1.0, interleaved=True, pairs=True),
)


def rotary(inputs: Inputs, turn: Turn, seed: int = 0) -> tuple[Any, ...]:
    """The arguments of `selective::rotary_attention` for a step; tables and weights are in its dtype, with gaps."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, _, size = inputs.query.shape
    width = turn.rotated // 2 if turn.pairs else turn.rotated
    drawn = torch.randn(num_rows, width + 3, generator=generator)
    tables = [table.to(inputs.query.dtype)[:, 3:] for table in (drawn.cos(), drawn.sin())]
    weights = [torch.randn(size, generator=generator).to(inputs.query.dtype) if turn.weight else None for _ in "qk"]
    first = size - turn.rotated if turn.last else 0
    options = (turn.eps, turn.offset, first, turn.rotated, turn.interleaved)
    rows, rest = inputs.ragged()[:3], inputs.ragged()[3:]
    return (*rows, *tables, *weights, *options, *rest)


def widened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of them in float64, for the exact result."""

    def wide(argument: Any) -> Any:
        is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
        return argument.to(torch.float64, copy=True) if is_float else argument

    return tuple(map(wide, arguments))
