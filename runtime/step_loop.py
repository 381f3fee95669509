"""The steps of an engine, one after the other."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Condition

from selective_compile.progress import Stages
from selective_compile.runtime.device_rows import DeviceRows
from selective_compile.runtime.drafting import Drafting
from selective_compile.runtime.engine_parts import EngineParts
from selective_compile.runtime.flights import Flight
from selective_compile.runtime.outbox import Outbox
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.publisher import Publisher
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.roster import Roster
from selective_compile.runtime.scheduled_step import Launched, ScheduledStep
from selective_compile.runtime.state_guard import is_passed_on
from selective_compile.runtime.step_log import Observed, StepLog

TOO_LATE = "deadline must leave time for the tokens asked for, at the pace of the steps so far: it cannot be met"


class StepError(RuntimeError):
    """A step failed. Its running requests have ended with "error"; the engine can go on."""


class StepLoop:
    """Schedules a step, gives it to the device, and publishes what has come of it, or of the one before.

    One thread at a time calls it; `guard`, which protects all state, is held in between, for moments.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        guard: Condition,
        roster: Roster,
        drafting: Drafting,
        outbox: Outbox,
        log: StepLog,
    ) -> None:
        self._runner, self._scheduler = parts.runner, parts.scheduler
        self._assembler, self._recording, self._flights = parts.assembler, parts.recording, parts.flights
        self._keeps_requests = parts.runner.program.keeps_requests
        self._guard = guard
        self._roster = roster
        self._requests = roster.requests
        self._drafting = drafting
        self._outbox = outbox
        self._log = log
        self._publisher = Publisher(
            self._scheduler,
            self._runner,
            roster=roster,
            drafting=drafting,
            outbox=outbox,
            log=log,
            recording=self._recording,
        )
        self._weights_changed = False
        self._goes_on = False  # from one step to the next: there was work left
        self._ended = -math.inf  # the last step

    def step(self) -> bool:
        """See `Engine.step`."""
        with self._failure_ends_running_requests():
            began = started = self._log.now()
            if not self._goes_on:
                self._runner.look_closely()
            self._goes_on = False  # unless this one ends well
            landed = self._look_at_the_tokens_first()
            self._drafting.propose()
            if landed or self._drafting.wanted:
                started = self._log.now()
            step = self._schedule()
            if step is not None:
                self._copy(step.plan)
                self._flights.add(self._launch(step, started))
            landed += self._land(idle=step is None)
            self._goes_on = self._scheduler.has_work
            if not self._goes_on:  # or the last one would wait for whoever comes next
                landed += self._land(idle=True)
        for flight in landed:
            self._observe(flight, began)
        return step is not None or bool(landed)

    def land(self) -> None:
        """Publish all steps that are on the device.

        Raises:
            StepError: one of them failed.
        """
        began = self._log.now() if self._flights else 0.0
        with self._failure_ends_running_requests():
            landed = self._land(idle=True)
        for flight in landed:
            self._observe(flight, began)

    def warm_up(self, stages: Stages) -> None:
        """Compile and capture what steps can need; and collect garbage, for which Python would stop a step."""
        self.land()
        with self._guard:
            self._weights_changed |= self._runner.weights_changed()
            if self._weights_changed:
                self.drop_computed()
                self._weights_changed = False
        works = self._runner.to_warm_up()
        with stages("compiling and capturing steps", len(works)) as advance:
            for work in works:
                work()
                advance(1)
        gc.collect()

    def drop_computed(self) -> None:
        """Drop all keys and values, under the guard; no step is on the device."""
        assert not self._flights, "their tokens must be known"
        self._runner.check_graphs()
        self._recording.dropped()
        self._scheduler.preempt_all()

    def _schedule(self) -> ScheduledStep | None:
        with self._guard:
            if not self._scheduler.has_work:
                self._outbox.flush()
                return None
            if self._weights_changed:
                self.drop_computed()
                self._weights_changed = False  # and not before: if it fails, the next step is to try again
            now = self._log.now()
            plan = self._scheduler.schedule(now)
            self._recording.planned(now, plan)
            for state in plan.refused:
                for request in (self._requests.of(state), *self._requests.take_unforked(state)):
                    self._roster.forget(request)
                    request.finish("error", TOO_LATE)
            if not plan.shares:
                self._outbox.flush()  # no model runs that anything could be handed out beside
                return None
            requests = self._requests.of_shares(plan.shares)
            # Under the lock, since cancelling a request takes its blocks and its slot away.
            sources = self._flights.sources(plan)
            rows = DeviceRows.of(plan, requests) if self._flights.ahead else None
            marked = None if rows is None else self._runner.marked(rows.chosen_for)
            captured = None if rows is None else self._runner.captured(plan, rows, sources, marked)
            inputs = captured or self._runner.with_slots(self._assembler.assemble(plan))
            for state in plan.admitted:
                self._requests.of(state).start()
            step = ScheduledStep(
                plan=plan,
                requests=requests,
                inputs=inputs,
                rows=rows,
                sources=sources,
                marked=marked,
            )
            if step.expected:
                self._publisher.expect(step)
            return step

    def _copy(self, plan: StepPlan) -> None:
        """Before the model runs: what it reads comes to the device, what it overwrites goes to the host."""
        if plan.copies:
            if plan.num_host_copies:
                self._flights.wait()  # or their time would be counted
            started = self._log.now()
            self._runner.copy(plan.copies)
            ended = self._log.now()
            with self._guard:
                if plan.num_host_copies:
                    self._scheduler.pace.copies.observe(plan.num_host_copies, ended - started)
                self._recording.copied(started, ended)

    def _launch(self, step: ScheduledStep, started: float) -> Flight:
        """Give it to the device; meanwhile the tokens of the step before are handed out, if that was left for now."""
        with self._guard:
            self._outbox.send()
        launched = self._run(step) if step.rows is None else self._runner.launch(step)
        return Flight(step=step, started=started, launched=launched)

    def _run(self, step: ScheduledStep) -> Launched:
        try:
            logits = self._runner.run(step)
            # Waited for though nobody may read its logits: the next step's inputs are written where its own are.
            return Launched(logits=logits, wait=self._runner.stream.mark())
        finally:
            if self._keeps_requests:  # also something of those who left while the step was on its way
                with self._guard:
                    for share in step.plan.shares:
                        if share.state.finished:
                            self._runner.forget(share.state)

    def _look_at_the_tokens_first(self) -> list[Flight]:
        """Where what is done next depends on them: land what is on the device."""
        with self._guard:
            changed = self._scheduler.has_work and self._runner.weights_changed()
            self._weights_changed = self._weights_changed or changed
        return self._land(idle=True) if self._weights_changed or self._drafting.wanted else []

    def _land(self, *, idle: bool) -> list[Flight]:
        """Publish the steps that nobody needs to be ahead of."""
        landed = []
        for flight in self._flights.due(idle=idle):
            if flight.step.expected:
                self._publish(partial(self._publisher.land, flight.step, flight.chosen()))
            else:
                self._publish(partial(self._publisher.publish, flight.step, flight.sample()))
            flight.ended, flight.number = self._log.now(), self._log.steps - 1
            landed.append(flight)
        return landed

    def _publish(self, publish: Callable[[], None]) -> None:
        with self._guard:
            self._outbox.flush()
            self._end_failed()
            publish()
            if not self._scheduler.has_work:
                self._outbox.flush()

    def _end_failed(self) -> None:
        """What one request's own run has raised ends it alone, as if it had been cancelled while the model ran."""
        for state, error in self._runner.take_failed().items():
            if is_passed_on(error):
                raise error
            if not state.finished:
                self._end(state, f"{type(error).__name__}: {error}")

    def _end(self, state: RequestState, message: str) -> None:
        """With an error, and all samples that start from its prompt."""
        for request in reversed(self._requests.group_of(state)):
            self._roster.leave(request)
            request.finish("error", message)

    @contextmanager
    def _failure_ends_running_requests(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            message = f"step {self._log.steps} failed: {type(error).__name__}: {error}"
            passed_on = not isinstance(error, Exception) or is_passed_on(error)
            with self._guard:
                self._outbox.flush()
                self._log.steps += 1
                doomed = list(self._scheduler.running())
                if not (doomed or passed_on):  # or whoever waits for them would step for ever
                    doomed = list(self._scheduler.waiting())
                self._runner.give_up()
                self._flights.give_up()
                self._scheduler.settle()
                for state in doomed:
                    if not state.finished:  # with another of its group
                        self._end(state, message)
                self._scheduler.forget()
                self._recording.failed(doomed, passed_on=passed_on)
                observed = self._log.failed(message)
            self._tell(observed)
            if passed_on:
                raise
            raise StepError(message) from error

    def _observe(self, flight: Flight, began: float) -> None:
        """`began`: when the call did that the step has landed in."""
        plan, started, ended = flight.step.plan, flight.started, flight.ended
        # Of steps that lie on the device together, the time that each adds; not that between two calls.
        seconds = ended - max(started, began, self._ended)
        self._ended = ended
        with self._guard:
            self._recording.timed(started, ended)
            predicted = self._scheduler.pace.steps.predict(plan.num_tokens)
            self._scheduler.pace.observe(plan, seconds)
            if self._log.has_ended:
                self._outbox.flush()
            observed = self._log.stepped(plan, flight.number, started=started, seconds=seconds, predicted=predicted)
        self._tell(observed)

    def _tell(self, observed: Observed | None) -> None:
        for observer in observed.tell() if observed is not None else ():
            with self._guard:
                self._log.remove_observer(observer)
