"""Steps that have been given to the device and whose tokens nobody has seen yet."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from selective_compile.runtime.device_draw import NO_TOKEN
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.records import TokenRecord
from selective_compile.runtime.request import Request
from selective_compile.runtime.sampler import NO_TOKEN_LEFT
from selective_compile.runtime.scheduled_step import ScheduledStep
from selective_compile.runtime.verify import Outcome


@dataclass(kw_only=True)
class Flight:
    """A step on the device.

    Attributes:
        step: what was scheduled.
        started: when, on the engine's clock.
        result: logits [R, V] on the device, from which the host chooses; or, where the device has chosen, tokens [R]
            in the host's memory, which are there once `wait` has returned.
        wait: returns when the step has been computed.
        ended: when its tokens were known.
        number: of the step, once it has landed.
    """

    step: ScheduledStep
    started: float
    result: Tensor
    wait: Callable[[], None]
    ended: float = 0.0
    number: int = 0

    def tokens(self) -> list[Outcome]:
        """Where the device has chosen: the token of each request that has one, or why there is none."""
        assert self.step.chosen_for is not None
        self.wait()
        chosen = self.result.tolist()[: len(self.step.chosen_for)]
        failed = TokenRecord(error=NO_TOKEN_LEFT)
        return [(0, failed) if token == NO_TOKEN else (token, None) for token in chosen]


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
        left = self.ahead if not idle and self._flying and self._flying[-1].step.chosen_for is not None else 0
        while len(self._flying) > left:
            yield self._flying[0]
            self._flying.popleft()  # not before it has landed

    def wait(self) -> None:
        """Until the device has done them all."""
        for flight in self._flying:
            flight.wait()

    def give_up(self) -> None:
        """A step has failed: nobody gets anything of them, but what they read must not change until they are done."""
        for flight in self._flying:
            with suppress(RuntimeError, MemoryError):  # of the step that failed, or of one behind it
                flight.wait()
        self._flying.clear()

    def sources(self, plan: StepPlan) -> array[int] | None:
        """For each row of a step: which of the tokens of the last one it reads, -1 for one that is known.

        None: all are known.
        """
        if not any(share.state.unknown for share in plan.shares):
            return None
        given = self._rows()
        found = array("q")
        for state, _, num_tokens, _, _ in plan.shares:
            found.extend([-1] * num_tokens)
            if state.unknown:
                found[-1] = given[state.number]
        return found

    def _rows(self) -> Mapping[int, int]:
        chosen_for = self._flying[-1].step.chosen_for if self._flying else None
        return {request.state.number: row for row, (request, _) in enumerate(chosen_for or ())}


def chosen_on_device(
    plan: StepPlan, requests: tuple[tuple[Request, ...], ...]
) -> tuple[tuple[Request, int], ...] | None:
    """The requests of a step's rows of logits, and how many tokens each has generated before.

    None: the host has to choose, as it does for all of a step if one of its requests asks for more than a token, or if
    it is the token that decides how that one goes on.
    """
    found = []
    for share, (request, *samples) in zip(plan.shares, requests, strict=True):
        state = share.state
        apart = samples or share.drafted or state.group is not None or state.rows_from is not None
        if apart or state.id_offset or state.shown is not None or not request.params.chosen_on_device:
            return None
        if share.samples:
            found.append((request, state.generated))
    return tuple(found)
