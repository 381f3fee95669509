"""What the engine tells about itself: totals on request, and a record of each step to its observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.scheduler import StepPlan


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine at one moment.

    Attributes:
        steps: steps that have run, failed ones included.
        running, waiting: requests that have blocks, and those that have none yet or gave them back.
        blocks_free, blocks_used, blocks_max: of the block pool; each has `block_size` slots.
        preemptions: how many times a request gave up its blocks, to be computed again.
        tokens_computed: prompt, generated and recomputed tokens that went through the model.
        tokens_generated: tokens that requests have received.
        graphs: compiled graphs, known before the first step.
        last_step_seconds: None before the first step.
    """

    steps: int
    running: int
    waiting: int
    blocks_free: int
    blocks_used: int
    blocks_max: int
    block_size: int
    preemptions: int
    tokens_computed: int
    tokens_generated: int
    graphs: int
    last_step_seconds: float | None


class StepShare(NamedTuple):
    """A request's part in a step."""

    request_id: RequestId
    tokens: int
    is_prefill: bool
    samples: bool  # whether the step gave it a token


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, as it went to the observers."""

    step: int
    shares: tuple[StepShare, ...]
    preempted: tuple[RequestId, ...]
    seconds: float

    @classmethod
    def of_plan(cls, plan: StepPlan, *, step: int, seconds: float) -> StepRecord:
        return cls(
            step=step,
            shares=tuple(
                StepShare(share.state.request_id, share.num_tokens, share.is_prefill, share.samples)
                for share in plan.shares
            ),
            preempted=tuple(state.request_id for state in plan.preempted),
            seconds=seconds,
        )


StepObserver = Callable[[StepRecord], None]
