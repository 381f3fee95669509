"""Whole decode steps of each model through the engine, next to the least time for them and to their graph alone.

over_replay: what the last of the timed steps took beside as many replays of their captured graph, back to back right
behind them with the inputs of the very last: contexts are two tokens longer then, 0.2 %.
idle: that as a part of the step: where the device waits for the host. What lies between the kernels of the graph is not
in it, but in the step's distance from its floor. It is a difference of two times of a device whose clocks go by its
power, and can be trusted as far as these hold: on an H200 thirty replays with 256 requests took 4 % longer than the
steps before them, while at 128 and fewer both were within 0.6 %. So replays of later windows stand beside the first
(`replays_microseconds`), and a row whose graph alone took longer than the step says so: its idle part is not known to
be below what the two differ by.

rows: that matrix products have in the step. No step has less than two (`runtime.batch.SMALLEST`), so that one request
alone is computed beside a row that is nobody's; its floor is that of one.

idle_between_runs: the part of a step's time on the host that lies outside of the events around the model's run.

Behind all that is timed, since what it leaves on the device may slow it down, torch's profiler looks at some steps
(`steps_profiled`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from transformers import PreTrainedModel

from benchmarks.gpu_parts import ceilings, tokens
from benchmarks.gpu_parts.decoding import LAST, Decoded, decoded, replayed
from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.floors import idle_share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.models import random_model, step_work
from benchmarks.gpu_parts.rows import ALL_TIMED, NO_TIME, Row
from benchmarks.gpu_parts.steps_profiled import profile_steps
from benchmarks.gpu_parts.timing import free_bytes
from selective_compile.bench.peers import greedy_without_end
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.graph_sizes import decode_sizes
from selective_compile.runtime.request import Request
from selective_compile.runtime.stats import StepRecord

# Requests that decode together, more and more of them: the most are there when all is timed, and are profiled, and then
# the one that is left, with no prompt computed for it.
COUNTS = (1, 8, 32, 128, 256)
# The second is enough for the steps of all counts, and those in which prompts are computed.
PROMPT, GENERATED = 1024, 512
TINY_PROMPT, TINY_GENERATED = 12, 64
WARM, TIMED = 6, 30
REPLAYS = TIMED // LAST  # windows of them
SLOWED = 1.01  # a graph alone that takes more of its step than this shows a device with other clocks
# Its engine finds out how much memory a step takes, and gives the rest to its pool, as engines do by default; that of
# the others is what their requests need, which takes no time.
PROFILED_POOL = "llama-3.2-1b"
SPARE = 4e9  # for activations, and what compiling tries


def run(context: Context) -> None:
    best = ceilings.measured(context)
    model = random_model(context.job.name, context.device, tiny=context.tiny)
    work = step_work(model)
    counts = list(_that_fit(context, work.kv_bytes_per_token))
    if not counts:
        return
    records: list[StepRecord] = []
    engine = make_engine(context, model, max(counts), records)
    tokens.compare(context, f"{context.job.name}: tokens", model, engine)
    running: list[Request] = []
    for count in counts:
        name = f"{context.job.name}, {count} requests"
        if name in context.job.done:
            continue
        if context.seconds_left < 0:
            context.fail(name, NO_TIME)
            continue
        try:
            resize(context, engine, running, count)
            settle(engine, running)
            found = decoded(engine, records, 2 if context.tiny else TIMED)
            alone = replayed(engine, REPLAYS)
            context.tell(row(context, name, found, alone, work.floor_seconds(found.contexts, best)))
        except FAILURES as error:
            context.failed(name, error)
    context.tell(context.job.row(f"{context.job.name}: {ALL_TIMED}", text="what follows is of torch's profiler"))
    profile_counts(context, engine, running, counts)


def profile_counts(context: Context, engine: Engine, running: list[Request], counts: list[int]) -> None:
    """The most and then the fewest of the requests that there are, so that no prompt has to be computed for it."""
    possible = [count for count in counts if count <= len(running)]
    for count in sorted({max(possible), min(possible)} if possible else (), reverse=True):
        name = f"{context.job.name}, {count} requests: profiled"
        if context.seconds_left < 0 or name in context.job.done:
            return
        try:
            resize(context, engine, running, count)
            settle(engine, running)
            profile_steps(context, name, engine)
        except FAILURES as error:
            context.failed(name, error)


def row(context: Context, name: str, found: Decoded, replays: tuple[float, ...] | None, floor: float) -> Row:
    """`replays` as of `replayed`."""
    alone = None if replays is None else replays[0]
    slowed = alone is not None and alone > SLOWED * found.last_wall
    idle = None if alone is None or slowed else idle_share(alone, found.last_wall)
    between = None if found.span is None else idle_share(found.span, found.wall)
    count = len(found.contexts)
    rows = next(size for size in decode_sizes(count) if size >= count)
    figures = {
        "microseconds": 1e6 * found.wall,
        "floor_microseconds": 1e6 * floor,
        "share_of_floor": floor / found.wall,
        "replay_microseconds": None if alone is None else 1e6 * alone,
        "replays_microseconds": None if replays is None else [1e6 * seconds for seconds in replays],
        "over_replay_microseconds": None if alone is None else 1e6 * (found.last_wall - alone),
        "tokens_per_second": count / found.wall,
        "rows": rows,
        "mean_context": sum(found.contexts) / count,
        "quartile_microseconds": [1e6 * seconds for seconds in found.quartiles],
        "idle": idle,
        "idle_between_runs": between,
        "counts": True,
    }
    text = f"{1e6 * found.wall:9.0f} us  {floor / found.wall:6.1%} of speed at the floor of {1e6 * floor:.0f} us"
    text += f", {rows} rows" * (rows != count)
    text += "; no graph" if alone is None else f"; {1e6 * (found.last_wall - alone):.0f} us over its graph alone"
    text += "" if idle is None else f", idle {idle:.2%}"
    if slowed:
        text += ", idle not known: the graph alone took longer, the device may have slowed down"
    text += f"; between runs {'unknown' if between is None else format(between, '.2%')}"
    return context.job.row(name, figures=figures, text=text)


def make_engine(context: Context, model: PreTrainedModel, most: int, records: list[StepRecord]) -> Engine:
    """With room for so many requests, and no block shared: each has keys and values of its own."""
    needed = most * sum(_tokens(context))
    config = EngineConfig(
        token_budget=context.job.token_budget,
        max_requests=most,
        max_kv_tokens=None if context.job.name == PROFILED_POOL else max(needed, tokens.room()),
        block_reuse=False,
        compile=not context.tiny,
    )
    engine = Engine(model, config, observers=[records.append])
    if config.max_kv_tokens is None:
        _tell_pool(context, engine, needed)
    return engine


def _tell_pool(context: Context, engine: Engine, needed: int) -> None:
    """How large the pool is that the engine found room for, and what it left."""
    name, stats, free = f"{context.job.name}: pool", engine.stats(), free_bytes(context.device)
    slots = stats.blocks_max * stats.block_size
    text = f"{slots} tokens, {stats.kv_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are left"
    if slots < needed:
        context.fail(name, f"must be of at least {needed} tokens, got {text}")
        return
    figures = {"tokens": slots, "kv_bytes": stats.kv_bytes, "free_bytes": free}
    context.tell(context.job.row(name, figures=figures, text=text))


def _that_fit(context: Context, kv_bytes_per_token: int) -> Iterator[int]:
    free = free_bytes(context.device) - SPARE * (not context.tiny)
    for count in (1, 2) if context.tiny else (1, 32) if context.quick else COUNTS:
        needed = count * sum(_tokens(context)) * kv_bytes_per_token
        if needed <= free:
            yield count
        else:
            name = f"{context.job.name}, {count} requests"
            context.skip(name, f"needs {needed / 1e9:.0f} GB of keys and values, {free / 1e9:.0f} GB are free")


def _tokens(context: Context) -> tuple[int, int]:
    """Of a request: of its prompt, and those that it generates."""
    return (TINY_PROMPT, TINY_GENERATED) if context.tiny else (PROMPT, GENERATED)


def resize(context: Context, engine: Engine, running: list[Request], count: int) -> None:
    """So many requests, which go on to the end of the job: more of random tokens, or fewer, of those that there are."""
    for request in running[count:]:
        engine.cancel(request)
    del running[count:]
    draw, (prompt, generated) = Random(count), _tokens(context)
    words, config = range(engine.vocab_size), greedy_without_end(generated)
    running += [engine.submit(draw.choices(words, k=prompt), config) for _ in range(count - len(running))]


def settle(engine: Engine, requests: list[Request]) -> None:
    """Until the prompts of all are computed, and some steps on."""
    while not all(request.tokens for request in requests) and engine.step():
        pass
    for _ in range(WARM):
        engine.step()
