"""What the scheduler decides: the shares of one step, and who came, gave way or was refused on the way to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.request_state import RequestState


class Share(NamedTuple):
    """A request's part in a step: tokens start .. start + num_tokens of `state.tokens` are computed.

    The last `drafted` of them are not known yet, but the first of `state.draft`.
    """

    state: RequestState
    start: int
    num_tokens: int
    samples: bool  # the last known token is among them, so the step's logits give the next one
    drafted: int = 0

    @property
    def num_rows(self) -> int:
        """How many of its last tokens have their logits computed."""
        wanted = self.samples + self.drafted
        if self.state.rows_from is None:
            return wanted
        end = self.start + self.num_tokens
        return max(wanted, end - max(self.start, self.state.rows_from))

    @property
    def is_prefill(self) -> bool:
        """True unless the share is the token that the previous step generated; recomputing is prefill too."""
        return not self.samples or self.num_tokens > 1 + self.drafted or self.start < self.state.prompt_length


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step computes, in the order in which it lies in the ragged batch.

    Attributes:
        preempted: those that gave up their blocks, to be computed again: for others, or since they are `outgrown`.
        admitted: those that wait no more, the first time or again.
        refused: those that could not end by their deadline any more; they have left.
        copies: between the device and the host tier, and to blocks of their own for those who shared one; to be made
            in this order before the step runs.
        empty_slots: in a static batch, places of those that have ended before its longest member.
    """

    shares: tuple[Share, ...]
    preempted: tuple[RequestState, ...] = ()
    admitted: tuple[RequestState, ...] = ()
    refused: tuple[RequestState, ...] = ()
    copies: tuple[Copy | BlockCopy, ...] = ()
    empty_slots: int = 0

    @cached_property
    def num_tokens(self) -> int:
        return sum([share.num_tokens for share in self.shares])

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Of each share its `num_rows`."""
        return tuple([share.num_rows for share in self.shares])

    @property
    def num_host_copies(self) -> int:
        return sum(isinstance(copy, Copy) for copy in self.copies)


@dataclass(kw_only=True)
class Draft:
    """A plan in the making; `budget` is what is left of the step's tokens, `prefill` of those for chunks of prompts.

    `outgrown`: those that gave up their blocks since these were of no use, `preempted` those that did it for others.
    """

    budget: int
    prefill: int
    shares: list[Share] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)
    outgrown: list[RequestState] = field(default_factory=list)
    admitted: list[RequestState] = field(default_factory=list)
    refused: list[RequestState] = field(default_factory=list)

    def plan(self, *, copies: tuple[Copy | BlockCopy, ...], empty_slots: int) -> StepPlan:
        return StepPlan(
            shares=tuple(self.shares),
            preempted=(*self.outgrown, *self.preempted),
            admitted=tuple(self.admitted),
            refused=tuple(self.refused),
            copies=copies,
            empty_slots=empty_slots,
        )
