"""The background thread ends with its process, whether or not whoever started it has left `running`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER_LEFT = """
from tests.runtime.simulated import simulated_engine
engine = simulated_engine()
entered = engine.running()
entered.__enter__()
assert engine.submit([1, 2], max_new_tokens=3).result().finish_reason == "length"
engine.submit([1, 2], max_new_tokens=500)
"""
READERS = """
import threading, time
import selective_compile as sc
from tests.shipped import shipped
model, _, program = shipped()
engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=8192), program=program)
entered = engine.running()
entered.__enter__()
for _ in range(4):
    request = engine.submit([5, 6, 7], max_new_tokens=900, eos_token_id=None)
    threading.Thread(target=list, args=(request,), daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize(
    "script", [NEVER_LEFT, READERS, READERS + "entered.__exit__(None, None, None)"], ids=["idle", "read", "left"]
)
def test_a_process_ends_that_has_unfinished_requests(script: str) -> None:
    """Daemon threads that read them do not go on to step while Python is taken down: C++ would abort the process."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    bad = ("Traceback", "Exception", "terminate", "failed")
    assert done.returncode == 0 and not any(word in done.stderr for word in bad), done.stderr
