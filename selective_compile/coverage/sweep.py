"""The sweep: a process for each model type, several at a time, results kept as they come."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from selective_compile import options, passes, runtime
from selective_compile.bench.machine import versions
from selective_compile.coverage.measure import Facts
from selective_compile.coverage.standing import grown
from selective_compile.coverage.trial import FULL, Trial
from selective_compile.coverage.worker import Job

MEASURED = ("torch", "transformers")  # the versions that results are of

Results = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure, and where the results go.

    Attributes:
        types: model types in their order.
        out: the JSON file, written after every type; types that it has from the same source are not measured again.
        jobs: processes at a time.
        limit: seconds for one type.
    """

    types: tuple[str, ...]
    out: Path
    jobs: int = 2
    limit: float = 240.0
    trial: Trial = FULL

    def remaining(self, results: Results) -> list[str]:
        """Types not yet measured with this source and these versions."""
        now = source()
        return [name for name in self.types if results["types"].get(name, {}).get("source") != now]

    def run(self, advance: Callable[[str, Facts], None]) -> Results:
        """Measure what remains; ``advance`` is told of each type as it is done."""
        results = stored(self.out)
        waiting, running = self.remaining(results), list[Job]()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["selective_compile.coverage.worker"])
        now = source()
        with tempfile.TemporaryDirectory() as folder, ended_with(running):
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(Job.start(context, waiting.pop(0), self.trial, self.limit, Path(folder)))
                for job in done(running):
                    running.remove(job)
                    facts = job.finish() | {"source": now}
                    if growth := grown(facts, results["types"].get(job.model_type, {})):
                        facts["grown"] = growth
                    results["types"][job.model_type] = facts
                    results["versions"] = versions(MEASURED)
                    write(self.out, results)
                    advance(job.model_type, facts)
        return results


@contextmanager
def ended_with(running: Sequence[Job]) -> Iterator[None]:
    """Nobody goes on behind, as where the sweep is interrupted."""
    try:
        yield
    finally:
        for job in running:
            job.stop()


def done(running: Sequence[Job]) -> list[Job]:
    """Jobs that ended or ran out of time, after waiting a moment for one of them to say something."""
    ready = wait([job.receive for job in running], timeout=1.0)
    ended = [job for job in running if job.receive in ready and job.take()]
    return ended + [job for job in running if job.late and job not in ended]


def registered_types() -> tuple[str, ...]:
    """Every type that the installed transformers registers with AutoModelForCausalLM."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def chosen_types(names: str | None) -> tuple[str, ...]:
    """Those of a comma-separated list, or all of them.

    Raises:
        ValueError: a name that is not registered.
    """
    known = registered_types()
    if names is None:
        return known
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in wanted:
        if name not in known:
            raise ValueError(f"--types must be model types registered with AutoModelForCausalLM, got {name!r}")
    return wanted


def stored(out: Path) -> Results:
    return (
        json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"versions": versions(MEASURED), "types": {}}
    )


def write(out: Path, results: Results) -> None:
    """In one go, so that a run that is stopped leaves a whole file; types in the order of their names."""
    results["types"] = dict(sorted(results["types"].items()))
    part = out.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(out)


def source() -> str:
    """A digest of the package's own code and of the versions it runs on: results of another one are measured anew."""
    digest = hashlib.blake2b(json.dumps(versions(MEASURED)).encode(), digest_size=8)
    # Named one by one, since in a checkout two of them are links, which rglob does not follow.
    folders = [Path(str(module.__file__)).parent.resolve() for module in (options, passes, runtime)]
    kinds = ("*.py", "*.cpp", "*.h")
    for file in sorted({file for folder in folders for kind in kinds for file in folder.rglob(kind)}):
        digest.update(file.read_bytes())
    return digest.hexdigest()
