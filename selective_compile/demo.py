"""The demo: the same requests through Hugging Face's `generate` and through the engine, tokens compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import torch
from torch import Tensor, nn

from selective_compile.backend import Program, compile_step_program, report_of
from selective_compile.checkpoints import Checkpoint
from selective_compile.options import EngineConfig
from selective_compile.progress import Stages
from selective_compile.report import Report
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import EngineStats, StepRecord
from selective_compile.tiny_model.prompts import demo_prompts

MOST_STEPS_BETWEEN_ARRIVALS = 3
WARM_UP_TOKENS = 4

Verdict = Literal["equal", "near tie", "different"]


@dataclass(frozen=True, kw_only=True)
class DemoRequest:
    """A prompt and what to do with it; `answer` is what must come, where that is known."""

    text: str
    prompt_ids: list[int]
    max_new_tokens: int
    answer: str | None
    arrival: int
    """The engine learns of it before this step."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The model compiled for the engine, and what was proved of it; nothing has been served yet."""

    checkpoint: Checkpoint
    config: EngineConfig
    program: Program
    report: Report

    @property
    def graphs(self) -> int:
        """Compiled graphs that will serve every step; 0 where the rewritten graph runs as it is."""
        return self.program.graphs if self.config.compile else 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of serving all requests: the tokens of each, in order, and the seconds it took in all."""

    name: str
    seconds: float
    tokens: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """The engine's way; `arrivals` has the step before which each request was submitted."""

    way: Way
    records: list[StepRecord]
    arrivals: dict[RequestId, int]
    stats: EngineStats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The engine's tokens of one request against `generate` on that request alone.

    `behind` is how far, at most, the logit of an engine's token lay below the largest, in the model's own eyes;
    None where one of the two ends and the other goes on.
    """

    verdict: Verdict
    behind: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a demo found out."""

    requests: list[DemoRequest]
    alone: Way
    padded: Way
    comparisons: list[Comparison]
    run: EngineRun

    @property
    def ok(self) -> bool:
        """Whether no request got other tokens than from `generate`, near ties of foreign models aside."""
        return all(comparison.verdict != "different" for comparison in self.comparisons)


def make_requests(checkpoint: Checkpoint, count: int, seed: int) -> list[DemoRequest]:
    """`count` requests of mixed lengths, each arriving some steps after the one before.

    Raises:
        ValueError: `count` is below 1.
    """
    rng = Random(seed)
    arrival = 0
    requests = []
    for prompt in demo_prompts(count, seed):
        ids = checkpoint.tokenizer(prompt.text).input_ids
        answer = prompt.answer if checkpoint.shipped else None
        requests.append(
            DemoRequest(
                text=prompt.text,
                prompt_ids=ids,
                max_new_tokens=prompt.max_new_tokens,
                answer=answer,
                arrival=arrival,
            )
        )
        arrival += rng.randint(0, MOST_STEPS_BETWEEN_ARRIVALS)
    return requests


def prepare(checkpoint: Checkpoint, config: EngineConfig, stages: Stages) -> Prepared:
    """Prove and compile the model.

    Raises:
        RefusedError: something could not be proved, and the model cannot be run as `generate` runs it.
    """
    doing = "proving and compiling" if config.compile else "proving"
    with stages(f"{doing} {type(checkpoint.model).__name__}"):
        program = compile_step_program(checkpoint.model, config)
    report = report_of(program, checkpoint.model)
    return Prepared(checkpoint=checkpoint, config=config, program=program, report=report)


def serve(prepared: Prepared, requests: Sequence[DemoRequest], stages: Stages) -> Outcome:
    """Run the requests all three ways and compare.

    Raises:
        ValueError: a request does not fit the model's positions or the pool.
        StepError: a step failed.
    """
    checkpoint = prepared.checkpoint
    alone = one_by_one(checkpoint, requests, stages)
    padded = padded_batch(checkpoint, requests, stages)
    run = through_engine(prepared, requests, stages)
    comparisons = [
        compare(checkpoint, request.prompt_ids, ours, theirs)
        for request, ours, theirs in zip(requests, run.way.tokens, alone.tokens, strict=True)
    ]
    return Outcome(requests=list(requests), alone=alone, padded=padded, run=run, comparisons=comparisons)


def one_by_one(checkpoint: Checkpoint, requests: Sequence[DemoRequest], stages: Stages) -> Way:
    """Each request by itself through `model.generate`: the tokens that everybody else must give."""
    first = requests[0]
    generate(checkpoint, [first.prompt_ids], min(first.max_new_tokens, WARM_UP_TOKENS))
    tokens, seconds = [], 0.0
    with stages("generate, one by one", len(requests)) as advance:
        for request in requests:
            begin = time.perf_counter()
            tokens += generate(checkpoint, [request.prompt_ids], request.max_new_tokens)
            seconds += time.perf_counter() - begin
            advance(1)
    return Way(name="generate, one by one", seconds=seconds, tokens=tokens)


