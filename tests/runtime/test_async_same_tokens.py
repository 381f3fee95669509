"""Whatever comes, and whenever the device gets to it, requests have the tokens that they have by themselves."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from selective_compile.runtime import Request
from selective_compile.step import LongForm
from tests.runtime.engine_checks import EndsAt, check, run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

ENDS = list(range(0, 61, 6))
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"eos_token_id": ENDS},
    {"do_sample": True, "seed": 3, "eos_token_id": ENDS},
    {"do_sample": True, "seed": 5, "top_k": 5, "top_p": 0.8, "temperature": 1.5},
    {"do_sample": True, "seed": 6, "top_k": 0, "top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "do_sample": True, "seed": 8},
    {"min_new_tokens": 4, "eos_token_id": ENDS},
    {"repetition_penalty": 1.3, "suppress_tokens": ENDS, "begin_suppress_tokens": [1, 2], "do_sample": True, "seed": 9},
    {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"logprobs": True, "prompt_logits": True},
    {"logprobs": True, "do_sample": True, "seed": 2, "eos_token_id": ENDS},
    {"prompt_logprobs": True},
    {"stopping_criteria": [EndsAt(ENDS)]},
    {"stopping_criteria": [EndsAt(ENDS)], "repetition_penalty": 1.5, "do_sample": True, "seed": 7},
)

LONG_FORMS = (None, LongForm(beyond=6, anew=True), LongForm(beyond=6, anew=False))


class SameTokens(RuleBasedStateMachine):
    """Whatever comes, whenever the device gets to it: requests have the tokens that they have by themselves."""

    @initialize(
        blocks=st.integers(24, 60),
        scheduler_policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
        batching=st.sampled_from(["inflight_fused", "inflight", "static"]),
        waiting_order=st.sampled_from(["first_come", "fair"]),
        overlap=st.booleans(),
        captured=st.booleans(),
        async_scheduling=st.sampled_from([None, None, False]),
        prefill_slowdown=st.sampled_from([None, 1.5]),
        long_form=st.sampled_from(LONG_FORMS),
        unlimited_steps=st.booleans(),
        seed=st.integers(0, 99),
    )
    def start(
        self,
        blocks: int,
        captured: bool,
        long_form: LongForm | None,
        unlimited_steps: bool,
        seed: int,
        **config: Any,
    ) -> None:
        moods = random.Random(seed)
        self.program = SimulatedProgram(captured=captured, long_form=long_form, unlimited_steps=unlimited_steps)
        self.engine = simulated_engine(
            self.program,
            stream=PlayedStream(lambda: moods.choice((0, 0, 1, 9)), captures=captured),
            block_size=2,
            block_reuse=not unlimited_steps,  # a token of a prompt is not what it is where it was generated
            max_kv_tokens=2 * blocks,
            token_budget=7 if seed % 2 else 70,
            max_requests=5,
            **config,
        )
        self.requests: list[Request] = []
        self.cancelled: set[Any] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=9), kind=st.sampled_from(KINDS), new=st.integers(1, 8)
    )
    def submit(self, prompt: list[int], kind: dict[str, Any], new: int) -> None:
        self.requests += self.engine.submit(prompt, max_new_tokens=new, **kind).samples

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            check(self.engine)

    @rule(place=st.integers(0, 9))
    def cancel(self, place: int) -> None:
        if place < len(self.requests):
            self.requests[place].cancel()

    @rule()
    def drop(self) -> None:
        self.engine.drop_computed()

    @invariant()
    def nobody_sees_what_is_not_known(self) -> None:
        for request in getattr(self, "requests", ()):
            assert all(0 <= token < 61 for token in request.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run_until_idle(self.engine)
        for request in self.requests:
            ended = request.finish_reason != "cancelled"
            if request.params.beams is not None:
                alike = SimulatedProgram(long_form=self.program.long_form, unlimited_steps=self.program.unlimited_steps)
                alone = simulated_engine(alike, max_requests=5).submit(
                    request.prompt_ids, num_beams=3, max_new_tokens=request.params.max_new_tokens
                )
                assert not ended or request.tokens == list(alone.result().tokens), request
            else:
                wanted = expected_tokens(request.prompt_ids, request.params, program=self.program)
                assert request.tokens == (wanted if ended else wanted[: len(request.tokens)]), request


TestSameTokens = SameTokens.TestCase
TestSameTokens.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
