"""On a device that is no CPU all runs as it does on one: nothing that is made on the way stays behind on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from selective_compile.kernels.native import COMPILERS

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "attention": "StepProgram",
    "experts in one operator": "StepProgram",
    "experts in a loop": "ModuleProgram",
    "recurrence": "StepProgram",
    "latents": "StepProgram",
    "isolated": "IsolatedProgram",
}


def test_what_runs_and_which_tokens_come_are_those_of_the_cpu(tmp_path: Path) -> None:
    """In a process of its own: torch takes one such device, for good."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("the device is C++, and there is no compiler")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.other_device.cases", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {name: (on_cpu, there) for name, on_cpu, there in map(json.loads, done.stdout.splitlines())}
    assert {name: on_cpu[0] for name, (on_cpu, _) in found.items()} == RUNS
    for name, (on_cpu, there) in found.items():
        assert there == on_cpu, name
