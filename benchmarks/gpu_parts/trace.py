"""256 requests at once, prompts and outputs uniform in 100 to 1024 tokens, through the engine and its peers.

All serve a short sample first: every request with an eighth of its prompt and of its outputs, so that as many decode
beside each other as in the trace, and graphs are captured, by us and by peers, that a step first needs. Then the engine
serves the trace, for which there is a bar, and what it then has time for: a sample, every eighth request as it is, and
the short one again. A peer serves the sample, and then the trace, if by what it has served there is time: for a sample
if there may be, since the estimate is of steps with eight times as many requests. Both compare by what says most of
what both have served, and a bar is for the trace alone. What is served again counts by the last time.

`Engine.warm_up` is not called, which captures all that there can be, of tokens that are drawn, too; those that the
trace is first to need are captured in its time, and counted beside it. The peers are those of transformers, one after
another. All models have the same weights, each an object of its own in a process of its own.
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
from benchmarks.gpu_parts.rows import NO_TIME, SAMPLE, SHORT, TRACE
from selective_compile.bench.peers import greedy_without_end, slots_needed
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Asked, Trace
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine

MODEL = "llama-3.1-8b"
EIGHTH = 8
HASTE = 1.2  # a trace takes longer by its outputs, of which later ones have longer contexts
# A peer's sample is begun with so much of the time that it would take by a short one, whose steps compute eight times
# as many requests over as many keys and values: a step takes as long if it reads those and waits for the host, an
# eighth where each request looks at the keys of all, as in a paged attention by masks. What is begun and not done costs
# time.
HOPE = 0.5
# What is served, one after the other. The engine ends with what it can serve again when all graphs are captured.
OURS = (SHORT, TRACE, SAMPLE, SHORT)
# With the short one again only where by its first time, in which graphs are captured, there is none for the sample.
OF_PEERS = (SHORT, SAMPLE, SHORT, SAMPLE, TRACE)


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
    serve(shortened(shortened(uniform_trace(2, limits, model.config.vocab_size, seed=1))))  # warms up
    if context.seconds_left < 0:
        context.fail(f"{context.job.name}, {SHORT}", NO_TIME)
        return
    asked = {SHORT: shortened(trace), SAMPLE: sampled(trace), TRACE: trace}
    order = OURS if context.job.ours else OF_PEERS
    served: dict[str, Took] = {}
    expected = 0.0
    for place, what in enumerate(order):
        if not context.job.ours and SAMPLE in served and what != TRACE:
            continue
        if served:
            expected = _expected(context, what, served, asked)
        # A bar is for ours: at worst it is stopped, which costs what comes behind it nothing.
        if expected > context.seconds_left and not (context.job.ours and what == TRACE):
            if what not in served and what not in order[place + 1 :]:
                times = f"{expected:.0f} s or more, {context.seconds_left:.0f} s are left"
                context.skip(f"{context.job.name}, {what}", f"by what was served it takes {times}")
            continue
        took, again = serve(asked[what]), what in served
        served.pop(what, None)  # so that it is the last
        served[what] = took
        _tell(context, what, asked[what], took, about(), again=again)


def _expected(context: Context, what: str, served: dict[str, Took], asked: dict[str, Trace]) -> float:
    """Seconds, by what was served last; of a peer's sample, at best. Of a trace by what says most: a sample has an
    eighth of its requests beside each other, and a short one an eighth of their contexts."""
    estimates = [seconds_by(took, asked[of], asked[what]) for of, took in served.items()]
    if what == TRACE:
        return max(estimates)
    return estimates[-1] * (HOPE if what == SAMPLE and not context.job.ours else 1.0)


def seconds_by(took: Took, sample: Trace, trace: Trace) -> float:
    """What a trace would take by what a sample of it took, or not much less: prompts as many times as long as they are
    more tokens, and what came behind them as many times as a request has more outputs. That more requests decode
    beside each other makes a step longer, by how much depends on who serves; that as many do with longer contexts,
    too."""
    prompts, outputs = trace.prompt_tokens / sample.prompt_tokens, _mean_outputs(trace) / _mean_outputs(sample)
    haste = HASTE if len(trace.requests) >= len(sample.requests) else 1.0
    return took.prompts * prompts + haste * (took.seconds - took.prompts) * outputs


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


def sampled(trace: Trace) -> Trace:
    """Every eighth request."""
    return Trace(requests=trace.requests[::EIGHTH])


def shortened(trace: Trace) -> Trace:
    """The same requests, each with an eighth of its prompt and of its outputs."""

    def shorter(one: Asked) -> Asked:
        return replace(
            one, prompt_ids=one.prompt_ids[: _eighth(len(one.prompt_ids))], new_tokens=_eighth(one.new_tokens)
        )

    return Trace(requests=tuple(map(shorter, trace.requests)))


def _eighth(number: int) -> int:
    return -(-number // EIGHTH)


def engine(context: Context, model: PreTrainedModel, trace: Trace) -> tuple[Callable[[], str], Serve]:
    config = EngineConfig(
        token_budget=context.job.token_budget,
        max_requests=len(trace.requests),
        max_kv_tokens=slots_needed(trace),
        block_reuse=False,  # the samples have prompts of the trace
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


def _tell(context: Context, what: str, trace: Trace, took: Took, attention: str, *, again: bool) -> None:
    rate = trace.new_tokens / took.seconds
    figures = {
        "output_tokens_per_second": rate,
        "seconds": took.seconds,
        "of": what,
        "requests": len(trace.requests),
        "output_tokens": trace.new_tokens,
        "attention": attention,
        "again": again,
        "captured": took.captured,
    }
    text = f"{rate:9.0f} output tokens/s  ({len(trace.requests)} requests, {trace.new_tokens} tokens; {attention})"
    text += f"; {took.captured} graphs were captured meanwhile" if took.captured else ""
    name = f"{context.job.name}, {what}{', again' * again}"
    context.tell(context.job.row(name, figures=figures, text=text))
