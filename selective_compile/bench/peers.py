"""Who serves the trace: the engine, and transformers' `generate` and `generate_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, Protocol

import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

from selective_compile.backend import compile_step_program
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Asked, Clock, Trace
from selective_compile.demo import left_padded
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request
from selective_compile.runtime.stats import StepRecord


class PeerError(RuntimeError):
    """A peer failed, or did not do what was asked of it."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One run of a trace.

    Attributes:
        seconds: from the first arrival to the last token.
        tokens: of each request, in the trace's order; cut to as many as it asked for.
        latencies: of each request, seconds from its arrival until all its tokens were there.
        records: the engine's steps; empty for the others.
    """

    seconds: float
    tokens: list[list[int]]
    latencies: list[float]
    records: list[StepRecord] = field(default_factory=list)


class Peer(Protocol):
    """Serves traces, again and again, on a model object of its own."""

    def run(self, trace: Trace) -> PeerRun: ...

    def describe(self) -> dict[str, object]:
        """Attention implementation, precision of weights and keys, and what else a reader must know."""

    def close(self) -> None:
        """It serves no more."""


class PeerHere:
    """One in this process, of which nothing is left to close."""

    def close(self) -> None:
        pass


class EnginePeer(PeerHere):
    """`Engine`, stepped by the thread that submits."""

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        self._records: list[StepRecord] = []
        config = EngineConfig(
            token_budget=settings.token_budget,
            max_requests=settings.requests,
            max_kv_tokens=slots_needed(trace, 16),
            block_reuse=False,  # or every round but the first would find its prompts computed
            compile=settings.compile,
        )
        program = compile_step_program(model, config)
        self._engine = Engine(model, config, program=program, observers=[self._records.append])
        self._about = {
            "attention": f"selective::ragged_attention ({config.implementation})",
            **precision(model),
            "graphs": program.graphs if settings.compile else 0,
            "token_budget": settings.token_budget,
        }

    def describe(self) -> dict[str, object]:
        return self._about

    def run(self, trace: Trace) -> PeerRun:
        self._records.clear()
        clock = Clock(trace)
        handles: list[Request] = []
        queued: list[float] = []
        while clock.more_to_come or not all(handle.finished for handle in handles):
            for number, asked in clock.arrived():
                queued.append(clock.now() - asked.arrival)
                config = greedy_without_end(asked.new_tokens)
                handles.append(self._engine.submit(asked.prompt_ids, config, number))
            if not self._engine.step():
                clock.wait_for_next()
        seconds = clock.now()
        results = [handle.result() for handle in handles]
        latencies = [before + (result.timing.total or 0.0) for before, result in zip(queued, results, strict=True)]
        tokens = [list(result.tokens) for result in results]
        return PeerRun(seconds=seconds, tokens=tokens, latencies=latencies, records=list(self._records))


class PaddedGenerate(PeerHere):
    """`model.generate` on left-padded batches: whatever has arrived when the batch before it is done."""

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        self._model = model

    def describe(self) -> dict[str, object]:
        return {"attention": self._model.config._attn_implementation, **precision(self._model)}

    def run(self, trace: Trace) -> PeerRun:
        clock = Clock(trace)
        tokens: list[list[int]] = [[] for _ in trace.requests]
        latencies = [0.0] * len(trace.requests)
        while clock.more_to_come:
            batch = list(clock.arrived())
            if not batch:
                clock.wait_for_next()
                continue
            rows = self._generate([asked for _, asked in batch])
            done = clock.now()
            for (number, asked), row in zip(batch, rows, strict=True):
                tokens[number] = row[: asked.new_tokens]
                latencies[number] = done - asked.arrival
        return PeerRun(seconds=clock.now(), tokens=tokens, latencies=latencies)

    def _generate(self, batch: list[Asked]) -> list[list[int]]:
        ids, mask = left_padded([asked.prompt_ids for asked in batch], 0, self._model.device)
        config = self._config(max(asked.new_tokens for asked in batch))
        out: torch.Tensor = self._model.generate(ids, attention_mask=mask, generation_config=config)
        return out[:, ids.shape[1] :].tolist()

    def _config(self, new_tokens: int) -> GenerationConfig:
        return greedy_without_end(new_tokens)


class CompiledGenerate(PaddedGenerate):
    """`PaddedGenerate` with a static cache, for which transformers compiles the model's steps."""

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "cache": "static, compiled"}

    def _config(self, new_tokens: int) -> GenerationConfig:
        config = greedy_without_end(new_tokens)
        config.cache_implementation = "static"
        config.compile_config = CompileConfig(fullgraph=False)
        config.compile_config._compile_all_devices = True  # else on accelerators alone
        return config


