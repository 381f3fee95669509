"""What flattening makes: the graph over the ragged batch, and what its placeholders and outputs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, KeySelection
from selective_compile.passes.axes import Axes, Sizes
from selective_compile.passes.normalise import Symbols
from selective_compile.passes.traced_graph import Input, RecurrentCall
from selective_compile.step import Reach


class Quantised(NamedTuple):
    """A weight for which int8 numbers ``[N, K]`` or ``[E, N, K]`` stand.

    place: among a graph's weights.
    by_columns: it is itself ``[K, N]``, or ``[E, K, N]``.
    """

    place: int
    by_columns: bool = False


class Cast(NamedTuple):
    """A weight that is read as another type; ``place``: among a graph's weights."""

    place: int
    dtype: torch.dtype


@dataclass(kw_only=True)
class FlatGraph:
    """The rewritten graph.  Placeholders in order: weights, token inputs ``[1, T]``, positions ``[T]`` if used,
    metadata, then if paged a key and a value pool per call site, or a key pool alone where latents are kept, a pool of
    index keys per selection and a state pool per recurrence, then ``logit_rows [R]`` once pass 8 has run.

    Calls that see equally far back share a block table and a slot mapping; those of the farthest are in the metadata
    first, those of the others follow it in the order of ``reaches``, and then the slots of recurrent states."""

    module: fx.GraphModule
    weights: tuple[Input, ...]
    tokens: tuple[Input, ...]
    uses_positions: bool
    metadata: tuple[str, ...]
    calls: tuple[AttentionCall, ...]
    selections: tuple[KeySelection, ...]
    recurrences: tuple[RecurrentCall, ...]
    reaches: tuple[Reach, ...]
    symbols: Symbols
    example_inputs: list[Any]
    sizes: Sizes  # the symbols that the outputs' sizes are in
    outputs: tuple[Axes | int | sympy.Expr, ...]  # what each output is in the [B, S] graph
    proved_from: tuple[Input, ...] = ()  # buffers that a proof read; most leave the graph with the masks they made
    quantised: tuple[Quantised, ...] = ()  # of ``weights``: behind all placeholders, int8 numbers and scales for each
    cast: tuple[Cast, ...] = ()  # of ``weights``: behind those, each in another type
    joined: tuple[tuple[int, ...], ...] = ()  # of ``weights``: behind those, a tensor over each group

    @property
    def prefix(self) -> int:
        """How many of a request's first positions are seen by tokens in front of them, by any call; 0: none."""
        return max((call.family.prefix for call in self.calls if call.family is not None), default=0)

    @property
    def device(self) -> torch.device:
        return self.tokens[0].node.meta["val"].device


def reach_of(call: AttentionCall | KeySelection) -> Reach:
    assert call.family is not None
    return Reach(window=call.family.window, chunk=call.family.chunk)
