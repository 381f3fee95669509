"""The benchmark: its trace, its floor, its checks, and a quick run of the whole."""

from __future__ import annotations

import inspect
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest
import torch

from selective_compile.bench import BenchSettings, peers, run_benchmark
from selective_compile.bench.apart.conversation import served
from selective_compile.bench.ceilings import Ceilings, measure_ceilings
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.environments import CommandError, Environment
from selective_compile.bench.floor import Roofline, Work, floor_seconds
from selective_compile.bench.peers import PEERS_HERE, PeerError, PeerRun
from selective_compile.bench.rounds import agreement, check_lengths, run_rounds
from selective_compile.bench.separate_peers import CONVERSATION, SEPARATE_PEERS, SeparatePeer
from selective_compile.bench.settings import PEERS, QUICK_PEERS, LlamaShape, chosen, listed
from selective_compile.bench.trace import Asked, Trace, log_uniform, make_trace
from selective_compile.progress import silent
from selective_compile.runtime import StepRecord, StepShare

QUICK = chosen(quick=True, threads=1, compile=False)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    found = Checkpoint(folder=tmp_path_factory.mktemp("checkpoint"), shape=QUICK.shape, dtype="float32")
    found.write(seed=0)
    return found


# Settings and trace


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"dtypes": ("int8",)}, "dtypes must be one or more of float32, bfloat16, float16, each once, got int8"),
        ({"modes": ()}, "modes must be one or more of saturated, arriving, each once, got none"),
        ({"peers": ("engine", "engine")}, "peers must be one or more of .*, each once, got engine, engine"),
        ({"output_tokens": (9, 8)}, "output_tokens must be two numbers .* got 9, 8"),
        ({"prompt_tokens": (8, 2000)}, "must together be at most 2048, got 2000 and 256"),
        ({"arrival_rate": 0.0}, "arrival_rate must be above 0, got 0.0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**wrong)  # type: ignore[arg-type]


def test_names_are_listed_by_commas() -> None:
    assert listed("engine, generate,") == ("engine", "generate")
    assert listed("") == ()


def test_the_model_has_the_size_that_is_promised() -> None:
    shape = LlamaShape()
    head = shape.hidden // shape.heads
    attention = 2 * shape.hidden * head * (shape.heads + shape.kv_heads)
    layers = shape.layers * (attention + 3 * shape.hidden * shape.mlp)
    assert 120e6 < layers + 2 * shape.vocabulary * shape.hidden < 130e6


def test_lengths_are_skewed_and_within_their_limits() -> None:
    rng = Random(1)
    lengths = [log_uniform(rng, (8, 256)) for _ in range(20_000)]
    assert min(lengths) == 8 and max(lengths) == 256
    # Log-uniform: each doubling holds as many, one in five.
    counts = Counter(int(math.log2(length)) for length in lengths if length < 256)
    assert all(0.17 < counts[octave] / len(lengths) < 0.23 for octave in range(3, 8))


def test_the_trace_depends_on_the_seed_alone() -> None:
    assert make_trace(QUICK) == make_trace(QUICK) != make_trace(replace(QUICK, seed=1))
    trace = make_trace(BenchSettings())
    assert trace.new_tokens == sum(asked.new_tokens for asked in trace.requests)
    assert all(asked.arrival == 0 for asked in trace.requests)
    assert all(8 <= len(asked.prompt_ids) <= 512 and max(asked.prompt_ids) < 32_000 for asked in trace.requests)


def test_arrivals_are_poisson_and_change_nothing_else() -> None:
    trace = make_trace(BenchSettings(requests=2000, prompt_tokens=(1, 2), output_tokens=(1, 2)))
    spread = trace.arriving(rate=50, seed=3)
    moments = [asked.arrival for asked in spread.requests]
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    assert moments[0] == 0 and min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert Trace(requests=tuple(replace(asked, arrival=0.0) for asked in spread.requests)) == trace


# The floor


def step(*shares: tuple[str, int, int, bool]) -> StepRecord:
    made = tuple(StepShare(name, tokens, tokens > 1, samples, start) for name, start, tokens, samples in shares)
    return StepRecord(step=0, shares=made, preempted=(), seconds=1.0)


def test_the_floor_is_the_larger_of_reading_and_multiplying_in_each_step() -> None:
    work = Work(weight_bytes=1000, flops_per_token=10, flops_per_row=100, flops_per_pair=1, kv_bytes_per_token=7)
    steps = [
        step(("a", 0, 4, False)),  # 1000 + 4 * 7 bytes; 4 * 10 + (1 + 2 + 3 + 4) flops
        step(("a", 4, 2, True), ("b", 0, 1, True)),  # 1000 + (6 + 1) * 7; 3 * 10 + (5 + 6) + 1 + 2 * 100
        step(("a", 6, 1, True)),  # 1000 + 7 * 7; 10 + 7 + 100
        step(("b", 0, 2, True)),  # again from nothing: 1000 + 2 * 7; 20 + 3 + 100
    ]
    reading = Ceilings(bytes_per_second=1.0, flops_per_second=1e9)
    assert floor_seconds(steps, work, reading) == 1028 + 1049 + 1049 + 1014
    multiplying = Ceilings(bytes_per_second=1e9, flops_per_second=1.0)
    assert floor_seconds(steps, work, multiplying) == 50 + 242 + 117 + 123
    mixed = Ceilings(bytes_per_second=1.0, flops_per_second=242 / 2000)
    assert floor_seconds(steps, work, mixed) == pytest.approx(1028 + 2000 + 1049 + 123 / 242 * 2000)
    roofline = Roofline(work, mixed)
    assert [roofline(one).limit for one in steps] == ["memory", "compute", "memory", "compute"]


def test_the_work_of_a_model_is_read_off_its_weights(checkpoint: Checkpoint) -> None:
    work = Work.of(replace(checkpoint, dtype="bfloat16").load())
    layers = 2 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 256)
    assert work.flops_per_token == 2 * layers and work.flops_per_row == 2 * 256 * 128
    assert work.weight_bytes == 2 * (layers + 256 * 128)
    assert work.kv_bytes_per_token == 2 * (2 * 2 * 2 * 32)
    assert work.flops_per_pair == 2 * 2 * 2 * 128


