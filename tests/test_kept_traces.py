"""Traces on disk: a second start makes none, and one that is broken or of other settings is made anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from selective_compile import kept_captures, kept_files, kept_traces, programs
from selective_compile.backend import selective
from selective_compile.kept_traces import ENDING, KeptTraces, named
from selective_compile.options import EngineConfig
from selective_compile.passes import retrace
from selective_compile.passes.packed_trace import PackedTrace
from selective_compile.rewriting import proved
from tests.models import tiny

TRACE = PackedTrace(nodes=())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    return tmp_path / "captures"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was traced."""
    found: list[Any] = []
    whole = retrace.traced_now

    def noted(*arguments: Any) -> Any:
        found.append(arguments[0])
        return whole(*arguments)

    monkeypatch.setattr(retrace, "traced_now", noted)
    return found


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


def start(model: nn.Module, *, keep: bool = True) -> str:
    """The code of the flat graph."""
    flat = proved(model, keep=keep)[1].flat
    assert flat is not None
    return flat.module.code


def test_a_second_start_traces_nothing(made: list[Any], folder: Path) -> None:
    first = start(tiny("llama"))
    assert len(made) == len(kept(folder)) == 2
    assert start(tiny("llama")) == first == start(tiny("llama", seed=1))  # weights are given
    assert len(made) == len(kept(folder)) == 2


def test_a_change_of_the_model_is_traced(made: list[Any], folder: Path) -> None:
    start(tiny("llama"))
    for changes in ({"rms_norm_eps": 1e-3}, {"num_hidden_layers": 3}, {"num_key_value_heads": 1}):
        before = len(made)
        assert start(tiny("llama", **changes)) == start(tiny("llama", **changes), keep=False)
        assert len(made) == before + 4
    start(tiny("llama").to(torch.bfloat16))
    assert len(made) == 16


def test_none_are_kept_where_captures_are_not(made: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "step_program", lambda *_: None)  # nothing is compiled
    for _ in range(2):
        programs.compile_step_program(tiny("llama"), EngineConfig(keep_captures=False))
    assert len(made) == 4 and not [file for file in folder.glob("*") if not file.match("vectors-*")]


def test_a_compiled_model_takes_them_unless_it_is_asked_not_to(made: list[Any], folder: Path) -> None:
    ids = torch.arange(12).reshape(2, 6)
    found = []
    for keep, traced in ((True, 2), (True, 2), (False, 4)):
        torch._dynamo.reset()
        model = tiny("llama")
        fast = torch.compile(model, backend="selective", options={"inductor": False, "keep_traces": keep})
        with torch.no_grad():
            found.append(fast(ids, attention_mask=torch.ones_like(ids)).logits)
        assert selective.reports[-1].ok and len(made) == traced and len(kept(folder)) == 2
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_broken_file_is_traced_and_written_again(made: list[Any], folder: Path) -> None:
    first = start(tiny("llama"))
    for file in kept(folder):
        file.write_bytes(file.read_bytes()[:-1])
    assert start(tiny("llama")) == first
    assert start(tiny("llama")) == first
    assert len(made) == 4


def test_a_folder_that_cannot_be_made_is_done_without(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "file")
    assert start(tiny("llama")) == start(tiny("llama"))
    assert len(made) == 4


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch, "__version__", "another"),
        (kept_traces.transformers, "__version__", "another"),  # as it is read: not what another test may have put there
        (sys, "version", "3.12"),
        (kept_captures, "own_code", lambda: "other code of ours"),
        (torch, "get_default_dtype", lambda: torch.float64),
        (torch, "is_autocast_enabled", lambda kind: "neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trace_is_found_with_the_same_settings_alone(
    place: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = KeptTraces()
    traces.keep("a", TRACE)
    assert traces.get("a") == TRACE and traces.get("b") is None and named("a") == named("a") != named("b")
    monkeypatch.setattr(place, name, value)
    assert traces.get("a") is None


class Mode(TorchFunctionMode):
    pass


def test_nothing_is_kept_under_a_mode(folder: Path) -> None:
    with Mode():
        KeptTraces().keep("a", TRACE)
        assert KeptTraces().get("a") is None
    assert not folder.exists() or not kept(folder)


def test_the_oldest_go_by_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MOST", 2)
    folder.mkdir(mode=0o700)
    captures = [folder / f"{i}.capture" for i in range(2)]
    for file in captures:
        kept_files.write(file, b"")
    for key in "abc":
        KeptTraces().keep(key, TRACE)
    assert len(kept(folder)) == 2 and all(file.exists() for file in captures)
