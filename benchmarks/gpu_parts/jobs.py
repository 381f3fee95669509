"""The jobs of each part, how the time is shared among them, and what a job is told."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.gpu_parts.failures import DeviceLost, detail, is_lost, reason
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.rows import Row

ROOT = Path(__file__).parents[2]
# Where what is compiled and captured is kept.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "captures"}

# In this order: a cold start is one only before the steps of its model have left compiled code in the caches, and
# these have use for it. Of each part the seconds of a full run, from when its first process is ready; a part that is
# done earlier leaves the rest to those behind it. So those in front have more than they took on an H200: 7 s, some 100
# for what is ours, 80 for a cold start and two warm ones, 60 with the imports of the first; the rest is the trace's.
SECONDS = {"ceilings": 12, "attention": 113, "start": 95, "steps": 96, "trace": 118, "drift": 6}
# Of these a job has its weight of what is left of the part, and hands on what it does not need, too.
WEIGHTS = {
    "ceilings": {"ceilings": 1},
    # Those of ours first, and of each those that say most: what comes last goes without if there is no time. As many
    # seconds as each took, and some more of those in front; `flex_attention`, which is compiled for each cell, would
    # take 30, and has what is left.
    "attention": {
        "decode": 20,
        "prefill": 12,
        "mixed": 8,
        "fp8": 8,
        "latent": 12,
        "rotary": 11,
        "choice": 8,
        "joined": 4,
        "variants": 18,
        "tiles": 14,
        "varlen_attn": 5,
        "flex_attention": 6,
    },
    "start": {"start": 1},
    # Behind a start nothing is imported yet, which the first of these pays for all. 25 s each took the first two; the
    # others have no bars, and what these leave if they can do with it (`NEEDED`).
    "steps": {"tokens": 30, "llama-3.1-8b": 28, "llama-3.2-1b": 1, "qwen3-0.6b": 1, "qwen3-moe-small": 1},
    # The engine's took 40 s with its samples. Peers have the rest: by the first, a sample is 20 s away, and takes 45 to
    # 90; the other gets there sooner.
    "trace": {"engine": 100, "generate_batch": 60, "generate": 30},
    "drift": {"drift": 1},
}
# Seconds without which these are not begun, since they would only get as far as compiling: their models are not those
# of a start. Nothing of the table at the end is of them, and what they would have had goes to those behind them.
NEEDED = {"llama-3.2-1b": 30.0, "qwen3-0.6b": 30.0, "qwen3-moe-small": 30.0}
LEAST = 2.0  # seconds: with less, no job is begun
# Of jobs that have one of their own; the others have that of their part.
MODULES = {
    ("attention", "mixed"): "mixed",
    ("attention", "fp8"): "kept_otherwise",
    ("attention", "latent"): "kept_otherwise",
    ("attention", "rotary"): "rotary",
    ("attention", "choice"): "choice",
    ("attention", "joined"): "joined",
    ("attention", "variants"): "attention_variants",
    ("attention", "tiles"): "tiles",
    ("attention", "varlen_attn"): "attention_peers",
    ("attention", "flex_attention"): "attention_peers",
    ("steps", "tokens"): "tokens",
    ("drift", "drift"): "ceilings",
}
# Beside the caches; nothing that a job loads comes from a network, which may be there and slow.
OFFLINE = {"HF_HUB_OFFLINE": "1"}
OF_JOBS = {
    # Its time is for one small graph, and processes that compile beside it would take some of that to start.
    "rotary": {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
    # Its cache grows by a copy of itself in every step, which leaves holes that nothing fits into.
    "generate": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}
PEERS = ("varlen_attn", "flex_attention", "generate_batch", "generate")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process is to do.

    Attributes:
        name: of `WEIGHTS`.
        seconds: it is stopped then; it looks at the time itself before whatever takes long.
        quick: fewer and smaller cells.
        tiny: of a dry run: as small as can be, on a CPU.
        requests: of the trace.
        done: names of rows that there are from a process which lost its device, and that are not to be made again.
    """

    part: str
    name: str
    seconds: float
    ceilings: Ceilings | None
    quick: bool = False
    tiny: bool = False
    requests: int = 256
    token_budget: int = 8192
    start_model: str = "llama-3.1-8b"
    done: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        return self.name not in PEERS

    @property
    def can_be_left_out(self) -> bool:
        """Of a full run, which has bars for others."""
        return self.name in NEEDED and not self.quick

    @property
    def has_time(self) -> bool:
        return self.seconds >= (NEEDED[self.name] if self.can_be_left_out else LEAST)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        if values["ceilings"] is not None:
            values["ceilings"] = Ceilings(*values["ceilings"])
        values["done"] = tuple(values["done"])
        return cls(**values)

    def row(self, name: str, **values: Any) -> Row:
        return Row(part=self.part, job=self.name, name=name, ours=self.ours, **values)