def test_ceilings_are_rates() -> None:
    found = measure_ceilings(torch.float32, device=torch.device("cpu"), read_bytes=2**22)
    assert 1e8 < found.bytes_per_second < 1e13 and 1e8 < found.flops_per_second < 1e16


# The peers


@pytest.mark.parametrize("name", QUICK_PEERS)
def test_each_peer_gives_every_request_its_tokens_in_both_modes(name: str, checkpoint: Checkpoint) -> None:
    trace = make_trace(QUICK)
    model = checkpoint.load()
    peer = PEERS_HERE[name](model, trace, QUICK)
    ids = [torch.tensor([asked.prompt_ids]) for asked in trace.requests]
    for timed in (trace, trace.arriving(rate=60, seed=0)):
        run = peer.run(timed)
        check_lengths(name, run, timed)
        last = timed.requests[-1].arrival
        assert last < run.seconds and all(0 < latency <= run.seconds for latency in run.latencies)
        for tokens, prompt, asked in zip(run.tokens, ids, timed.requests, strict=True):
            config = peers.greedy_without_end(asked.new_tokens)
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            assert tokens == expected[0, prompt.shape[1] :].tolist()
    about = peer.describe()
    assert about["weights"] == about["keys_and_values"] == "float32"
    assert about["attention"] != "unknown"


def test_a_peer_that_gives_too_few_tokens_is_found_out() -> None:
    trace = Trace(requests=(Asked(prompt_ids=[1], new_tokens=3, arrival=0.0),))
    run = PeerRun(seconds=1.0, tokens=[[1, 2]], latencies=[1.0])
    with pytest.raises(PeerError, match="generate must give request 0 3 tokens, gave 2"):
        check_lengths("generate", run, trace)


def test_generate_batch_says_what_it_lacks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="psutil must be installed"):
        PEERS_HERE["generate_batch"](checkpoint.load(), make_trace(QUICK), QUICK)


def test_every_peer_that_can_be_named_is_there() -> None:
    assert {*PEERS_HERE, *SEPARATE_PEERS} == set(PEERS) and set(QUICK_PEERS) < set(PEERS_HERE)


class Counting:
    """Another engine: gives each request a token a step, two requests at a time."""

    def __init__(self) -> None:
        self.left: dict[int, list[int]] = {}
        self.found: dict[int, list[int]] = {}

    def about(self) -> dict[str, object]:
        return {"attention": "none"}

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        self.left[number], self.found[number] = [prompt_ids[-1] + 1 + i for i in range(new_tokens)], []

    def step(self) -> Iterator[tuple[int, list[int]]]:
        for number in list(self.left)[:2]:
            self.found[number].append(self.left[number].pop(0))
            if not self.left[number]:
                del self.left[number]
                yield number, self.found[number]


SERVER = """
from collections.abc import Iterator
{counting}
print("what engines say goes elsewhere")
server = lambda fails: 1 / 0 if fails else Counting()
"""


