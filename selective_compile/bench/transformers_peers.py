"""Peers that transformers brings: `generate` on padded batches, and continuous batching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.generation.streamers import BaseStreamer

from selective_compile.bench.peers import (
    PAGE,
    PeerError,
    PeerHere,
    PeerRun,
    greedy_without_end,
    precision,
    slots_needed,
)
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Asked, Clock, Trace
from selective_compile.demo import left_padded


class Moments(BaseStreamer):
    """Notes when `generate` hands out the tokens of a step, after the prompts, which it hands out too."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._handed: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self._handed.append(self._clock.now())

    def end(self) -> None:
        pass

    @property
    def of_tokens(self) -> list[float]:
        return self._handed[1:]


class PaddedGenerate(PeerHere):
    """`model.generate` on left-padded batches: whatever has arrived when the batch before it is done.

    When its tokens are there is told by a streamer, which gets those of the whole batch step by step.
    """

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        self._model = model

    def describe(self) -> dict[str, object]:
        return {"attention": self._model.config._attn_implementation, **precision(self._model)}

    def run(self, trace: Trace) -> PeerRun:
        clock = Clock(trace)
        tokens: list[list[int]] = [[] for _ in trace.requests]
        moments: list[list[float]] = [[] for _ in trace.requests]
        while clock.more_to_come:
            batch = list(clock.arrived())
            if not batch:
                clock.wait_for_next()
                continue
            streamer = Moments(clock)
            rows = self._generate([asked for _, asked in batch], streamer)
            for (number, asked), row in zip(batch, rows, strict=True):
                tokens[number] = row[: asked.new_tokens]
                moments[number] = [at - asked.arrival for at in streamer.of_tokens[: asked.new_tokens]]
        return PeerRun(seconds=clock.now(), tokens=tokens, moments=moments)

    def _generate(self, batch: list[Asked], streamer: Moments) -> list[list[int]]:
        ids, mask = left_padded([asked.prompt_ids for asked in batch], 0, self._model.device)
        config = self._config(max(asked.new_tokens for asked in batch))
        out: torch.Tensor = self._model.generate(ids, attention_mask=mask, generation_config=config, streamer=streamer)
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


def page_size_name() -> str:
    """Of the field with a page's tokens: it is another one in transformers 5.17."""
    return next(name for name in ("page_size", "block_size") if name in signature(ContinuousBatchingConfig).parameters)


class GenerateBatch(PeerHere):
    """Continuous batching of transformers: `model.generate_batch`, but with a length for each request.

    `generate_batch` takes one `max_new_tokens` for all, so this goes to the manager under it. Starting and
    stopping the manager is not timed. It notes itself when each token is there.
    """

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        if find_spec("psutil") is None and model.device.type == "cpu":
            raise ValueError("psutil must be installed for generate_batch on a CPU: pip install psutil")
        self._model = model
        self._attention = "unknown"
        page: dict[str, Any] = {page_size_name(): PAGE}
        self._settings = ContinuousBatchingConfig(
            num_blocks=slots_needed(trace) // PAGE,
            **page,
            allow_block_sharing=settings.prefix_tokens > 0,
            max_batch_tokens=settings.token_budget,
            max_memory_percent=0.9,
        )

    def describe(self) -> dict[str, object]:
        return {
            "attention": self._attention,
            **precision(self._model),
            "token_budget": self._settings.max_batch_tokens,
            "page_size": getattr(self._settings, page_size_name()),
        }

    def run(self, trace: Trace) -> PeerRun:
        tokens: list[list[int]] = [[] for _ in trace.requests]
        moments: list[list[float]] = [[] for _ in trace.requests]
        with self._manager(trace) as manager:
            clock = Clock(trace)
            left = len(trace.requests)
            while left:
                for number, asked in clock.arrived():
                    manager.add_request(
                        asked.prompt_ids, str(number), asked.new_tokens, record_timestamps=True, eos_token_id=-1
                    )
                result = manager.get_result(timeout=0.002 if clock.more_to_come else 1)
                if result is None:
                    if not manager.is_running():
                        raise PeerError("the thread of generate_batch must be running, it has ended")
                elif result.error is not None:
                    raise PeerError(f"generate_batch failed: {result.error}")
                elif result.is_finished():
                    number = int(result.request_id)
                    tokens[number] = list(result.generated_tokens)
                    arrival = trace.requests[number].arrival
                    moments[number] = [clock.since_beginning(at) - arrival for at in result.timestamps]
                    left -= 1
            seconds = clock.now()
        return PeerRun(seconds=seconds, tokens=tokens, moments=moments)

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
