"""What steps and copies have taken, and what is estimated from it: chunks, deadlines, whether to copy or to compute."""

from __future__ import annotations

from selective_compile.runtime.host_tier import CopyTimes
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.prefill_pace import PrefillPace
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.step_times import StepTimes


class Pace:
    """How fast the machine is, to a scheduler: it is told of each step and copy, and asks no clock."""

    def __init__(
        self, *, token_budget: int, max_requests: int, block_size: int, prefill_slowdown: float | None
    ) -> None:
        """`prefill_slowdown`: how many times as long as without prompts a step may take by them; None: any."""
        self.steps = StepTimes()
        self.copies = CopyTimes()
        self._token_budget = token_budget
        self._max_requests = max_requests
        self._block_size = block_size
        self._prefill = PrefillPace(prefill_slowdown) if prefill_slowdown is not None else None

    @property
    def bounds_prefill(self) -> bool:
        """Whether steps are kept short for the sake of those that decode."""
        return self._prefill is not None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long."""
        self.steps.observe(plan.num_tokens, seconds)
        if self._prefill is not None:
            prefilled = sum(share.num_tokens for share in plan.shares if share.is_prefill)
            self._prefill.observe(decoded=plan.num_tokens - prefilled, prefilled=prefilled, seconds=seconds)

    def copying_pays(self, copies: int) -> bool:
        """Whether so many copies of a block take less time than computing its tokens again, as far as is known."""
        copy, token = self.copies.per_block, self.steps.per_token
        return copy is None or token is None or copies * copy <= self._block_size * token

    def seconds_needed(self, state: RequestState, num_running: int) -> float:
        """From admission beside so many to the last token it may generate; 0 as long as that is not known.

        It is not known from steps of one size, of prompts or of tokens after them: the others may take far less.
        """
        if self.steps.per_token is None:
            return 0.0
        known, width = len(state.tokens), min(num_running + 1, self._max_requests)
        prefill = self.steps.prefill_seconds(known, self._token_budget)
        decode = self.steps.predict(width)
        return 0.0 if prefill is None or decode is None else prefill + decode * (state.final_length - known)

    def prefill_budget(self, num_decoding: int) -> int:
        """Tokens of prompts in a step beside so many, who are not to wait too long for their next token."""
        if self._prefill is None or not num_decoding:
            return self._token_budget
        return min(self._prefill.budget(num_decoding), self._token_budget)