def asked(prompt: list[int], new_tokens: int, arrival: float = 0.0) -> Asked:
    return Asked(prompt_ids=prompt, new_tokens=new_tokens, arrival=arrival)


def test_a_peer_apart_serves_requests_as_they_arrive() -> None:
    requests = [asked([1, 5], 3), asked([7], 1), asked([2], 2, arrival=0.05)]
    found = served(Counting(), list(map(asdict, requests)))  # type: ignore[arg-type]
    assert found["tokens"] == [[6, 7, 8], [8], [3, 4]]
    assert found["seconds"] >= 0.05 and all(0 < latency < found["seconds"] for latency in found["latencies"])


def test_a_peer_apart_is_a_process_that_ends_and_whose_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting.py").write_text(SERVER.format(counting=inspect.getsource(Counting)))
    here = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import conversation; conversation.main()"

    def peer(fails: bool) -> SeparatePeer:
        paths = f"{tmp_path}:{CONVERSATION.parent}"
        command = [sys.executable, "-c", here, paths, "counting", json.dumps({"fails": fails})]
        return SeparatePeer("counting", command, threads=1)

    running = peer(fails=False)
    trace = Trace(requests=(asked([1, 5], 3), asked([7], 1)))
    assert running.describe() == {"attention": "none"}
    assert running.run(trace).tokens == running.run(trace).tokens == [[6, 7, 8], [8]]
    running.close()
    assert running._process.returncode == 0
    with pytest.raises(PeerError, match=r"counting has ended: (?s:.*)ZeroDivisionError"):
        peer(fails=True)


def test_an_environment_is_made_once_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    empty = Environment(name="empty", requirements=())
    python = empty.python()
    made = python.parent.parent.stat().st_mtime_ns
    assert subprocess.run([python, "-c", "import pip"], check=True).returncode == 0
    assert empty.python() == python and python.parent.parent.stat().st_mtime_ns == made
    with pytest.raises(CommandError, match="pip install there is no such package failed"):
        Environment(name="wrong", requirements=("there is no such package",)).python()


class Recorder:
    """A peer that notes when it runs."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def run(self, trace: Trace) -> PeerRun:
        self.log.append(self.name)
        return PeerRun(seconds=1.0, tokens=[[1] * asked.new_tokens for asked in trace.requests], latencies=[1.0])

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


def test_peers_run_in_turns_after_a_round_that_is_not_counted() -> None:
    log: list[str] = []
    runs = run_rounds({name: Recorder(name, log) for name in "ab"}, make_trace(QUICK), 3, silent, "")
    assert log == ["a", "b"] * 4
    assert {name: len(own) for name, own in runs.items()} == {"a": 3, "b": 3}


def test_agreement_counts_tokens_up_to_the_first_difference() -> None:
    def run(*tokens: list[int]) -> list[PeerRun]:
        return [PeerRun(seconds=1.0, tokens=list(tokens), latencies=[])]

    runs = {"generate": run([1, 2], [3, 4, 5, 6]), "engine": run([1, 2], [3, 9, 5, 6])}
    assert agreement(runs, "engine") == 0.5 and agreement(runs, "generate") == 1.0
    assert agreement({"engine": run([1])}, "engine") is None


def test_a_quick_benchmark_tells_all_that_a_reader_needs() -> None:
    settings = replace(QUICK, dtypes=("float32",), arrival_rate=200.0)
    figures = run_benchmark(settings, silent)
    assert [result["mode"] for result in figures["results"]] == ["saturated", "arriving"]
    saturated, arriving = figures["results"]
    assert (saturated["arrival_rate"], arriving["arrival_rate"]) == (None, 200.0)
    assert 0 < saturated["peers"]["engine"]["share_of_floor"] < 1
    assert "share_of_floor" not in arriving["peers"]["engine"]
    for result in figures["results"]:
        assert set(result["peers"]) == set(QUICK_PEERS)
        engine = result["peers"]["engine"]
        for peer in result["peers"].values():
            (seconds,) = peer["rounds_seconds"]
            assert peer["tokens_per_second"] == pytest.approx(figures["trace"]["new_tokens"] / seconds)
            ratio = engine["tokens_per_second"] / peer["tokens_per_second"]
            assert peer["engine_ratio"] == pytest.approx(ratio)
            assert peer["same_tokens_as_generate"] == 1.0
    assert figures["settings"]["threads"] == 1
    assert {"processor", "cores"} <= set(figures["machine"]) and "torch" in figures["versions"]
