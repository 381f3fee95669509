"""Kernels that were compiled before are not compiled again, and those that are another one are."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl

from tests.kernels.ahead_of_time import TARGETS, assert_ships, compile_ahead
from tests.kernels.compiled_before import COMPILED_BEFORE, CompiledBefore, Recorder

ME = "tests/kernels/test_compiled_before.py"


@pytest.fixture
def before(tmp_path: Path) -> CompiledBefore:
    path = tmp_path / "before.json"
    path.write_text("{}")
    return CompiledBefore(path=path, asks="no spills")


def again(before: CompiledBefore, **changes: Any) -> CompiledBefore:
    """As another process finds what was written."""
    before.record(before.seen)
    return replace(before, seen={}, **changes)


def never() -> str:
    raise AssertionError("it was compiled")


def test_what_is_known_is_not_compiled_again(before: CompiledBefore) -> None:
    assert before.what_shipped("kernel", lambda: "40 registers") == "40 registers"
    later = again(before)
    assert later.what_shipped("kernel", never) == "40 registers"
    assert later.seen == before.seen and list(later.seen) == [ME]


def test_another_kernel_is_and_so_is_one_of_which_something_else_is_asked(before: CompiledBefore) -> None:
    before.what_shipped("kernel", lambda: "40 registers")
    with pytest.raises(AssertionError, match="it was compiled"):
        again(before).what_shipped("another", never)
    with pytest.raises(AssertionError, match="it was compiled"):
        again(before, asks="no barriers").what_shipped("kernel", never)


def test_one_that_does_not_ship_is_not_known(before: CompiledBefore) -> None:
    with pytest.raises(AssertionError):
        before.what_shipped("kernel", never)
    assert before.seen == {}


def test_files_that_did_not_run_keep_what_is_known(before: CompiledBefore) -> None:
    before.record({"one.py": {"a": "1"}, "two.py": {"b": "2", "c": "3"}})
    again(before).record({"two.py": {"c": "4"}})
    assert json.loads(before.path.read_text()) == {"one.py": {"a": "1"}, "two.py": {"c": "4"}}


def test_what_all_processes_saw_is_written(before: CompiledBefore) -> None:
    workers = [replace(before, seen={"one.py": {name: name}, name + ".py": {}}) for name in "ab"]
    recorder = Recorder(before)
    for worker in workers:
        config = SimpleNamespace(workeroutput={})
        Recorder(worker).pytest_sessionfinish(SimpleNamespace(config=config))  # type: ignore[arg-type]
        recorder.pytest_testnodedown(config)
    recorder.pytest_testnodedown(SimpleNamespace())  # of a process that died
    recorder.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]
    assert json.loads(before.path.read_text()) == {"one.py": {"a": "a", "b": "b"}, "a.py": {}, "b.py": {}}


@triton.jit
def _called(x):
    return x + 1


@triton.jit
def _kernel(out, count, SIZE: tl.constexpr, OTHER: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), _called(count) + OTHER)


@triton.jit
def _called_otherwise(x):
    return x + 2


def kernel_for(target: Any = TARGETS[1], element: str = "*i32", size: int = 32, other: Any = 1, warps: int = 4):
    return compile_ahead(_kernel, target, {"out": element}, {"SIZE": size, "OTHER": other}, num_warps=warps)


def test_a_kernel_is_known_by_all_that_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [kernel_for().key, *(kernel_for(target=target).key for target in TARGETS[2:])]
    keys += [kernel_for(**{name: value}).key for name, value in (("element", "*i64"), ("size", 64), ("warps", 8))]
    keys += [kernel_for(other=value).key for value in (True, 1.0, None)]
    monkeypatch.setattr(_kernel, "hash", None)
    monkeypatch.setitem(_kernel.__globals__, "_called", _called_otherwise)
    keys.append(kernel_for().key)
    assert len(set(keys)) == len(keys)


def test_the_same_kernel_has_the_same_key_and_is_compiled_when_it_is_looked_at() -> None:
    one, same = kernel_for(), kernel_for()
    assert one.key == same.key and "compiled" not in vars(one)
    assert one.asm["cubin"] and one.metadata.num_warps == 4


def test_what_ships_is_asked_of_those_before_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_for()
    monkeypatch.setattr(CompiledBefore, "what_shipped", lambda _, key, compiled: f"{key} was there")
    assert_ships(kernel, tmp_path)
    assert "compiled" not in vars(kernel)
    monkeypatch.setattr(CompiledBefore, "what_shipped", lambda _, key, compiled: compiled())
    assert_ships(kernel, tmp_path)
    assert "compiled" in vars(kernel)


def test_all_that_is_known_is_of_test_files_that_are_there() -> None:
    root = Path(__file__).parents[2]
    assert all((root / name).is_file() for name in COMPILED_BEFORE.known)


def test_what_is_known_is_as_the_table_of_registers_reads_it() -> None:
    root = Path(__file__).parents[2]
    usage = runpy.run_path(str(root / "benchmarks" / "gpu_registers.py"))["USAGE"]
    took = [text for kernels in COMPILED_BEFORE.known.values() for text in kernels.values()]
    assert took and all(len(usage.findall(text)) == 1 for text in took)
