"""The benchmarks of the engine run, at sizes at which their figures say nothing; and a short soak leaves nothing."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [name, "--no-compile", "--json", str(found), *arguments])
    runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    return dict(json.loads(found.read_text()))


def test_arrival_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "rates.png"
    found = run("arrival_rates", tmp_path, monkeypatch, "--quick", "--picture", str(picture))
    assert [row["batching"] for row in found["results"]] == ["static", "in-flight"] * 3
    assert all(0 < row["p50"] <= row["p99"] for row in found["results"])
    assert Image.open(picture).size == (1500, 600)


def test_shared_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("shared_prefix", tmp_path, monkeypatch, "--quick", "--requests", "12", "--rounds", "1")
    assert found["saved"] == 11 / 12
    assert found["without"]["tokens_computed"] - found["with"]["tokens_computed"] == 11 * 96


def test_long_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("long_prompt", tmp_path, monkeypatch, "--quick", "--requests", "4")
    ways = [found[name] for name in ("whole", "budget", "bounded")]
    assert ways[0]["steps"] <= 4 <= ways[1]["steps"] <= ways[2]["steps"]
    assert all(0 < way["median"] <= way["p99"] <= way["largest"] for way in ways)


def test_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = run("kinds", tmp_path, monkeypatch, "--quick", "--no-compile", "--kinds", "zaya")["rows"]
    assert row["verdict"] == "ragged"
    assert all(row[f"{who} {how}"] > 0 for who in ("engine", "generate") for how in ("alone", "together"))


def test_padded_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("padded_calls", tmp_path, monkeypatch, "--quick", "--kinds", "last", "score")["rows"]
    assert [row["call"] for row in rows] == ["last"] * 4 + ["score"] * 4
    assert [row["real"] for row in rows[:4]] == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.05)
    assert all(0 < row["selective_ms"] and 0 < row["inductor_ms"] for row in rows)


def test_step_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("step_overhead", tmp_path, monkeypatch, "--quick", "--steps", "6")["rows"]
    assert [row["requests"] for row in rows] == [16, 64]
    assert all(0 < sum(row["parts"].values()) and 0 < row["beside"] <= row["beside_p99"] for row in rows)


def test_shared_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--seconds", "0.3", "--calm", "0", "--rounds", "1", "--processes", "1")
    found = run("shared_cores", tmp_path, monkeypatch, "--quick", *sizes)
    assert all(rate > 0 for rate in found["steps_per_second"].values())


def test_generation_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few requests: that drafts leave the tokens alone, and cost fewer steps where there is something to copy."""
    sizes = ("--requests", "3", "--new", "24", "--rounds", "1")
    found = run("generation_costs", tmp_path, monkeypatch, "--quick", *sizes)
    assert list(found["ratios"]) == ["sampled", "json schema", "copying", "nothing repeats", "misleading"]
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert found["steps"]["copying"] < 0.5 and found["steps"]["nothing repeats"] == found["steps"]["misleading"] == 1


def test_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("policies", tmp_path, monkeypatch, "--quick", "--requests", "30", "--rounds", "1")
    assert found["ratio"] > 0
    assert found["max_utilization"]["steps"] < found["guaranteed_no_evict"]["steps"]


def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("soak", tmp_path, monkeypatch, "--requests", "800")
    logging.disable(logging.NOTSET)
    assert not any(found["wrong"].values())
    assert min(found["ends"][kind] for kind in ("length", "stop", "cancelled", "error")) > 0
    assert found["preemptions"] > 0 and found["tokens reused"] > 0 and found["readers lost"] > 0


@pytest.mark.parametrize(("model_type", "requests"), [("lfm2", 200), ("qwen4_exp_text", 50)], ids=["slots", "isolated"])
def test_soak_of_models_that_keep_more_than_blocks(
    model_type: str, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run("soak", tmp_path, monkeypatch, "--requests", str(requests), "--type", model_type)
    logging.disable(logging.NOTSET)
    assert not any(found["wrong"].values()) and len(found["wrong"]) == 10
    assert min(found["ends"][kind] for kind in ("length", "cancelled", "error")) > 0
    assert found["preemptions"] > 0


def test_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("overlap", tmp_path, monkeypatch, "--quick", "--requests", "3", "--tokens", "4", "--rounds", "1")
    for server in ("readers", "batch manager"):
        assert all(found[server][way]["tokens_per_second"] > 0 for way in ("off", "on"))
        assert found[server]["ratio"] > 0


def test_gpu_registers() -> None:
    """What tests have printed becomes a line for each configuration and a column for each target."""
    table = runpy.run_path(str(BENCHMARKS / "gpu_registers.py"))["Table"]()
    test = "tests/kernels/test_merge_triton.py::test_it_compiles_ahead_of_time_without_spills"
    for parameters, said in (
        ("90-80", "90: Usage(registers=40, spilled=0, shared=2048)"),
        ("80-80", "sought\n80: Usage(registers=56, spilled=4, shared=0)\n"),
        ("90-512", "90: Usage(registers=48, spilled=0, shared=500)"),
        ("other", "80 registers"),
    ):
        table.pytest_runtest_logreport(SimpleNamespace(when="call", nodeid=f"{test}[{parameters}]", capstdout=said))
    assert str(table).splitlines() == [
        "| configuration | 80 | 90 |",
        "| --- | --- | --- |",
        "| `merge` 80 | 56, 0, spills 4 | 40, 2 |",
        "| `merge` 512 |  | 48, 0 |",
    ]


def test_gpu_spills(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", ["gpu_spills.py", "--count", "3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "gpu_spills.py"), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out == "0 of 3 configurations spill or do not fit\n"


def test_gpu_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are multiplied late leave the matrix units less to wait for."""
    pytest.importorskip("triton")
    late, other = run("gpu_loops", tmp_path, monkeypatch, "--quick")["rows"]
    assert late["products"] == other["products"] == 2048
    assert 2048 < late["cycles"] < 0.95 * other["cycles"]


def test_split_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    rows = run("split_plan", tmp_path, monkeypatch, "--quick", "--most", "0.7")["rows"]
    assert [(row["plan"], row["steps"]) for row in rows] == [
        (plan, steps) for plan in ("at once", "finer") for steps in ("alike", "unequal")
    ]
    assert all(0.3 < row["worst"] <= row["mean"] <= 1 for row in rows)
    assert rows[0]["mean"] > rows[2]["mean"] and rows[1]["worst"] >= rows[3]["worst"]


def test_startup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("startup", tmp_path, monkeypatch, "--quick", "--no-compile")["rows"]
    once = [(False, start) for start in ("cold", "warm", "traced")]
    assert [(row["each"], row["start"]) for row in rows] == [*once, (True, "cold")]
    assert all(0 < row["capture"][0] < row["all"][0] and row["passes"][0] > 0 for row in rows)