class GenerateBatch(PeerHere):
    """Continuous batching of transformers: `model.generate_batch`, but with a length for each request.

    `generate_batch` takes one `max_new_tokens` for all, so this goes to the manager under it. Starting and
    stopping the manager is not timed.
    """

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        if find_spec("psutil") is None and model.device.type == "cpu":
            raise ValueError("psutil must be installed for generate_batch on a CPU: pip install psutil")
        self._model = model
        self._attention = "unknown"
        self._settings = ContinuousBatchingConfig(
            num_blocks=slots_needed(trace, 256) // 256 + 1,
            max_batch_tokens=settings.token_budget,
            max_memory_percent=0.9,
        )

    def describe(self) -> dict[str, object]:
        return {
            "attention": self._attention,
            **precision(self._model),
            "token_budget": self._settings.max_batch_tokens,
            "page_size": self._settings.page_size,
        }

    def run(self, trace: Trace) -> PeerRun:
        tokens: list[list[int]] = [[] for _ in trace.requests]
        latencies = [0.0] * len(trace.requests)
        with self._manager(trace) as manager:
            clock = Clock(trace)
            left = len(trace.requests)
            while left:
                for number, asked in clock.arrived():
                    manager.add_request(asked.prompt_ids, str(number), asked.new_tokens, eos_token_id=-1)
                result = manager.get_result(timeout=0.002 if clock.more_to_come else 1)
                if result is None:
                    if not manager.is_running():
                        raise PeerError("the thread of generate_batch must be running, it has ended")
                elif result.error is not None:
                    raise PeerError(f"generate_batch failed: {result.error}")
                elif result.is_finished():
                    number = int(result.request_id)
                    tokens[number] = list(result.generated_tokens)
                    latencies[number] = clock.now() - trace.requests[number].arrival
                    left -= 1
            seconds = clock.now()
        return PeerRun(seconds=seconds, tokens=tokens, latencies=latencies)

    @contextmanager
    def _manager(self, trace: Trace) -> Iterator:
        hints = WorkloadHints(
            max_prompt_length=max(len(asked.prompt_ids) for asked in trace.requests),
            max_generated_length=max(asked.new_tokens for asked in trace.requests),
            num_requests=len(trace.requests),
        )
        with self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=self._settings,
            workload_hints=hints,
        ) as manager:
            self._attention = self._model.config._attn_implementation
            yield manager


PEERS_HERE: Final[Mapping[str, Callable[[PreTrainedModel, Trace, BenchSettings], Peer]]] = {
    "engine": EnginePeer,
    "generate": PaddedGenerate,
    "generate_static": CompiledGenerate,
    "generate_batch": GenerateBatch,
}


def greedy_without_end(new_tokens: int) -> GenerationConfig:
    """Greedy, exactly `new_tokens`: no end-of-sequence id."""
    return GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)


def slots_needed(trace: Trace, block_size: int) -> int:
    """KV slots for all requests at once, so that memory decides nothing."""
    lengths = (len(asked.prompt_ids) + asked.new_tokens for asked in trace.requests)
    return sum(-(-length // block_size) * block_size for length in lengths)


def precision(model: PreTrainedModel) -> dict[str, object]:
    name = str(model.dtype).removeprefix("torch.")
    return {"weights": name, "keys_and_values": name}
