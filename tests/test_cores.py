"""How many cores a process may use, by files as Linux has them, and how many threads a step uses."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from selective_compile import programs
from selective_compile.cores import IntraOpThreads, available_cores
from selective_compile.options import EngineConfig
from selective_compile.runtime import StepError
from selective_compile.runtime.replay import EventLog
from tests.models import tiny
from tests.runtime.simulated import SimulatedProgram, simulated_engine


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def found(folder: Path, own_groups: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = folder / "own"
    own.write_text(own_groups)
    return available_cores(own, folder / "cgroup")


@pytest.mark.parametrize(
    ("own_groups", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # half a core would stop the third thread half of the time
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/user/own\n", {"user/own/cpu.max": "max 100000\n", "user/cpu.max": "300000 100000\n"}, 3),
        ("0::/user/own\n", {"user/own/cpu.max": "150000 50000\n", "user/cpu.max": "500000 100000\n"}, 3),
        ("0::/docker/of/the/host\n", {"cpu.max": "400000 100000\n"}, 4),
        (
            "12:memory:/\n5:cpu,cpuacct:/job\n1:name=systemd:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            6,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/\n", {}, 8),
    ],
)
def test_quotas(tmp_path: Path, own_groups: str, files: dict[str, str], cores: int) -> None:
    assert found(tmp_path, own_groups, files) == cores


def test_without_groups(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none", tmp_path) == 8


def test_within_there_are_so_many_and_behind_as_many_as_before() -> None:
    before = torch.get_num_threads()
    with IntraOpThreads(before + 2, available=1):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    with IntraOpThreads(None, available=before), pytest.raises(ZeroDivisionError), IntraOpThreads(3):
        assert torch.get_num_threads() == 3
        print(1 / 0)
    assert torch.get_num_threads() == before
    torch.set_num_threads(4)
    try:
        with IntraOpThreads(None, available=2):
            assert torch.get_num_threads() == 2
        with IntraOpThreads(None, available=5):
            assert torch.get_num_threads() == 4
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wanted", "available", "said"),
    [(3, 2, "threads=3 on 2 cores"), (2, 2, ""), (None, 2, "on 2 threads"), (None, 4, "")],
)
def test_what_is_logged(wanted: int | None, available: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with caplog.at_level(logging.WARNING):
            IntraOpThreads(wanted, available=available).warn()
    finally:
        torch.set_num_threads(before)
    assert said in caplog.text and bool(said) == bool(caplog.text)


def test_steps_use_so_many_in_any_thread_and_the_caller_keeps_his(tmp_path: Path) -> None:
    seen: list[int] = []
    program = SimulatedProgram()
    program.before_run = lambda: seen.append(torch.get_num_threads())
    engine = simulated_engine(program, threads=3, record=tmp_path / "log")
    before = torch.get_num_threads()
    engine.submit([1, 2], max_new_tokens=2)
    engine.step()
    assert torch.get_num_threads() == before
    thread = threading.Thread(target=engine.step)
    thread.start()
    thread.join()

    def fail() -> None:
        raise ZeroDivisionError

    program.before_run = fail
    engine.submit([1, 2], max_new_tokens=2)
    with pytest.raises(StepError):
        engine.step()
    assert seen == [3, 3] and torch.get_num_threads() == before
    first: dict[str, Any] = json.loads((tmp_path / "log").read_text().splitlines()[0])
    assert first["config"]["threads"] == 3
    assert EventLog.read(tmp_path / "log").config.threads == 3


def test_the_graph_is_compiled_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = programs.prove

    def prove(*arguments: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return inner(*arguments, **options)

    monkeypatch.setattr(programs, "prove", prove)
    programs.compile_step_program(tiny("llama", num_hidden_layers=1), EngineConfig(threads=5, compile=False))
    assert seen == [5]
