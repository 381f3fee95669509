"""What the engine tells about itself: totals on request, and a record of each step to its observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_result import FinishReason, RequestTiming
from selective_compile.runtime.request_state import RequestId


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine at one moment.

    Attributes:
        steps: steps that have run, failed ones included.
        running, waiting: requests that have blocks, and those that have none yet or gave them back; beams of a search
            are one request.
        requests_max: requests that can run at a time: `EngineConfig.max_requests`, or as many as there is room for the
            states of.
        blocks_free, blocks_used, blocks_max: of the block pool; each has `block_size` slots.
        kv_bytes: memory of the KV pools on the device, of all attention calls.
        blocks_idle: those of the free blocks whose keys and values can still be reused.
        host_slots_used, host_slots_max: of the host tier, over all of its pools.
        preemptions: how many times a request gave up its blocks, to be computed again.
        tokens_admitted: tokens of requests at the moments they were admitted, the first time or again.
        tokens_reused: those among them that were found computed.
        tokens_computed: prompt, generated and recomputed tokens that went through the model.
        tokens_generated: tokens that requests have received.
        ended: how many requests ended, by how.
        graphs: compiled graphs, known before the first step.
        captured, captured_max: graphs that steps have been captured as, by their size and how tokens are chosen, and
            the most that there can be, known before the first step.
        last_step_seconds: None before the first step.
    """

    steps: int
    running: int
    waiting: int
    requests_max: int
    blocks_free: int
    blocks_used: int
    blocks_max: int
    blocks_idle: int
    block_size: int
    kv_bytes: int
    host_slots_used: int
    host_slots_max: int
    preemptions: int
    tokens_admitted: int
    tokens_reused: int
    tokens_computed: int
    tokens_generated: int
    ended: Mapping[FinishReason, int]
    graphs: int
    captured: int
    captured_max: int
    last_step_seconds: float | None


class StepShare(NamedTuple):
    """A request's part in a step."""

    request_id: RequestId
    tokens: int
    is_prefill: bool
    samples: bool  # whether the step gave it a token
    start: int  # how many of its tokens were computed or found before


class RequestEnd(NamedTuple):
    """How a request ended, in or since the step before."""

    request_id: RequestId
    finish_reason: FinishReason
    tokens: int
    timing: RequestTiming

    @classmethod
    def of(cls, request: Request) -> RequestEnd:
        assert request.finish_reason is not None, request
        return cls(request.request_id, request.finish_reason, len(request.tokens), request.timing)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, as it went to the observers.

    Attributes:
        seconds: from its start to the last of its tokens handed out.
        started: its start, in seconds on the engine's clock since the engine began.
        predicted_seconds: what the steps before let one expect; None for the first.
        empty_slots: as in a `StepPlan`.
        ended: requests that ended since the step before this one did; of very many without a step, those that ended
            last.
        error: why the step failed, or None. One that failed has no shares and no times.
    """

    step: int
    shares: tuple[StepShare, ...]
    preempted: tuple[RequestId, ...]
    seconds: float
    started: float = 0.0
    empty_slots: int = 0
    predicted_seconds: float | None = None
    ended: tuple[RequestEnd, ...] = ()
    error: str | None = None

    @property
    def served(self) -> frozenset[RequestId]:
        """The requests that have shares, of which beams have several."""
        return frozenset(share.request_id for share in self.shares)

    @property
    def in_context(self) -> frozenset[RequestId]:
        """Those of them of whose prompts, or of what was preempted, something was computed."""
        return frozenset(share.request_id for share in self.shares if share.is_prefill)

    @property
    def context_tokens(self) -> int:
        return sum(share.tokens for share in self.shares if share.is_prefill)

    @classmethod
    def of_plan(cls, plan: StepPlan, *, step: int, seconds: float, **values: Any) -> StepRecord:
        """The record of a plan; `values` are the attributes that are not the plan's."""
        return cls(
            step=step,
            shares=tuple(
                StepShare(share.state.request_id, share.num_tokens, share.is_prefill, share.samples, share.start)
                for share in plan.shares
            ),
            preempted=tuple(state.request_id for state in plan.preempted),
            seconds=seconds,
            empty_slots=plan.empty_slots,
            **values,
        )


class StepFloor(NamedTuple):
    """The least time that the machine could have taken for a step, and what of the machine it is the time of."""

    seconds: float
    limit: Literal["memory", "compute"]


# Called after each step, in the thread that ran it.
StepObserver = Callable[[StepRecord], None]
