"""Who serves the trace: what every peer is, and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from transformers import GenerationConfig, PreTrainedModel

from selective_compile.backend import compile_step_program
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Clock, Trace
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request
from selective_compile.runtime.stats import StepRecord

PAGE = 256  # slots; the blocks of all peers divide it


class PeerError(RuntimeError):
    """A peer failed, or did not do what was asked of it."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One run of a trace.

    Attributes:
        seconds: from the first arrival to the last token.
        tokens: of each request, in the trace's order; cut to as many as it asked for.
        moments: of each request, when each of its tokens was there, in seconds from its arrival.
        records: the engine's steps; empty for the others.
        loading_bytes, serving_bytes: the peak of the process while it was loading, compiling included, and during this
            run, above what it had before it loaded; see `apart/conversation.py`. None where nobody told.
    """

    seconds: float
    tokens: list[list[int]]
    moments: list[list[float]]
    records: list[StepRecord] = field(default_factory=list)
    loading_bytes: int | None = None
    serving_bytes: int | None = None


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
    """`Engine`, stepped by the thread that submits; blocks are reused where prompts share a prefix."""

    def __init__(self, model: PreTrainedModel, trace: Trace, settings: BenchSettings) -> None:
        self._records: list[StepRecord] = []
        config = EngineConfig(
            token_budget=settings.token_budget,
            max_requests=settings.requests,
            threads=settings.threads,
            max_kv_tokens=slots_needed(trace),
            block_reuse=settings.prefix_tokens > 0,
            compile=settings.compile,
        )
        program = compile_step_program(model, config)
        self._engine = Engine(model, config, program=program, observers=[self._records.append])
        self._engine.warm_up(progress=False)
        self._about = {
            "attention": f"selective::ragged_attention ({config.implementation})",
            **precision(model),
            "graphs": program.graphs if settings.compile else 0,
            "token_budget": settings.token_budget,
        }

    def describe(self) -> dict[str, object]:
        return self._about

    def run(self, trace: Trace) -> PeerRun:
        self._engine.drop_computed()  # no round starts with what another one computed
        self._records.clear()
        clock = Clock(trace)
        handles: list[Request] = []
        moments: list[list[float]] = [[] for _ in trace.requests]
        told = 0
        while clock.more_to_come or not all(handle.finished for handle in handles):
            for number, asked in clock.arrived():
                handles.append(self._engine.submit(asked.prompt_ids, greedy_without_end(asked.new_tokens), number))
            if not self._engine.step():
                clock.wait_for_next()
                continue
            now = clock.now()
            for share in chain.from_iterable(record.shares for record in self._records[told:]):
                if share.samples:
                    assert isinstance(share.request_id, int)
                    moments[share.request_id].append(now - trace.requests[share.request_id].arrival)
            told = len(self._records)  # a step's record may come with the next step's
        seconds = clock.now()
        tokens = [list(handle.result().tokens) for handle in handles]
        return PeerRun(seconds=seconds, tokens=tokens, moments=moments, records=list(self._records))


def greedy_without_end(new_tokens: int) -> GenerationConfig:
    """Greedy, exactly `new_tokens`: no end-of-sequence id."""
    return GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)


def slots_needed(trace: Trace) -> int:
    """KV slots for all requests at once, each in pages of its own, so that memory decides nothing; the same for every
    peer that has a pool. One page is for those that keep one for themselves."""
    lengths = (len(asked.prompt_ids) + asked.new_tokens for asked in trace.requests)
    return PAGE * (1 + sum(-(-length // PAGE) for length in lengths))


def precision(model: PreTrainedModel) -> dict[str, object]:
    name = str(model.dtype).removeprefix("torch.")
    return {"weights": name, "keys_and_values": name}
