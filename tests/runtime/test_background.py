"""The background thread ends with its process, whether or not whoever started it has left `running`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEVER_LEFT = """
from tests.runtime.simulated import simulated_engine
engine = simulated_engine()
entered = engine.running()
entered.__enter__()
assert engine.submit([1, 2], max_new_tokens=3).result().finish_reason == "length"
engine.submit([1, 2], max_new_tokens=500)
"""


def test_a_process_ends_that_never_leaves_running() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_LEFT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
