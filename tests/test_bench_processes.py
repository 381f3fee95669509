"""The processes that peers of the benchmark are: what they are told and tell, their memory, and their environments."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from selective_compile.bench.apart.conversation import above, forget_peak, resident, served
from selective_compile.bench.environments import CommandError, Environment
from selective_compile.bench.peers import PeerError
from selective_compile.bench.separate_peers import CONVERSATION, SeparatePeer, of_another
from selective_compile.bench.trace import Asked, Trace


def asked(prompt: list[int], new_tokens: int, arrival: float = 0.0) -> Asked:
    return Asked(prompt_ids=prompt, new_tokens=new_tokens, arrival=arrival)


class Counting:
    """Another engine: gives each request a token a step, two requests at a time; loading takes memory for a while."""

    def __init__(self) -> None:
        self.left: dict[int, list[int]] = {}

    def load(self) -> None:
        self.kept = bytearray(b"x") * 20_000_000
        len(bytearray(b"x") * 80_000_000)

    def about(self) -> dict[str, object]:
        return {"attention": "none"}

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        self.left[number] = [prompt_ids[-1] + 1 + i for i in range(new_tokens)]

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        for number in list(self.left)[:2]:
            token = self.left[number].pop(0)
            ended = not self.left[number]
            if ended:
                del self.left[number]
            yield number, [token], ended


SERVER = """
from collections.abc import Iterator
{counting}
print("what engines say goes elsewhere")
server = lambda wanted: 1 / 0 if wanted.folder == "fails" else Counting()
"""
WANTED = {
    "dtype": "float32",
    "threads": 1,
    "slots": 1,
    "slot_bytes": 1,
    "longest": 9,
    "token_budget": 4,
    "reuse": False,
}


def test_a_peer_apart_serves_requests_as_they_arrive() -> None:
    requests = [asked([1, 5], 3), asked([7], 1), asked([2], 2, arrival=0.05)]
    found = served(Counting(), list(map(asdict, requests)))
    assert found["tokens"] == [[6, 7, 8], [8], [3, 4]]
    assert [len(moments) for moments in found["moments"]] == [3, 1, 2]
    assert found["moments"][0][0] == found["moments"][1][0] < found["moments"][0][1] < found["moments"][0][2]
    assert found["seconds"] >= 0.05 and all(0 < moments[-1] < found["seconds"] for moments in found["moments"])


def test_a_peer_apart_is_a_process_that_ends_and_whose_failure_is_told(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(SERVER.format(counting=inspect.getsource(Counting)))
    here = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import conversation; conversation.main()"

    def peer(folder: str) -> SeparatePeer:
        paths = f"{tmp_path}:{CONVERSATION.parent}"
        command = [sys.executable, "-c", here, paths, "counting", json.dumps({**WANTED, "folder": folder})]
        return SeparatePeer("counting", command, of_another(1), {"weights": "few"})

    running = peer("works")
    trace = Trace(requests=(asked([1, 5], 3), asked([7], 1)))
    assert running.describe() == {"weights": "few", "attention": "none"}
    runs = [running.run(trace), running.run(trace)]
    assert all(run.tokens == [[6, 7, 8], [8]] and run.records == [] for run in runs)
    for run in runs:
        assert run.loading_bytes is not None and run.serving_bytes is not None
        assert 99_000_000 < run.loading_bytes < 130_000_000
        assert 19_000_000 < run.serving_bytes and (run.serving_bytes < 50_000_000 or not may_forget_peaks())
    running.close()
    running.close()
    assert running._process.returncode == 0
    with pytest.raises(PeerError, match=r"counting has ended with status 1: (?s:.*)ZeroDivisionError"):
        peer("fails")


def may_forget_peaks() -> bool:
    return os.access("/proc/self/clear_refs", os.W_OK)


def test_memory_is_the_peak_above_what_was_there() -> None:
    forget_peak()
    before = resident("VmRSS")
    assert before is not None and above(None) is None and resident("VmNone") is None
    len(bytearray(b"x") * 300_000_000)
    peak = above(before)
    assert peak is not None and (299_000_000 < peak < 330_000_000 or not may_forget_peaks())
    forget_peak()
    after = above(before)
    assert after is not None and (after < 100_000_000 or not may_forget_peaks())


def test_an_environment_is_made_once_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    empty = Environment(name="empty", requirements=())
    python = empty.python()
    made = python.parent.parent.stat().st_mtime_ns
    assert subprocess.run([python, "-c", "import pip"], check=True).returncode == 0
    assert empty.python() == python and python.parent.parent.stat().st_mtime_ns == made
    with pytest.raises(CommandError, match="pip install there is no such package failed"):
        Environment(name="wrong", requirements=("there is no such package",)).python()
