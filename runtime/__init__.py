"""The runtime: requests, scheduler, block pool, batch assembly, KV pools, model runner, sampler, engine.

In the order of one step: `engine` asks `scheduler` (with `block_pool` and `request_state`) which tokens to
compute, `batch` lays them end to end, `model_runner` runs the compiled model over the pools of `kv_cache`,
`sampler` (with `philox` and `generation`) picks the next tokens, and `request` hands them to whoever waits.
"""

from selective_compile.runtime.engine import Engine, StepError
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.request import FinishReason, Request, RequestResult, RequestTiming
from selective_compile.runtime.stats import EngineStats, StepObserver, StepRecord, StepShare

__all__ = [
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerationParams",
    "Request",
    "RequestResult",
    "RequestTiming",
    "StepError",
    "StepObserver",
    "StepRecord",
    "StepShare",
]
