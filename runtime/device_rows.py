"""Which tokens of a step the device chooses, and which are left to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.request import Request


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """The rows of logits of a step from which the device chooses; the host chooses from the others.

    Who chooses for a request does not depend on who else is in its steps: their sums differ in the last bits.

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
        ends = accumulate(plan.rows)
        shares = zip(plan.shares, ends, requests, strict=True)
        given = [each for each, rows in zip(shares, plan.rows, strict=True) if rows]
        ours = [(share, end, of_share[0]) for share, end, of_share in given if not _is_of_host(share, of_share)]
        return cls(
            chosen_for=tuple([(request, share.state.generated) for share, _, request in ours]),
            rows=tuple([end - 1 for _, end, _ in ours]),
            every=len(ours) == len(given),
            one_each=all(rows == share.samples for rows, share in zip(plan.rows, plan.shares, strict=True)),
        )


def _is_of_host(share: Share, requests: Sequence[Request]) -> bool:
    """Whether more is asked for than a token that follows from one row of logits and the tokens before it, or the
    token decides what of the request is computed next."""
    state = share.state
    of_prompt = state.rows_from is not None and share.start < state.prompt_length
    apart = len(requests) > 1 or share.drafted or of_prompt or state.group is not None
    return bool(apart or state.id_offset or state.shown is not None or not requests[0].params.chosen_on_device)
