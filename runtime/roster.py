"""How requests enter the engine and leave it."""

from __future__ import annotations

import torch

from selective_compile.runtime.beam_request import RequestSearch
from selective_compile.runtime.drafting import Drafting
from selective_compile.runtime.model_runner import ModelRunner
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_table import RequestTable
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.step_log import StepLog


class Roster:
    """Keeps scheduler, drafts and model runner in step with who is there. The engine calls it under its guard.

    Attributes:
        requests: those that have not ended.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, *, drafting: Drafting, log: StepLog, forks: bool
    ) -> None:
        """`forks`: whether samples of a prompt may go on from the blocks of the first."""
        self.requests = RequestTable()
        self._scheduler = scheduler
        self._runner = runner
        self._drafting = drafting
        self._log = log
        self._forks = forks

    def enter(self, samples: list[Request], *, device: torch.device) -> None:
        """Queue the samples of one prompt, which are in the table already; a search draws on `device`."""
        for request in samples:
            request.samples = tuple(samples)
            self._drafting.enter(request)
            beams = request.params.beams
            if beams is not None:
                request.search = RequestSearch(request.state, beams, seed=request.params.seed, device=device)
                request.state.width = beams.num_beams
        first, *others = samples
        longest = max(request.state.final_length for request in samples)
        fits = longest == first.state.final_length and self._scheduler.fits_together(longest, len(samples))
        # Each search forks from a prompt of its own, which finds the blocks of the first.
        searched = any(request.search is not None for request in samples)
        if others and self._forks and fits and not searched:
            first.state.width = len(samples)
            self.requests.fork_later(first, others)
            samples = [first]
        for request in samples:
            self._scheduler.add(request.state)

    def leave(self, request: Request) -> None:
        """It is scheduled no more, and nothing of it is kept; its reason is the caller's to tell."""
        if not (self.requests.drop_unforked(request) or self._pass_on(request)):
            self.requests.take_unforked(request.state)
            self._scheduler.remove(request.state)
        self.forget(request)

    def _pass_on(self, request: Request) -> bool:
        """Whether another sample goes on in its place, with what it has computed of their prompt."""
        state = request.state
        heir = self.requests.pass_on(request)
        if heir is None:
            return False
        self._scheduler.narrow(state)
        self._drafting.pass_on(request, heir)
        if request.timing.queued is not None:
            heir.start()
        return True

    def forget(self, request: Request) -> None:
        """As `leave`, for one that the scheduler has let go of by itself."""
        self.requests.remove(request)
        self._drafting.leave(request)
        for state in request.state.members:
            self._runner.forget(state)
        self._log.ended(request)
