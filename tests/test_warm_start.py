"""A second process that starts the same model: it finds what the first one captured, and all that it compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# The graph of a GPU's engine, with an operator that Inductor knows by its schema alone, and layers enough that one of
# them is compiled for all.
START = """
import json
from torch._dynamo.utils import counters
import selective_compile as sc
from selective_compile.backend import compile_step_program
from tests.models import tiny

model = tiny("qwen3", num_hidden_layers=8, hidden_size=32, intermediate_size=48)
program = compile_step_program(model, sc.EngineConfig(implementation="triton"))
assert type(program._run._run).__name__ == "Layered"
print(json.dumps({name: dict(counted) for name, counted in counters.items()}))
"""


def start(folder: Path) -> tuple[dict[str, Any], set[Path]]:
    """What Dynamo, AOTAutograd and Inductor have counted, and the libraries in the folder, compiled by then."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_CACHE_HOME": str(folder / "home")}
    run = [sys.executable, "-c", START]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), set(folder.rglob("*.so"))


def test_a_second_process_traces_and_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (first, compiled), (second, found) = start(tmp_path), start(tmp_path)
    assert (first["stats"]["unique_graphs"], second.get("stats", {}).get("unique_graphs")) == (1, None)
    misses = [
        (counted["aot_autograd"].get("autograd_cache_miss"), counted["inductor"].get("fxgraph_cache_miss"))
        for counted in (first, second)
    ]
    assert misses == [(3, 3), (None, None)]
    assert (second["aot_autograd"]["autograd_cache_hit"], second["inductor"]["fxgraph_cache_hit"]) == (3, 3)
    assert compiled and found == compiled
