"""Which tokens of a step the device chooses, and which are left to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.request import Request


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """The rows of logits of a step from which the device chooses; the host chooses from the others.

    Who chooses for a request depends on what it asks for alone, and not on who else is there, by drafts or preemption:
    the sums of the two differ in the last bits.

    Attributes:
        chosen_for: the request of each of these rows, and how many tokens it has generated before.
        rows: [len(chosen_for)], among all of the step.
        every: there are no others, so that nobody has to know a token before the next step is given to the device.
        one_each: no share has more than one row, which is that of its last token.
    """

    chosen_for: tuple[tuple[Request, int], ...]
    rows: tuple[int, ...]
    every: bool
    one_each: bool

    @property
    def leading(self) -> bool:
        """Whether they come before all others."""
        return self.rows == tuple(range(len(self.rows)))

    @classmethod
    def of(cls, plan: StepPlan, requests: Sequence[Sequence[Request]]) -> DeviceRows:
        """`requests`: of each share, as in `ScheduledStep`."""
        chosen_for, rows, end, others = [], [], 0, False
        for share, count, of_share in zip(plan.shares, plan.rows, requests, strict=True):
            end += count
            if count and not _is_of_device(share, of_share):
                others = True
            elif share.samples:
                chosen_for.append((of_share[0], share.state.generated))
                rows.append(end - 1)
        # A share has a row at least where it samples.
        one_each = end == sum([share.samples for share in plan.shares])
        return cls(chosen_for=tuple(chosen_for), rows=tuple(rows), every=not others, one_each=one_each)


def _is_of_device(share: Share, requests: Sequence[Request]) -> bool:
    """Whether no more is asked for than a token that follows from one row of logits and the tokens before it, and what
    is computed next does not depend on which it is."""
    state = share.state
    if len(requests) > 1 or state.id_offset or state.shown is not None:
        return False
    # Computed again after a preemption, the prompt's rows have been kept.
    of_prompt = state.rows_from is not None and not state.generated
    return not of_prompt and requests[0].params.chosen_on_device