def padded_batch(checkpoint: Checkpoint, requests: Sequence[DemoRequest], stages: Stages) -> Way:
    """All requests as one padded batch, which goes on until the longest answer is done; the rest is cut off."""
    longest = max(request.max_new_tokens for request in requests)
    with stages("generate, padded batch"):
        begin = time.perf_counter()
        rows = generate(checkpoint, [request.prompt_ids for request in requests], longest)
        seconds = time.perf_counter() - begin
    tokens = [row[: request.max_new_tokens] for row, request in zip(rows, requests, strict=True)]
    return Way(name="generate, padded batch", seconds=seconds, tokens=tokens)


def generate(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy tokens by Hugging Face's own `generate`, up to and with the end-of-sequence id where there is one."""
    config = checkpoint.greedy(max_new_tokens)
    ids, mask = left_padded(prompts, checkpoint.padding_id, checkpoint.model.device)
    given = {"generation_config": config, "tokenizer": checkpoint.tokenizer}  # for stop strings of the model's own
    out = checkpoint.model.generate(ids, attention_mask=mask, **given)
    return [until_end(row, config.eos_token_id) for row in out[:, ids.shape[1] :].tolist()]


def left_padded(prompts: Sequence[Sequence[int]], padding_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both ``[B, S]`` int64, the padding in front."""
    length = max(map(len, prompts))
    ids = [[padding_id] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def until_end(tokens: list[int], eos_token_id: int | list[int] | None) -> list[int]:
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


def through_engine(prepared: Prepared, requests: Sequence[DemoRequest], stages: Stages) -> EngineRun:
    """All requests through the engine, each submitted before the step of its arrival.

    Time is counted in steps, so that the schedule is the same on every machine. Where the engine has nothing to
    do, the next request comes at once.
    """
    records: list[StepRecord] = []
    engine = Engine(prepared.checkpoint.model, prepared.config, program=prepared.program, observers=[records.append])
    warm_up(engine, prepared.checkpoint, requests[0])
    before = engine.stats()
    records.clear()
    handles: list[Request] = []
    arrivals: dict[RequestId, int] = {}
    name = "engine, arriving over time"
    begin = time.perf_counter()
    with stages(name, len(requests)) as advance:
        done = 0
        while done < len(requests):
            for request in requests[len(handles) :]:
                if request.arrival > len(records) and done < len(handles):
                    break
                arrivals[len(handles)] = len(records)
                config = prepared.checkpoint.greedy(request.max_new_tokens)
                tokenizer = prepared.checkpoint.tokenizer
                handles.append(engine.submit(request.prompt_ids, config, len(handles), tokenizer=tokenizer))
            engine.step()
            finished = sum(handle.finished for handle in handles)
            advance(finished - done)
            done = finished
    seconds = time.perf_counter() - begin
    way = Way(name=name, seconds=seconds, tokens=[handle.tokens for handle in handles])
    return EngineRun(way=way, records=records, arrivals=arrivals, stats=since(before, engine.stats()))


def warm_up(engine: Engine, checkpoint: Checkpoint, request: DemoRequest) -> None:
    engine.warm_up()
    config = checkpoint.greedy(min(request.max_new_tokens, WARM_UP_TOKENS))
    engine.submit(request.prompt_ids, config, "warm-up", tokenizer=checkpoint.tokenizer).result()
    engine.drop_computed()


def since(before: EngineStats, after: EngineStats) -> EngineStats:
    """`after`, without what was counted in `before`."""
    return replace(
        after,
        steps=after.steps - before.steps,
        preemptions=after.preemptions - before.preemptions,
        tokens_computed=after.tokens_computed - before.tokens_computed,
        tokens_generated=after.tokens_generated - before.tokens_generated,
    )


def compare(
    checkpoint: Checkpoint, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Comparison:
    """Are these the tokens of `generate`?

    Where two logits are closer than the arithmetic tells apart, either token is right. The model that ships has
    clear margins in float32, so nothing is a near tie there.
    """
    if list(ours) == list(theirs):
        return Comparison(verdict="equal", behind=0.0)
    if all(one == other for one, other in zip(ours, theirs, strict=False)):
        return Comparison(verdict="different", behind=None)
    behind, tolerance = worst_choice(checkpoint.model, prompt_ids, ours)
    strict = checkpoint.shipped and checkpoint.model.dtype == torch.float32
    return Comparison(verdict="near tie" if behind < tolerance and not strict else "different", behind=behind)


@torch.no_grad()
def worst_choice(model: nn.Module, prompt_ids: Sequence[int], tokens: Sequence[int]) -> tuple[float, float]:
    """How far the logits of `tokens` lie, at most, below the largest; and how far is a matter of rounding."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt_ids, *tokens]], device=device)
    raw = model(ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]  # [tokens, V]
    logits = raw.float()
    chosen = logits.gather(1, ids[0, len(prompt_ids) :, None])[:, 0]
    behind = (logits.amax(dim=1) - chosen).amax().item()
    rounding = 4 * torch.finfo(raw.dtype).eps * logits.abs().amax().item()
    return behind, max(1e-4, rounding)


def schedule_labels(requests: Sequence[DemoRequest]) -> Mapping[RequestId, str]:
    """Number and end of each prompt: prompts that begin alike differ there."""
    texts = [request.text.strip() for request in requests]
    ends = [text if len(text) <= 20 else f"...{text[-17:]}" for text in texts]
    return {number: f"#{number} {end}" for number, end in enumerate(ends)}
