"""What the benchmark tells of its runs: figures, the file they are kept in, tables and pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from selective_compile.bench.ceilings import Ceilings
from selective_compile.bench.figures import (
    agreement,
    memory_figures,
    peers_figures,
    result_name,
    store,
    stored,
    waiting_times,
)
from selective_compile.bench.floor import Work
from selective_compile.bench.peers import PeerRun
from selective_compile.bench.plots import draw_results
from selective_compile.bench.settings import chosen
from selective_compile.bench.table import result_tables, span, times
from selective_compile.bench.trace import Asked, Trace
from selective_compile.runtime import StepRecord, StepShare


def run(*moments: list[float], **values: Any) -> PeerRun:
    return PeerRun(seconds=2.0, tokens=[[1] * len(row) for row in moments], moments=list(moments), **values)


def test_waiting_times_are_those_of_all_requests_and_gaps_of_all_rounds() -> None:
    found = waiting_times([run([0.5, 0.75, 1.75], [0.25]), run([1.5, 1.75])])
    assert (found["first_token_p50"], found["first_token_p99"]) == (0.5, 1.5)
    assert (found["latency_p50"], found["latency_p99"]) == (1.75, 1.75)
    assert (found["between_tokens_p50"], found["between_tokens_p99"]) == (0.25, 1.0)
    assert waiting_times([run([0.5])])["between_tokens_p99"] is None


def test_memory_is_the_largest_peak_over_weights_and_pool() -> None:
    runs = [run([1.0], loading_bytes=500, serving_bytes=110), run([1.0], loading_bytes=500, serving_bytes=130)]
    found = memory_figures(runs, {"weight_bytes": 80, "pool_bytes": 20})
    assert found == {"loading_bytes": 500, "serving_bytes": 130, "memory_ratio": 1.3}
    assert memory_figures([run([1.0])], {"weight_bytes": 80})["memory_ratio"] is None


class Told:
    def run(self, trace: Trace) -> PeerRun:
        raise AssertionError

    def describe(self) -> dict[str, object]:
        return {"attention": "some"}

    def close(self) -> None:
        pass


def test_the_floor_is_that_of_a_peer_whose_steps_are_known() -> None:
    trace = Trace(requests=(Asked(prompt_ids=[1], new_tokens=1, arrival=0.0),))
    work = Work(
        weight_bytes=1, head_bytes=0, flops_per_token=0, flops_per_row=0, flops_per_pair=0, kv_bytes_per_token=0
    )
    record = StepRecord(step=0, shares=(StepShare("a", 1, True, True, 0),), preempted=(), seconds=2.0)
    runs = {"engine": [run([1.0], records=[record])], "generate": [run([1.5])]}
    peers = {name: Told() for name in runs}
    ceilings = Ceilings(bytes_per_second=1.0, flops_per_second=1.0)
    found = peers_figures(peers, runs, trace, {"weight_bytes": 1}, (work, ceilings))
    assert found["engine"]["share_of_floor"] == 0.5 and found["engine"]["steps"] == 1
    assert "share_of_floor" not in found["generate"]
    assert "share_of_floor" not in peers_figures(peers, runs, trace, {"weight_bytes": 1}, None)["engine"]


def test_agreement_counts_tokens_up_to_the_first_difference() -> None:
    def gave(*tokens: list[int]) -> list[PeerRun]:
        return [PeerRun(seconds=1.0, tokens=list(tokens), moments=[])]

    runs = {"generate": gave([1, 2], [3, 4, 5, 6]), "engine": gave([1, 2], [3, 9, 5, 6])}
    assert agreement(runs, "engine") == 0.5 and agreement(runs, "generate") == 1.0
    assert agreement({"engine": gave([1])}, "engine") is None


# Several results


def peer(speed: float, share: float | None = None, memory: float | None = 1.1, gaps: bool = True) -> dict[str, Any]:
    return {
        "attention": "some",
        "tokens_per_second": speed,
        "engine_ratio": 600 / speed,
        "first_token_p50": 100 / speed,
        "first_token_p99": 2000 / speed,
        "between_tokens_p50": 10 / speed if gaps else None,
        "between_tokens_p99": 60 / speed if gaps else None,
        "memory_ratio": memory,
        "same_tokens_as_generate": 1.0,
        **({"share_of_floor": share} if share else {}),
    }


def result(**failed: str) -> dict[str, Any]:
    return {
        "machine": {"processor": "Some"},
        "versions": {"torch": "2.13", "transformers": "5.23"},
        "settings": {"threads": 2, "rounds": 3},
        "ceilings": {"bytes_per_second": 4e10, "flops_per_second": 8e11},
        "weight_bytes": 10**9,
        "pool_bytes": 10**8,
        "requests": 32,
        "prompt_tokens": 5000,
        "new_tokens": 2000,
        "arrival_rate": None,
        "peers": {"engine": peer(600, 0.6), "generate_batch": peer(100, None, None), "openvino": peer(500, gaps=False)},
        "failed": failed,
    }


RESULTS = {
    "0.5b alone bfloat16 saturated": result(),
    "1b long_context float32 saturated": result(vllm="vllm has ended with status 1: Traceback\n  File x\nno room"),
}


def test_results_have_names_of_their_own() -> None:
    settings = chosen(quick=False, model="0.5b", trace="alone")
    assert result_name(settings, "bfloat16", "saturated") == "0.5b alone bfloat16 saturated"
    quick = chosen(quick=True, model="0.5b", trace="alone")
    assert result_name(quick, "bfloat16", "saturated") == "quick 0.5b alone bfloat16 saturated"


def test_a_file_keeps_results_by_name(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert stored(path) == {}
    store(path, RESULTS)
    assert stored(path) == RESULTS


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"results": []}', '{"results": {"a": 1}}', '{"results": {"a": {}}}']
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--out must be a new file or one of this command, got .*other.json"):
        stored(path)
    assert path.read_text() == text


def test_tables_tell_each_result_and_all_of_them_within_eighty_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result_tables(json.loads(json.dumps(RESULTS))))
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    (engine, *_) = (line.split() for line in lines if line.startswith("engine "))
    assert engine == ["engine", "600.0", "0.17/3.33", "17/100", "1.10x", "60%", "100%"]
    (batch, *_) = (line for line in lines if line.startswith("generate_batch "))
    assert "not told" in batch and "6.00x" in batch
    assert "vllm FAILED: no room" in lines
    (overview, *_) = (line for line in lines[::-1] if line.startswith("1b long_context"))
    assert overview.split()[-4:] == ["600.0", "100.0", "500.0", "failed"]


def test_durations_are_told_or_not() -> None:
    assert span(0.0123, 0.5, 1000, 0) == "12/500" and span(0.5, 1.0, 1, 2) == "0.50/1.00"
    assert span(None, None, 1, 2) == "" and times(None) == "not told" and times(1.234) == "1.23x"


def test_each_result_with_peers_has_a_picture(tmp_path: Path) -> None:
    without = {**result(engine="it ended"), "peers": {}}
    drawn = draw_results({**RESULTS, "135m alone float32 saturated": without}, tmp_path / "new" / "pictures")
    assert [path.name for path in drawn] == [
        "0.5b_alone_bfloat16_saturated.png",
        "1b_long_context_float32_saturated.png",
        "overview.png",
    ]
    for path in drawn:
        width, height = Image.open(path).size
        assert width > 1000 and height > 200
