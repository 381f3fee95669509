"""What the file of the GPU benchmark says of the checkout, the machine and its devices."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts import provenance

SMI = "NVIDIA H200, 580.65, 143771 MiB"


def answered(monkeypatch: pytest.MonkeyPatch, *, knows: int) -> list[list[str]]:
    """By an nvidia-smi that knows so many of the three sets of fields, the smallest first; and what it was asked."""
    asked: list[list[str]] = []

    def run(command: Any, **how: Any) -> Any:
        fields = command[1].removeprefix("--query-gpu=").split(",")
        asked.append(fields)
        if len(asked) <= 3 - knows:
            return SimpleNamespace(returncode=2, stdout=f"Field {fields[-1]} is not a valid field to query.")
        line = ", ".join([*SMI.split(", "), *("[N/A]" for _ in fields[3:])])
        return SimpleNamespace(returncode=0, stdout=f"{line}\n{line}\n")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


@pytest.mark.parametrize(
    ("knows", "last"), [(3, "clocks_event_reasons.active"), (2, "clocks_throttle_reasons.active"), (1, "memory.total")]
)
def test_devices_are_told_as_far_as_the_driver_knows(knows: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answered(monkeypatch, knows=knows)
    first, second = provenance.devices()
    assert first == second and list(first) == asked[-1] and list(first)[-1] == last
    assert (first["name"], first["driver_version"], first["memory.total"]) == tuple(SMI.split(", "))


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 5)])
def test_nothing_is_told_where_it_is_not_there_and_it_is_not_asked_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def run(*what: Any, **how: Any) -> Any:
        asked.append(1)
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    found = found_so_far.Found(tmp_path / "found.json", dry_run=False, quick=False)
    for_git = len(asked)
    for when in ("before", "after attention", "after steps"):
        found.look_at_devices(when)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["devices"] == {"before": []} and len(asked) - for_git == 3, "once for each set of fields"
    assert "commit" not in kept["checkout"] and len(kept["checkout"]["code"]) == 64


def test_of_a_checkout_the_commit_and_whether_it_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: SimpleNamespace(returncode=0, stdout=f"{command[3]} x\n")
    )
    found = provenance.checkout()
    assert found["commit"] == "rev-parse x" and found["is_modified"] is True


def test_a_run_starts_no_cuda_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*what: Any) -> Any:
        raise AssertionError("the device would be held by it for the whole run")

    with monkeypatch.context() as patched:
        for name in ("is_available", "get_device_name", "get_device_properties", "_lazy_init", "init"):
            patched.setattr(torch.cuda, name, started)
        found_so_far.Found(tmp_path / "found.json", dry_run=False, quick=False)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["machine"]["cores"] >= 1 and kept["machine"]["processor"]
