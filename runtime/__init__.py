"""The runtime: requests, scheduler, block pool, batch assembly, KV pools, model runner, sampler, engine.

In the order of one step: `step_loop`, which `engine` calls, asks `scheduler` (with `queues`, `waiting`,
`request_blocks`, `block_pool` and `step_times`) which tokens to compute, `batch` lays them end to end in the memory of
`step_layout`, `model_runner` runs the compiled model over the pools of `kv_cache` and the recurrent states of
`state_slots`, `sampler` picks the next tokens (`processors` and `penalties` change the scores, `draw` with `philox`
chooses, `criteria` say when to stop, `records` is what is kept; `generation` with `merged_fields` reads all that from
the request), or `beams` do, and `request` hands them to whoever waits. On a GPU the step is left to itself meanwhile
(`flights`, `device_chooser`, `token_marks`), captured whole where it can be (`step_graphs`). `intake` checks what
`submit` was given, `request_table` has the unfinished requests, `step_log` counts and tells observers; `recording`
writes what happened, and `replay` does it again. `logit_error` measures what options that change results do to them.
`batch_manager` is the same engine behind callbacks (`submissions` on their way in, `delivery` of responses),
`request_processor` several engines behind one `submit`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from selective_compile.runtime.batch_manager import BatchManager
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.inference_request import InferenceRequest
from selective_compile.runtime.logit_error import LogitError, logit_error
from selective_compile.runtime.records import TopLogprobs
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_processor import RequestProcessor
from selective_compile.runtime.request_result import FinishReason, RequestResult, RequestTiming
from selective_compile.runtime.stats import EngineStats, RequestEnd, StepObserver, StepRecord, StepShare
from selective_compile.runtime.step_loop import StepError
from selective_compile.runtime.trace_file import TraceFile

if TYPE_CHECKING:
    from selective_compile.runtime.metrics import EngineMetrics

__all__ = [
    "BatchManager",
    "Engine",
    "EngineMetrics",
    "EngineStats",
    "FinishReason",
    "GenerationParams",
    "InferenceRequest",
    "LogitError",
    "Request",
    "RequestEnd",
    "RequestProcessor",
    "RequestResult",
    "RequestTiming",
    "StepError",
    "StepObserver",
    "StepRecord",
    "StepShare",
    "TopLogprobs",
    "TraceFile",
    "logit_error",
]


def __getattr__(name: str) -> Any:
    # On first use: it alone needs prometheus_client, which an uninstalled checkout may be without.
    if name == "EngineMetrics":
        return importlib.import_module("selective_compile.runtime.metrics").EngineMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
