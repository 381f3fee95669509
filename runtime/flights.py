"""Steps that have been given to the device and whose tokens nobody has seen yet."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from selective_compile.runtime.device_draw import NO_TOKEN
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.records import TokenRecord
from selective_compile.runtime.request import Request
from selective_compile.runtime.sampler import NO_TOKEN_LEFT, asked_to_stop
from selective_compile.runtime.scheduled_step import Launched, ScheduledStep
from selective_compile.runtime.verify import Outcome


@dataclass(kw_only=True)
class Flight:
    """A step on the device.

    Attributes:
        step: what was scheduled.
        started: when, on the engine's clock.
        launched: where its results come to be.
        ended: when its tokens were known.
        number: of the step, once it has landed.
    """

    step: ScheduledStep
    started: float
    launched: Launched
    ended: float = 0.0
    number: int = 0

    def chosen(self) -> dict[Request, Outcome]:
        """Of each request for which the device has chosen, its token, or why it has none. Steps before have landed."""
        self.launched.wait()
        rows = self.step.rows
        if rows is None:
            return {}
        tokens = self.launched.tokens.tolist()
        pairs = zip(rows.chosen_for, self.launched.places, strict=True)
        return {request: self._outcome(request, generated, tokens[place]) for (request, generated), place in pairs}

    def _outcome(self, request: Request, generated: int, token: int) -> Outcome:
        """Though it may be a step late, criteria are asked with the tokens up to this one, and not after the last."""
        if token == NO_TOKEN:
            return 0, TokenRecord(error=NO_TOKEN_LEFT)
        if request.params.criteria is None or request.finished:
            return token, None
        before = request.state.tokens[: request.state.prompt_length + generated]
        with self.launched.aside():  # or what they read of the device would come behind the next step
            return token, asked_to_stop(request.params.criteria, before, token)

    def sample(self) -> list[list[Outcome]]:
        """As `ScheduledStep.sample`, where there is something for the host to choose."""
        chosen = self.chosen()
        assert self.launched.logits is not None
        return self.step.sample(self.launched.logits(), chosen)


@dataclass
class Flights:
    """At most `ahead` steps are left on the device while the next one is scheduled; 0: none.

    Requests count as having the tokens that these give, though nobody knows them: where the next step reads one, the
    device takes it from where the last step has put it.  Who turns out to have ended has been computed once too often,
    and that token is dropped.
    """

    ahead: int
    _flying: deque[Flight] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._flying)

    def add(self, flight: Flight) -> None:
        self._flying.append(flight)

    def due(self, *, idle: bool) -> Iterator[Flight]:
        """Those to be landed now, the first one first.

        Args:
            idle: nothing was added, so that there is nothing to wait for.
        """
        left = self.ahead if not idle and self._flying and self._flying[-1].step.expected else 0
        while len(self._flying) > left:
            yield self._flying[0]
            self._flying.popleft()  # not before it has landed

    def wait(self) -> None:
        """Until the device has done them all."""
        for flight in self._flying:
            flight.launched.wait()

    def give_up(self) -> None:
        """A step has failed, and `ModelRunner.give_up` has waited for what the device has of these: nobody gets
        anything of them."""
        self._flying.clear()

    def sources(self, plan: StepPlan) -> array[int] | None:
        """For each row of a step: which of the tokens of the last one it reads, -1 for one that is known.

        None: all are known.
        """
        if not any(share.state.unknown for share in plan.shares):
            return None
        given = self._rows()
        found = array("q")
        for state, _, num_tokens, samples, _ in plan.shares:
            found.extend([-1] * num_tokens)
            if state.unknown and samples:  # one that begins anew may have a share that ends before that token
                found[-1] = given[state.number]
        return found

    def _rows(self) -> Mapping[int, int]:
        last = self._flying[-1].step if self._flying else None
        chosen_for = last.rows.chosen_for if last is not None and last.rows is not None else ()
        return {request.state.number: row for row, (request, _) in enumerate(chosen_for)}
