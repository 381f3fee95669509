"""256 requests at once, prompts and outputs uniform in 100 to 1024 tokens, through the engine and its peers.

Each serves a small sample first, a fourth of the requests with an eighth of the outputs; then a sample, all requests
with an eighth of the outputs; then the trace. A peer goes on only if by what it has served there is time for the next;
so they compare on the small sample at least. A sample is served twice where that takes a third of the time or less, and
the second time counts: graphs are captured, by us and by peers, when a step first needs one. `Engine.warm_up` is not
called, which captures all that there can be, of tokens that are drawn, too; those that the trace is first to need are
captured in its time, and counted beside it. The peers are those of transformers. All models have the same weights, each
an object of its own in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple, cast

from transformers import PreTrainedModel

from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.models import random_model
from benchmarks.gpu_parts.rows import NO_TIME
from selective_compile.bench.peers import greedy_without_end, slots_needed
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Asked, Trace
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine

MODEL = "llama-3.1-8b"
FEWER, SHORTENED = 4, 8  # requests and outputs of samples
SMALL, SAMPLE, TRACE = "a small sample", "a sample", "the trace"
HASTE = 1.2  # a trace takes longer by its outputs, of which later ones have longer contexts


class Took(NamedTuple):
    """Seconds of all, and of them those until every request had its first token, in which prompts are computed; and how
    many graphs of steps were captured meanwhile, None: who served does not tell."""

    seconds: float
    prompts: float
    captured: int | None = None


Serve = Callable[[Trace], Took]


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """What the peers of `selective_compile.bench` look at."""

    token_budget: int
    prefix_tokens: int = 0


def run(context: Context) -> None:
    model = random_model(MODEL, context.device, tiny=context.tiny)
    limits = (3, 12) if context.tiny else (100, 1024)
    trace = uniform_trace(context.job.requests, limits, model.config.vocab_size)
    about, serve = PEERS[context.job.name](context, model, trace)
    serve(shortened(uniform_trace(2, limits, model.config.vocab_size, seed=1)))  # warms up
    if context.seconds_left < 0:
        context.fail(f"{context.job.name}, {SMALL}", NO_TIME)
        return
    sample = shortened(trace)
    before: tuple[Took, Trace] | None = None
    for what, asked in ((SMALL, fewer(sample)), (SAMPLE, sample), (TRACE, trace)):
        expected = seconds_by(*before, asked) if before is not None else 0.0
        # A bar is for ours: at worst it is stopped, which costs what comes behind it nothing.
        if expected > context.seconds_left and not context.job.ours:
            left = f"{context.seconds_left:.0f} s are left"
            context.skip(f"{context.job.name}, {what}", f"by what was served it would take {expected:.0f} s, {left}")
            return
        took, served = serve(asked), 1
        if what != TRACE and HASTE * took.seconds < context.seconds_left / 3:
            took, served = serve(asked), 2
        _tell(context, what, asked, took, about(), served)
        before = took, asked


def seconds_by(took: Took, sample: Trace, trace: Trace) -> float:
    """What a trace would take by what a sample of it took, or not much less: prompts as many times as long as they are
    more tokens, and what came behind them as many times as a request has more outputs. That more requests decode
    beside each other makes a step longer, by how much depends on who serves."""
    prompts, outputs = trace.prompt_tokens / sample.prompt_tokens, _mean_outputs(trace) / _mean_outputs(sample)
    return took.prompts * prompts + HASTE * (took.seconds - took.prompts) * outputs


def _mean_outputs(trace: Trace) -> float:
    return trace.new_tokens / len(trace.requests)


def uniform_trace(requests: int, limits: tuple[int, int], vocabulary: int, seed: int = 0) -> Trace:
    """All there from the start; prompts and outputs of uniformly drawn lengths, ends included."""
    draw = Random(seed)
    words = range(vocabulary)

    def asked() -> Asked:
        prompt = draw.choices(words, k=draw.randint(*limits))
        return Asked(prompt_ids=prompt, new_tokens=draw.randint(*limits), arrival=0.0)

    return Trace(requests=tuple(asked() for _ in range(requests)))


def fewer(trace: Trace) -> Trace:
    """The first fourth of the requests."""
    return Trace(requests=trace.requests[: max(1, len(trace.requests) // FEWER)])


def shortened(trace: Trace) -> Trace:
    """The same prompts, with an eighth of the outputs."""
    return Trace(requests=tuple(replace(one, new_tokens=-(-one.new_tokens // SHORTENED)) for one in trace.requests))


def engine(context: Context, model: PreTrainedModel, trace: Trace) -> tuple[Callable[[], str], Serve]:
    config = EngineConfig(
        token_budget=context.job.token_budget,
        max_requests=len(trace.requests),
        max_kv_tokens=slots_needed(trace),
        block_reuse=False,  # the sample has the prompts of the trace
        compile=not context.tiny,
    )
    server = Engine(model, config)

    def serve(asked: Trace) -> Took:
        captured = server.stats().captured
        began, prompts, begun = time.perf_counter(), 0.0, 0
        handles = [server.submit(one.prompt_ids, greedy_without_end(one.new_tokens)) for one in asked.requests]
        while server.step():
            while begun < len(handles) and handles[begun].tokens:  # a look at one request in most steps
                begun, prompts = begun + 1, time.perf_counter() - began
        took = time.perf_counter() - began
        _check(asked, [len(handle.tokens) for handle in handles])
        return Took(took, prompts, server.stats().captured - captured)

    return lambda: "selective::ragged_attention", serve


def transformers_peer(context: Context, model: PreTrainedModel, trace: Trace) -> tuple[Callable[[], str], Serve]:
    """`generate_batch`, or `generate` on one padded batch of all requests, with the attention that they choose."""
    from selective_compile.bench.transformers_peers import GenerateBatch, PaddedGenerate

    settings = cast(BenchSettings, PeerSettings(token_budget=context.job.token_budget))
    kinds: dict[str, Any] = {"generate_batch": GenerateBatch, "generate": PaddedGenerate}
    peer = kinds[context.job.name](model, trace, settings)

    def serve(asked: Trace) -> Took:
        run = peer.run(asked)
        _check(asked, [len(tokens) for tokens in run.tokens])
        firsts = [moments[0] for moments in run.moments if moments]
        return Took(float(run.seconds), max(firsts, default=0.0))

    return lambda: str(peer.describe()["attention"]), serve


PEERS = {"engine": engine, "generate_batch": transformers_peer, "generate": transformers_peer}


def _check(trace: Trace, lengths: list[int]) -> None:
    wanted = [one.new_tokens for one in trace.requests]
    if lengths != wanted:
        raise ValueError(f"all requests must get their {sum(wanted)} tokens, got {sum(lengths)}")


def _tell(context: Context, what: str, trace: Trace, took: Took, attention: str, served: int) -> None:
    rate = trace.new_tokens / took.seconds
    figures = {
        "output_tokens_per_second": rate,
        "seconds": took.seconds,
        "requests": len(trace.requests),
        "output_tokens": trace.new_tokens,
        "is_sample": what != TRACE,
        "attention": attention,
        "served": served,
        "captured": took.captured,
    }
    text = f"{rate:9.0f} output tokens/s  ({len(trace.requests)} requests, {trace.new_tokens} tokens; {attention})"
    text += f"; {took.captured} graphs were captured meanwhile" if took.captured else ""
    context.tell(context.job.row(f"{context.job.name}, {what}", figures=figures, text=text))
