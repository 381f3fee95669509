"""What Inductor asks the machine for is asked once, beside other work, and once found it is kept for the next start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

from selective_compile import beforehand

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TRUSTED = {"cpp.vec_isa_ok": True}


class Vectors:
    """As `valid_vec_isa_list`: it tries each kind that the processor has, unless it is told that all can be used."""

    def __init__(self, found: list[str]) -> None:
        self.found, self.tried, self.threads = found, 0, set[threading.Thread]()

    def __call__(self) -> list[str]:
        self.threads.add(threading.current_thread())
        return self.__wrapped__()

    def __wrapped__(self) -> list[str]:
        self.tried += not config.cpp.vec_isa_ok
        return ["avx512", "avx2"] if config.cpp.vec_isa_ok else self.found


Started = Callable[[list[str]], Vectors]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Started]:
    """Of a process on a machine whose compiler can use these vectors."""
    monkeypatch.setattr(beforehand, "own_folder", lambda: tmp_path)

    def started(found: list[str]) -> Vectors:
        vectors = Vectors(found)
        monkeypatch.setattr(beforehand, "valid_vec_isa_list", vectors)
        monkeypatch.setattr(beforehand, "_ASKING", {})
        beforehand._machine.cache_clear()
        return vectors

    with config.patch({"cpp.vec_isa_ok": None}):
        yield started


def asked(device: torch.device) -> dict[str, Any]:
    beforehand.ask(device)
    beforehand.ask(device)
    assert set(beforehand._ASKING) <= {"triton", "vectors"}
    return beforehand.answers(device)


def test_what_one_process_has_tried_others_need_not(start: Started) -> None:
    first = start(["avx512", "avx2"])
    assert asked(CPU) == TRUSTED and first.tried
    assert beforehand._ASKING["vectors"] in first.threads
    second = start(["avx512", "avx2"])
    assert asked(CPU) == TRUSTED and not second.tried and second.threads


def test_where_the_compiler_cannot_use_all_of_them_each_process_tries(start: Started) -> None:
    for _ in range(2):
        vectors = start(["avx2"])
        assert asked(CPU) == {} and vectors.tried


@pytest.mark.parametrize("other", ["torch", "compiler", "processor"])
def test_of_another_machine_nothing_is_taken_for_granted(
    other: str, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(["avx512", "avx2"])
    assert asked(CPU) == TRUSTED
    names = {"torch": (torch, "__version__"), "compiler": (beforehand, "compiler_version")}
    place, name = names.get(other, (beforehand, "processor"))
    monkeypatch.setattr(place, name, "0.1" if other == "torch" else lambda *_: "another")
    vectors = start(["avx2"])
    assert asked(CPU) == {} and vectors.tried


@pytest.mark.parametrize("own", [True, False])
def test_what_the_user_has_set_stays(own: bool, start: Started) -> None:
    start(["avx512", "avx2"])
    with config.patch({"cpp.vec_isa_ok": own}):
        assert asked(CPU) == {}


def test_a_gpu_has_no_vectors_to_be_asked_for(start: Started) -> None:
    vectors = start(["avx2"])
    assert asked(GPU) == {} and not vectors.threads


def test_a_folder_that_cannot_be_written_is_no_error(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Path:
        raise PermissionError

    monkeypatch.setattr(beforehand, "own_folder", refused)
    vectors = start(["avx512", "avx2"])
    assert asked(CPU) == TRUSTED and vectors.tried


def test_errors_are_left_to_who_needs_the_answer(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    start(["avx2"])

    def failing() -> None:
        raise RuntimeError

    monkeypatch.setattr(beforehand, "_read_triton", failing)
    assert asked(CPU) == {} and not raised


def test_without_a_thread_who_needs_the_answer_asks_himself(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = start(["avx2"])

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert asked(CPU) == {} and vectors.threads == {threading.current_thread()}
    assert asked(CPU) == {} and len(vectors.threads) == 2


def test_who_asked_for_a_gpu_asks_for_a_cpu_too(start: Started) -> None:
    vectors = start(["avx2"])
    assert asked(GPU) == asked(CPU) == {} and beforehand._ASKING["vectors"] in vectors.threads
