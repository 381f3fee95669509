"""Runs the benchmark: every peer on the same checkpoint and trace, in turns, and what came of it."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from selective_compile.bench.ceilings import Ceilings, measure_ceilings
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.environments import CommandError
from selective_compile.bench.figures import Figures, peers_figures, result_name
from selective_compile.bench.floor import Work
from selective_compile.bench.machine import machine, versions
from selective_compile.bench.peers import Peer, PeerError, PeerRun, slots_needed
from selective_compile.bench.separate_peers import OTHERS, STARTS
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Trace, make_trace, renewed
from selective_compile.checkpoints import DTYPES, device_named
from selective_compile.progress import Stages, silent

Failures = dict[str, str]


def run_benchmark(settings: BenchSettings, stages: Stages) -> Iterator[tuple[str, Figures]]:
    """All dtypes and modes: name and figures of each as soon as it is done, ready for JSON.

    A peer that fails is in "failed" of its results, with what it said, and not among their peers.

    Raises:
        ValueError: no such device.
    """
    device_named(settings.device)
    trace = make_trace(settings)
    about = {
        "model": settings.model,
        "trace": settings.trace,
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "new_tokens": trace.new_tokens,
        "machine": machine(),
        "versions": {"python": platform.python_version()} | versions(),
        "settings": dataclasses.asdict(settings),
    }
    for dtype in settings.dtypes:
        with tempfile.TemporaryDirectory(prefix="selective-compile-bench-") as folder:
            checkpoint = Checkpoint(folder=Path(folder), shape=settings.shape, dtype=dtype, device=settings.device)
            with stages(f"{settings.model}, {dtype}: writing the checkpoint"):
                checkpoint.write(settings.seed)
            for mode, found in run_dtype(checkpoint, trace, settings, stages):
                yield result_name(settings, dtype, mode), {**about, "dtype": dtype, "mode": mode, **found}


def run_dtype(
    checkpoint: Checkpoint, trace: Trace, settings: BenchSettings, stages: Stages
) -> Iterator[tuple[str, Figures]]:
    """Every mode at one dtype; the peers end with the last."""
    title = f"{settings.model}, {settings.trace}, {checkpoint.dtype}"
    ceilings = ceilings_of(checkpoint, settings, stages, title)
    work = Work.of(checkpoint.skeleton())
    memory = {
        "weight_bytes": checkpoint.weight_bytes,
        "pool_bytes": slots_needed(trace) * checkpoint.slot_bytes,
    }
    failed: Failures = {}
    with ExitStack() as closing:
        peers = started_peers(checkpoint, trace, settings, stages, title, failed)
        for peer in peers.values():
            closing.callback(peer.close)
        for mode in settings.modes:
            rate = None
            if mode == "arriving":
                rate = settings.arrival_rate or engine_rate(peers, trace, settings, failed)
            timed = trace if rate is None else trace.arriving(rate, settings.seed)
            runs = run_rounds(peers, timed, settings, stages, f"{title}, {mode}", failed)
            # A slow phase of the machine while it was measured before would make the floor too easy to come near.
            ceilings = ceilings.best(ceilings_of(checkpoint, settings, stages, title))
            figures = peers_figures(peers, runs, timed, memory, (work, ceilings) if rate is None else None)
            about = {"arrival_rate": rate, "ceilings": dataclasses.asdict(ceilings), **memory}
            yield mode, {**about, "peers": figures, "failed": dict(failed)}


def ceilings_of(checkpoint: Checkpoint, settings: BenchSettings, stages: Stages, title: str) -> Ceilings:
    device = device_named(settings.device)
    with stages(f"{title}: measuring the machine"), threads(settings.threads):
        return measure_ceilings(DTYPES[checkpoint.dtype], device=device, read_bytes=settings.read_bytes)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many of torch's in this process, for as long as this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def started_peers(
    checkpoint: Checkpoint, trace: Trace, settings: BenchSettings, stages: Stages, title: str, failed: Failures
) -> dict[str, Peer]:
    """Those of the settings that could be started; why others could not is in `failed`."""
    peers: dict[str, Peer] = {}
    for name in settings.peers:
        first = ", which is installed first, in some minutes" if name in OTHERS else ""
        with stages(f"{title}: preparing {name}{first}"):
            try:
                peers[name] = STARTS[name](name, checkpoint, trace, settings)
            except (PeerError, CommandError) as error:
                failed[name] = str(error)
    return peers


def engine_rate(peers: dict[str, Peer], trace: Trace, settings: BenchSettings, failed: Failures) -> float | None:
    """Requests per second that the engine (or else the first peer) finishes, all there at once; None: none is left."""
    while peers:
        name = "engine" if "engine" in peers else next(iter(peers))
        with_one = {name: peers[name]}
        if runs := run_rounds(with_one, trace, dataclasses.replace(settings, rounds=1), silent, "", failed):
            return len(trace.requests) / runs[name][-1].seconds
        del peers[name]
    return None


def run_rounds(
    peers: dict[str, Peer], trace: Trace, settings: BenchSettings, stages: Stages, title: str, failed: Failures
) -> dict[str, list[PeerRun]]:
    """The timed runs of each peer, in turns A B A B, after one round that warms up with the same shapes.

    A peer that fails is taken from `peers`, and its runs do not count.
    """
    runs: dict[str, list[PeerRun]] = {name: [] for name in peers}
    with stages(title, len(peers) * (settings.rounds + 1)) as advance:
        for turn in range(settings.rounds + 1):
            asked = renewed(trace, settings, turn)
            for name, peer in list(peers.items()):
                try:
                    run = peer.run(asked)
                    check_lengths(name, run, asked)
                except PeerError as error:
                    failed[name] = str(error)
                    peers.pop(name).close()
                    del runs[name]
                    continue
                if turn:
                    runs[name].append(run)
                advance(1)
                time.sleep(settings.pause)
    return runs


def check_lengths(name: str, run: PeerRun, trace: Trace) -> None:
    """A peer that gave fewer tokens than asked for would look fast."""
    rows = zip(run.tokens, run.moments, trace.requests, strict=True)
    for number, (tokens, moments, asked) in enumerate(rows):
        if len(tokens) != asked.new_tokens:
            raise PeerError(f"{name} must give request {number} {asked.new_tokens} tokens, gave {len(tokens)}")
        if len(moments) != len(tokens):
            raise PeerError(f"{name} must tell when {len(tokens)} tokens of request {number} came, told {len(moments)}")
