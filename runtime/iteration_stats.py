"""The statistics of one iteration as JSON, under the names that TensorRT-LLM's Batch Manager gives them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from selective_compile.options import EngineConfig
from selective_compile.runtime.stats import EngineStats, RequestEnd, StepFloor, StepRecord


def iteration_stats(
    record: StepRecord, stats: EngineStats, config: EngineConfig, floor: StepFloor | None = None
) -> dict[str, Any]:
    """What `on_stats` reports of a step.

    Args:
        record: the step.
        stats: the engine after it.
        config: of the engine.
        floor: the least time of the step on this machine; None: not known.
    """
    served, in_context = record.served, record.in_context
    values: dict[str, Any] = {
        "Timestamp": datetime.now().strftime("%m-%d-%Y %H:%M:%S"),
        "Iteration Counter": record.step,
        "Active Request Count": stats.running + stats.waiting,
        "Waiting Request Count": stats.waiting,
        "Max Request Count": stats.requests_max,
        "Max KV cache blocks": stats.blocks_max,
        "Free KV cache blocks": stats.blocks_free,
        "Used KV cache blocks": stats.blocks_used,
        "Reusable KV cache blocks": stats.blocks_idle,
        "Max host KV cache blocks": stats.host_slots_max,
        "Used host KV cache blocks": stats.host_slots_used,
        "Tokens per KV cache block": stats.block_size,
        "Scheduled Requests": len(served),
        "Context Requests": len(in_context),
        "Generation Requests": len(served - in_context),
        "Total Context Tokens": record.context_tokens,
        "Paused Requests": len(record.preempted),
        "Total Reused Tokens": stats.tokens_reused,
        "Step Seconds": record.seconds,
        "Predicted Step Seconds": record.predicted_seconds,
        "Ended Requests": [_ended(end) for end in record.ended],
    }
    if floor is not None:
        values |= {"Floor Step Seconds": floor.seconds, "Limiting Resource": floor.limit}
    if record.error is not None:
        values["Error"] = record.error
    if config.batching == "static":
        values["Total Generation Tokens"] = sum(not share.is_prefill for share in record.shares)
        values["Empty Generation Slots"] = record.empty_slots
    else:
        values["MicroBatch ID"] = 0
    return values


def _ended(end: RequestEnd) -> dict[str, Any]:
    return {
        "Request ID": end.request_id,
        "Finish Reason": end.finish_reason,
        "Generated Tokens": end.tokens,
        "Queue Seconds": end.timing.queued,
        "First Token Seconds": end.timing.first_token,
        "Between Tokens Seconds": end.timing.between_tokens,
        "Total Seconds": end.timing.total,
    }


def iteration_json(
    record: StepRecord,
    stats: EngineStats,
    config: EngineConfig,
    floor: StepFloor | None = None,
    *,
    engine: int | None = None,
) -> str:
    """`engine`: its place among several, which the text then has as "Engine"."""
    values = iteration_stats(record, stats, config, floor)
    return json.dumps(values if engine is None else {"Engine": engine, **values})
