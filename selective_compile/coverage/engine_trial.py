"""Whether the engine gives a model's own tokens and logits, with requests coming and going and memory short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from selective_compile.coverage.oracle import TOLERANCE, Oracle, furthest, spread
from selective_compile.coverage.recorder import Recorder
from selective_compile.coverage.trial import Trial
from selective_compile.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Served:
    """One request as the engine served it; ``logits`` [tokens, V] are those that its tokens were chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class EngineTrial:
    """How the engine's answers compare with the oracle's.

    Attributes:
        tokens: ``equal`` to those of generate, near ties aside; ``as forward``: generate itself departs from the
            model's own forward, which they follow; ``open``: neither, but generate and forward contradict each other
            for the request (a choice among equal scores, say); or ``wrong``.
        requests, generated, near_ties, preemptions: how much was tried.
        error: the largest difference of a logit from the oracle's, in units of the logits' spread.
        first_wrong: prompt length, place and tokens of the first wrong one, for a reproduction.
    """

    tokens: str
    requests: int
    generated: int
    near_ties: int
    preemptions: int
    error: float
    first_wrong: str = ""


def serve(model: Any, program: Any, trial: Trial, vocabulary: int) -> tuple[list[Served], int]:
    """All requests of the trial through one engine, arriving between steps; and how often one was preempted."""
    recorder = Recorder(program)
    engine = Engine(model, trial.engine_config, program=recorder, observers=[recorder.observe])  # type: ignore[arg-type]
    prompts, requests = trial.prompts(vocabulary), []
    for number, (prompt, count, pause) in enumerate(zip(prompts, trial.counts(), trial.arrivals(), strict=True)):
        config = GenerationConfig(max_new_tokens=count, do_sample=False)
        requests.append(engine.submit(prompt, config, request_id=number))
        for _ in range(pause):
            engine.step()
    results = [request.result() for request in requests]
    for failed in (result for result in results if result.error is not None):
        raise RuntimeError(failed.error)
    served = [
        Served(prompt=prompt, tokens=list(result.tokens), logits=torch.stack(recorder.logits[number]).float())
        for number, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    ]
    return served, engine.stats().preemptions


def compared(served: Sequence[Served], preemptions: int, oracle: Oracle) -> EngineTrial:
    """Every request next to the oracle's `generate`, and to its `forward` where that departs."""
    found = [compare(one, oracle) for one in served]
    kinds = [kind for kind, *_ in found]
    worst = next(kind for kind in ("wrong", "open", "as forward", "equal") if kind in kinds)
    return EngineTrial(
        tokens=worst,
        requests=len(served),
        generated=sum(len(one.tokens) for one in served),
        near_ties=sum(ties for _, ties, *_ in found),
        preemptions=preemptions,
        error=max(error for _, _, error, _ in found),
        first_wrong=next((place for *_, place in found if place), ""),
    )


def compare(one: Served, oracle: Oracle) -> tuple[str, int, float, str]:
    """Kind, near ties, error, and where the first wrong token is."""
    answer = oracle.generated(one.prompt, len(one.tokens))
    same = next((i for i, (a, b) in enumerate(zip(one.tokens, answer.tokens, strict=True)) if a != b), len(one.tokens))
    # Up to and including the first difference both were asked the same question.
    error = furthest(one.logits[: same + 1], answer.logits[: same + 1])
    if same == len(one.tokens) and error < TOLERANCE:
        return "equal", 0, error, ""
    alone = oracle.logits_after(one.prompt, one.tokens)
    ties, wrong = judged(one.tokens, alone)
    error_alone = furthest(one.logits, alone)
    if not wrong and error_alone < TOLERANCE:
        return ("equal" if error < TOLERANCE else "as forward"), ties, error_alone, ""
    if not wrong and same == len(one.tokens):
        return "equal", ties, min(error, error_alone), ""
    if furthest(oracle.logits_after(one.prompt, answer.tokens), answer.logits) > TOLERANCE:
        return "open", ties, min(error, error_alone), ""
    place = f"prompt of {len(one.prompt)}, token {wrong[0] if wrong else same} of {len(one.tokens)}"
    return "wrong", ties, min(error, error_alone), place


def judged(tokens: Sequence[int], alone: Tensor) -> tuple[int, list[int]]:
    """How many tokens are near ties, and which are wrong, by the logits ``[tokens, V]`` of the model alone."""
    ties, wrong = 0, []
    scale = spread(alone)
    for place, token in enumerate(tokens):
        behind = float(alone[place].max() - alone[place, token])
        if behind >= TOLERANCE * scale or alone[place].isnan().any():
            wrong.append(place)
        elif token != int(alone[place].argmax()):
            ties += 1
    return ties, wrong
