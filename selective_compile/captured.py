"""A graph that Dynamo made of a model, with what it was traced from and holds for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from selective_compile.joined_graphs import JoinedGraphs, inputs_of
from selective_compile.live_conditions import LiveConditions
from selective_compile.live_settings import Read
from selective_compile.model_call import TOKEN_INPUTS, logits_of
from selective_compile.passes.lengths import CAPTURE_TOKENS
from selective_compile.passes.normalise import source_name
from selective_compile.trace_conditions import Condition


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Dynamo's graph from token ids (and an attention mask, if the model takes one) to logits ``[1, S, V]``.

    ``ends``: the largest S that each of its conditions holds for, where the model has a table of positions that ends;
    none if any.
    ``sets``: the attributes of the model's modules that a call sets; ``stored``: the nodes whose values it gives them,
    and the symbols of sizes.
    ``left_out``: such attributes that nothing reads, of which the graph is without.
    ``read``: the attributes that the trace depends on, and the code.
    ``conditions``: what it holds for.
    ``asked``: whether its code has asked a tensor how long a request is, of which the answer is not always the same.
    ``answered_by``: buffers that its code has asked for their values, for which alone it holds.
    """

    module: fx.GraphModule
    examples: list[Any]
    ends: tuple[int, ...]
    sets: tuple[str, ...] = ()
    stored: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()
    read: Read = Read()
    conditions: tuple[Condition, ...] = ()
    asked: bool = False
    answered_by: tuple[torch.Tensor, ...] = ()

    def inputs(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """``arguments`` as the token inputs, of `CAPTURE_TOKENS` tokens, and what else the graph was traced with."""
        tokens = dict(zip(TOKEN_INPUTS, arguments, strict=False))
        return [
            CAPTURE_TOKENS if isinstance(example, torch.SymInt) else tokens.get(source_name(node), example)
            for node, example in zip(inputs_of(self.module), self.examples, strict=True)
        ]

    def holds_for(self, model: nn.Module) -> LiveConditions:
        """What is so of ``model`` now, of all that it holds for."""
        return LiveConditions(model, self.conditions, logits_of)

    def bounded(self, longest: int) -> Captured:
        """For requests of up to ``longest`` tokens."""
        return replace(self, ends=(*self.ends, longest))

    def without_ends(self, ends: Collection[int]) -> Captured:
        """For requests that are longer than these, as far as the others let them."""
        return replace(self, ends=tuple(end for end in self.ends if end not in ends))

    @property
    def max_tokens(self) -> int | None:
        """The largest S that it holds for; None if any."""
        return min(self.ends, default=None)

    def joined(self, other: Captured, both: JoinedGraphs) -> Captured:
        """With ``other``, which is of longer requests."""
        read = Read(
            names=self.read.names | other.read.names,
            keys=self.read.keys | other.read.keys,
            code=self.read.code | other.read.code,
        )
        return replace(
            self,
            module=both.module(),
            examples=[*self.examples, *(other.examples[place] for place in both.added)],
            ends=(*self.ends, *other.ends),
            read=read,
            conditions=(*self.conditions, *other.conditions),
            answered_by=(*self.answered_by, *other.answered_by),
        )
