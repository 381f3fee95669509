"""`selective-compile replay`: what was recorded is served again."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.commands import folder as folder
from tests.commands import found_again as found_again
from tests.commands import ok, refused


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two sampled requests to the model that ships."""
    path = str(tmp_path_factory.mktemp("recorded") / "run.jsonl")
    ok("generate", "12+7=", "letters c to j:", "--record", path, "--temperature", "0.9", "--seed", "3")
    return path


def test_what_was_recorded_is_served_again_drawn_and_traced(log: str, tmp_path: Path) -> None:
    """With the model and without: the same batches, and the same picture of them."""
    picture, trace = (str(tmp_path / name) for name in ("run.svg", "run.json"))
    events = []
    for how in ((), ("--schedule-only",)):
        said = ok("replay", log, *how, "--picture", picture, "--trace", trace).stdout
        assert said.startswith("2 requests, ") and "the same batches" in said
        assert ("the same batches and tokens" in said) == (how == ())
        assert f"picture of the schedule: {picture}" in said and f"trace: {trace}" in said
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
        events.append(json.loads(Path(trace).read_text()))
    served, decided = events
    assert decided == served and len(decided) > 20
    assert {event["args"]["name"] for event in decided if event["name"] == "thread_name"} == {"steps", "0", "1"}


def test_a_replay_as_json_and_of_what_is_no_log(log: str) -> None:
    alone = json.loads(ok("replay", log, "--schedule-only", "--json").stdout)
    assert alone["difference"] is None and alone["requests"] == 2 and alone["tokens"] > 10
    assert "must be an event log" in refused("replay", __file__)


def test_what_a_replay_writes_is_not_its_log(log: str, tmp_path: Path) -> None:
    before = Path(log).read_text()
    for name in ("record", "trace"):
        assert f"--{name} must be another file than the log" in refused("replay", log, f"--{name}", log)
    assert "--record must not come with --schedule-only" in refused(
        "replay", log, "--schedule-only", "--record", str(tmp_path / "again.jsonl")
    )
    assert "picture must end in .png or .svg" in refused("replay", log, "--picture", "x.gif")
    for name in ("record", "trace"):
        missing = str(tmp_path / "missing" / "a.json")
        assert f"--{name} must lie in a folder that exists" in refused("replay", log, f"--{name}", missing)
    assert Path(log).read_text() == before