class Context:
    """A job that runs: its device, its time, and where its rows go."""

    def __init__(self, job: Job, tell: Callable[[Row], None]) -> None:
        self.job = job
        self.tell = tell
        self.tiny, self.quick = job.tiny, job.quick
        self.ceilings = job.ceilings
        self.repeats = 2 if job.tiny else 10 if job.quick else 20
        self.device = torch.device("cpu" if job.tiny else "cuda")
        self._ends = time.monotonic() + job.seconds

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def skip(self, name: str, why: str) -> None:
        self.tell(self.job.row(name, state="skipped", text=why))

    def fail(self, name: str, why: str) -> None:
        self.tell(self.job.row(name, state="failed", text=why))

    def failed(self, name: str, error: BaseException, said: str = "") -> None:
        """With `said` in front of what the error says.

        Raises:
            DeviceLost: whatever comes next in this process would fail, too.
        """
        self.tell(self.job.row(name, state="failed", text=f"{said}{reason(error)}", detail=detail(error)))
        if is_lost(self.device):
            raise DeviceLost from error


def perform(job: Job, tell: Callable[[Row], None]) -> None:
    """Run the job in this process. Its time begins when what it needs is imported."""
    module = MODULES.get((job.part, job.name), job.part)
    run = importlib.import_module(f"benchmarks.gpu_parts.{module}").run
    run(Context(job, tell))


class Allowance:
    """The time of a run: each part ends when all parts up to it should have, and hands on what it did not need."""

    def __init__(self, parts: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts, self._clock, self._began = parts, clock, clock()
        self._scale = seconds / sum(SECONDS[part] for part in parts)

    @property
    def left(self) -> float:
        """Seconds to the end of all."""
        return self._began + self._scale * sum(SECONDS[part] for part in self._parts) - self._clock()

    def of(self, part: str, jobs: Sequence[str]) -> float:
        """Seconds for the first of the jobs that are left of a part."""
        passed = self._parts[: self._parts.index(part) + 1]
        end = self._began + self._scale * sum(SECONDS[each] for each in passed)
        weights = [WEIGHTS[part][job] for job in jobs]
        return max(0.0, end - self._clock()) * weights[0] / sum(weights)


def caches_in(folder: Path) -> dict[str, str]:
    """The environment of processes that keep everything there."""
    return {name: str(folder / kind) for name, kind in CACHES.items()}


def environment(part: str, name: str, caches: Path) -> dict[str, str]:
    """Of a job's process. Nothing is in its caches at first, and what kernels leave there makes no start a warm one."""
    folder = caches / ("programs" if part in ("start", "steps", "trace") else "kernels")
    return {**OFFLINE, **caches_in(folder), **OF_JOBS.get(name, {}), **kept_bytecode(caches)}


def kept_bytecode(folder: Path) -> dict[str, str]:
    """Where Python keeps what it compiles of modules, if none of torch's is kept beside them, as installers leave it.

    Else each process compiles all that it imports: half of 13 seconds of imports on an H200's host, before each start.
    """
    if Path(importlib.util.cache_from_source(torch.__file__)).exists():
        return {}
    return {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
