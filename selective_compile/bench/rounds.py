"""Runs the benchmark: every peer on the same checkpoint and trace, in turns, and what came of it."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from selective_compile.bench.ceilings import Ceilings, measure_ceilings
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.floor import Work, floor_seconds
from selective_compile.bench.machine import machine, versions
from selective_compile.bench.peers import PEERS_HERE, Peer, PeerError, PeerRun
from selective_compile.bench.separate_peers import SEPARATE_PEERS
from selective_compile.bench.settings import BenchSettings, PeerName
from selective_compile.bench.trace import Trace, make_trace
from selective_compile.checkpoints import DTYPES, device_named
from selective_compile.progress import Stages

Figures = dict[str, Any]


def run_benchmark(settings: BenchSettings, stages: Stages) -> Figures:
    """All dtypes and modes; the result is ready for JSON.

    Raises:
        ValueError: a peer cannot run here.
        PeerError: one failed.
    """
    device_named(settings.device)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    trace = make_trace(settings)
    try:
        with tempfile.TemporaryDirectory(prefix="selective-compile-bench-") as folder:
            checkpoints = [
                Checkpoint(folder=Path(folder), shape=settings.shape, dtype=dtype, device=settings.device)
                for dtype in settings.dtypes
            ]
            with stages("writing the checkpoint"):
                checkpoints[0].write(settings.seed)
            results = [result for each in checkpoints for result in run_dtype(each, trace, settings, stages)]
    finally:
        torch.set_num_threads(threads_before)
    return {
        "machine": machine(),
        "versions": {"python": platform.python_version()} | versions(),
        "settings": dataclasses.asdict(settings),
        "trace": {"prompt_tokens": trace.prompt_tokens, "new_tokens": trace.new_tokens},
        "results": results,
    }


def run_dtype(checkpoint: Checkpoint, trace: Trace, settings: BenchSettings, stages: Stages) -> list[Figures]:
    """Every mode at one dtype; the models are let go at the end."""
    dtype = checkpoint.dtype
    with stages(f"{dtype}: measuring the machine"):
        ceilings = measure_ceilings(DTYPES[dtype], device=device_named(settings.device), read_bytes=settings.read_bytes)
    work = Work.of(checkpoint.load())
    with ExitStack() as closing:
        peers: dict[str, Peer] = {}
        for name in settings.peers:
            first = ", which is installed first, in some minutes" if name in SEPARATE_PEERS else ""
            with stages(f"{dtype}: preparing {name}{first}"):
                peers[name] = prepared(name, checkpoint, trace, settings)
                closing.callback(peers[name].close)
        results: list[Figures] = []
        for mode in settings.modes:
            rate = None if mode == "saturated" else settings.arrival_rate or engine_rate(peers, trace)
            timed = trace if rate is None else trace.arriving(rate, settings.seed)
            runs = run_rounds(peers, timed, settings.rounds, stages, f"{dtype}, {mode}")
            figures = summary(peers, runs, timed)
            if rate is None:
                add_floor(figures, runs, work, ceilings)
            about = {"dtype": dtype, "mode": mode, "arrival_rate": rate, "ceilings": dataclasses.asdict(ceilings)}
            results.append({**about, "peers": figures})
        return results


def prepared(name: PeerName, checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> Peer:
    if name in SEPARATE_PEERS:
        return SEPARATE_PEERS[name](checkpoint, trace, settings)
    return PEERS_HERE[name](checkpoint.load(), trace, settings)


def engine_rate(peers: Mapping[str, Peer], trace: Trace) -> float:
    """Requests per second that the engine (or else the first peer) finishes, all there at once."""
    peer = peers.get("engine") or next(iter(peers.values()))
    peer.run(trace)
    return len(trace.requests) / peer.run(trace).seconds


def run_rounds(
    peers: Mapping[str, Peer], trace: Trace, rounds: int, stages: Stages, title: str
) -> dict[str, list[PeerRun]]:
    """The timed runs of each peer, in turns A B A B, after one round that warms up with the same shapes."""
    runs: dict[str, list[PeerRun]] = {name: [] for name in peers}
    with stages(title, len(peers) * (rounds + 1)) as advance:
        for turn in range(rounds + 1):
            for name, peer in peers.items():
                run = peer.run(trace)
                check_lengths(name, run, trace)
                if turn:
                    runs[name].append(run)
                advance(1)
    return runs


def check_lengths(name: str, run: PeerRun, trace: Trace) -> None:
    """A peer that gave fewer tokens than asked for would look fast."""
    for number, (tokens, asked) in enumerate(zip(run.tokens, trace.requests, strict=True)):
        if len(tokens) != asked.new_tokens:
            raise PeerError(f"{name} must give request {number} {asked.new_tokens} tokens, gave {len(tokens)}")


def summary(peers: Mapping[str, Peer], runs: Mapping[str, list[PeerRun]], trace: Trace) -> dict[str, Figures]:
    """Medians over the rounds, and how many times the engine's throughput is that of each of the others."""
    medians = {name: statistics.median(run.seconds for run in own) for name, own in runs.items()}
    return {
        name: {
            **peers[name].describe(),
            "rounds_seconds": [run.seconds for run in own],
            "tokens_per_second": trace.new_tokens / medians[name],
            "median_latency": statistics.median(seconds for run in own for seconds in run.latencies),
            "engine_ratio": medians[name] / medians["engine"] if "engine" in medians else None,
            "same_tokens_as_generate": agreement(runs, name),
        }
        for name, own in runs.items()
    }


def add_floor(figures: dict[str, Figures], runs: Mapping[str, list[PeerRun]], work: Work, ceilings: Ceilings) -> None:
    """How near a peer whose steps are known came to the least time for them, idle time not among it."""
    for name, own in runs.items():
        if own[-1].records:
            floors = [floor_seconds(run.records, work, ceilings) for run in own]
            shares = [floor / run.seconds for floor, run in zip(floors, own, strict=True)]
            figures[name]["steps"] = len(own[-1].records)
            figures[name]["floor_seconds"] = statistics.median(floors)
            figures[name]["share_of_floor"] = statistics.median(shares)


def agreement(runs: Mapping[str, list[PeerRun]], name: str) -> float | None:
    """The share of tokens that are those of `generate`, each request up to its first difference.

    Below 1 where random weights have near ties, which a difference in rounding decides: often, in bfloat16.
    """
    if "generate" not in runs:
        return None
    pairs = list(zip(runs[name][-1].tokens, runs["generate"][-1].tokens, strict=True))
    return sum(common_prefix(*pair) for pair in pairs) / sum(len(theirs) for _, theirs in pairs)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    same = (one == other for one, other in zip(ours, theirs, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))
