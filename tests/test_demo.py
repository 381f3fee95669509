"""`selective-compile demo`: what it compares, prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import checkpoints, demo, tiny_model
from selective_compile.checkpoints import Checkpoint
from selective_compile.tiny_model.tokenizer import build
from tests.commands import folder as folder
from tests.commands import found_again as found_again
from tests.commands import ok, refused, run


def test_demo_compares_times_and_draws(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    arguments = ["--model", folder, "--no-compile", "--requests", "5", "--threads", str(torch.get_num_threads())]
    out = ok("demo", *arguments, "--picture", str(picture)).stdout
    parts = ["ragged", "compiled graphs", "same tokens", "generate, one by one", "engine, arriving over time"]
    places = [out.index(part) for part in parts]
    assert places == sorted(places)
    assert "5 of 5 requests got the same tokens as from generate" in out
    assert "x as fast" in out and str(picture) in out.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, out.splitlines()[:-1])) <= 100


def test_demo_as_json_is_nothing_but_json(folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.svg"
    arguments = ["--model", folder, "--no-compile", "--requests", "6", "--kv-tokens", "560", "--json"]
    found = json.loads(ok("demo", *arguments, "--seed", "3", "--picture", str(picture)).stdout)
    assert found["verdicts"] == {"equal": 6, "near tie": 0, "different": 0}
    assert found["report"]["verdict"] == "ragged" and found["graphs"] == 0
    assert len(found["requests"]) == 6 and found["picture"] == str(picture)
    generated = sum(len(request["tokens"]) for request in found["requests"])
    assert found["engine"]["tokens_generated"] == generated
    assert found["one_by_one"]["tokens_per_second"] == pytest.approx(generated / found["one_by_one"]["seconds"])
    assert picture.exists()


def test_demo_fails_where_a_token_differs(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = demo.through_engine

    def off_by_one(*arguments: Any) -> demo.EngineRun:
        served = real(*arguments)
        served.way.tokens[1][2] ^= 1
        return served

    monkeypatch.setattr(demo, "through_engine", off_by_one)
    picture = str(tmp_path / "schedule.png")
    result = run("demo", "--model", folder, "--no-compile", "--requests", "3", "--picture", picture)
    assert result.exit_code == 1
    assert "2 of 3 requests got the same tokens" in result.stdout and "NO, by" in result.stdout
    assert result.stderr == "error: the engine's tokens differ from those of generate\n"


def test_demo_refuses_a_picture_it_could_not_write_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "must end in .png or .svg" in refused("demo", "--picture", "schedule.gif")


def test_demo_prompts_arrive_over_time_and_have_answers_for_the_shipped_model_only(folder: str) -> None:
    foreign = checkpoints.load(folder)
    wanted = demo.make_requests(foreign, 12, seed=0)
    arrivals = [request.arrival for request in wanted]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals) and arrivals[-1] > 5
    assert all(request.answer is None for request in wanted)
    own = Checkpoint(name="", shipped=True, model=foreign.model, tokenizer=foreign.tokenizer)
    assert any(request.answer for request in demo.make_requests(own, 12, seed=0))


class Scripted(nn.Module):
    """Gives the same logits at every position."""

    dtype = torch.float32

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.tensor(logits))

    def forward(self, ids: Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.row.expand(*ids.shape, -1)})


def scripted(*logits: float, shipped: bool = False) -> Checkpoint:
    model: Any = Scripted(*logits)
    return Checkpoint(name="scripted", shipped=shipped, model=model, tokenizer=build())


def test_a_near_tie_is_told_apart_from_a_difference() -> None:
    tied = (1.0, 1.0 - 5e-5, -1.0)
    assert demo.compare(scripted(*tied), [0], [0, 0], [0, 0]).verdict == "equal"
    near = demo.compare(scripted(*tied), [0], [0, 1], [0, 0])
    assert near.verdict == "near tie" and near.behind == pytest.approx(5e-5, rel=0.01)
    # One wrong token behind a near tie is still wrong, and the model that ships has no near ties.
    assert demo.compare(scripted(*tied), [0], [1, 2], [0, 0]).verdict == "different"
    assert demo.compare(scripted(*tied, shipped=True), [0], [0, 1], [0, 0]).verdict == "different"
    apart = demo.compare(scripted(1.0, 0.5), [0], [0, 1], [0, 0])
    assert apart.verdict == "different" and apart.behind == pytest.approx(0.5)


def test_ending_early_is_a_difference() -> None:
    stopped = demo.compare(scripted(1.0, 1.0), [0], [0], [0, 0])
    assert stopped.verdict == "different" and stopped.behind is None


def test_a_padded_row_ends_with_its_end_of_sequence() -> None:
    assert demo.until_end([5, 9, 7, 7], 9) == [5, 9]
    assert demo.until_end([5, 9, 7], [7, 9]) == [5, 9]
    assert demo.until_end([5, 6], None) == [5, 6]
    ids, mask = demo.left_padded([[1, 2, 3], [4]], 0, "cpu")
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_demo_with_the_model_that_ships(tmp_path: Path) -> None:
    picture = str(tmp_path / "schedule.png")
    found = json.loads(ok("demo", "--no-compile", "--picture", picture, "--json").stdout)
    assert found["verdicts"] == {"equal": 24, "near tie": 0, "different": 0}
    assert found["model"] == str(tiny_model.path())
