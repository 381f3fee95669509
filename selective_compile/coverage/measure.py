"""All that is measured of one model type, in the order in which it becomes known."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from selective_compile.backend import compile_step_program, report_of, selective, unproved_report
from selective_compile.coverage.engine_trial import compared, serve
from selective_compile.coverage.families import family_of
from selective_compile.coverage.oracle import Oracle, forward, furthest, takes_mask
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.coverage.trial import FULL, Trial, padded_batches
from selective_compile.passes import Refusal, RefusedError
from selective_compile.report import Report

Facts = dict[str, Any]
SHOWN_REFUSALS = 6


def measure(model_type: str, trial: Trial = FULL, *, with_padded: bool = True) -> Iterator[Facts]:
    """Facts about the type, as JSON has them; each part stands even if a later one ends the process.

    ``with_padded``: False leaves out the padded call, which takes most of the time.
    """
    started, worked = time.perf_counter(), time.process_time()
    model: Any = random_model(model_type)
    yield {
        "family": family_of(model_type),
        "class": type(model).__name__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "attention": str(model.config._attn_implementation),
        "build_seconds": round(time.perf_counter() - started, 2),
    }
    oracle = Oracle(model_type)
    yield {"oracle_attention": oracle.attention, **alone(oracle, trial)}
    yield from engine(model, oracle, trial)
    if with_padded:
        yield {"padded": dict(padded(model))}
    yield {"seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - worked, 1)}


def alone(oracle: Oracle, trial: Trial) -> Facts:
    """Whether the model itself is causal: what it says of a prompt must not depend on what follows."""
    prompt = trial.prompts(vocabulary_of(oracle.model))[2]
    whole = oracle.logits_after(prompt[:1], prompt[1:])
    cut = oracle.logits_after(prompt[:1], prompt[1 : len(prompt) // 2])
    return {"causal": furthest(whole[: len(cut)], cut) < 1e-3}


def engine(model: Any, oracle: Oracle, trial: Trial) -> Iterator[Facts]:
    """The verdict, what compiling takes, and the engine's answers unless it refuses the model."""
    started = time.process_time()
    try:
        program = compile_step_program(model, trial.engine_config)
    except RefusedError as error:
        yield verdict(unproved_report(model, error.refusals), started)
        return
    yield verdict(report_of(program, model), started)
    started = time.perf_counter()
    served, preemptions = serve(model, program, trial, vocabulary_of(model))
    found = compared(served, preemptions, oracle)
    yield {"engine": dataclasses.asdict(found) | {"seconds": round(time.perf_counter() - started, 2)}}


def verdict(report: Report, started: float) -> Facts:
    return {
        "verdict": report.verdict,
        "compile_seconds": round(time.process_time() - started, 2),  # of one thread: others do not slow it down
        "token_wise_nodes": report.token_wise_nodes,
        "calls": [f"{call.form}: {call.mask}" for call in report.calls],
        "isolated": list(report.isolated),
        "refusals": [facts_of(refusal) for refusal in report.refusals[:SHOWN_REFUSALS]],
        "refusal_count": len(report.refusals),
    }


def facts_of(refusal: Refusal) -> Facts:
    return {
        "operator": refusal.operator,
        "reason": refusal.reason,
        "module": refusal.module,
        "source_line": without_machine(refusal.source_line),
    }


def without_machine(source_line: str) -> str:
    """The path from the package on: where it is installed says nothing."""
    inside = source_line.split("site-packages/")[-1]
    return inside[inside.index("selective_compile/") :] if "/selective_compile/" in inside else inside


@torch.no_grad()
def padded(model: Any) -> Iterator[tuple[str, Facts]]:
    """For each kind of padding, the error on real tokens and, where the graph runs as it came, the reason."""
    torch._dynamo.reset()
    selective.reports.clear()
    fast = torch.compile(model, backend=selective, options={"inductor": False})
    for name, ids, mask in padded_batches(vocabulary_of(model)):
        ours, theirs = (forward(call, ids, mask if takes_mask(model) else None) for call in (fast, model))
        real = mask.bool()
        refusals = [refusal for report in selective.reports for refusal in report.refusals]
        notes = [report.note for report in selective.reports if not report.ok]
        yield (
            name,
            {
                "error": furthest(ours[real], theirs[real]),
                "graphs": len(selective.reports),
                "refused": facts_of(refusals[0]) if refusals else {"reason": notes[0]} if notes else None,
            },
        )
