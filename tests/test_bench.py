"""The benchmark: its trace, its floor, its checks, and a quick run of the whole."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from selective_compile.bench import rounds, transformers_peers
from selective_compile.bench.ceilings import Ceilings, measure_ceilings, read_blocks
from selective_compile.bench.checkpoint import Checkpoint
from selective_compile.bench.environments import CommandError
from selective_compile.bench.floor import Roofline, Work, floor_seconds
from selective_compile.bench.host import PEERS_HERE
from selective_compile.bench.peers import Peer, PeerError, PeerRun, greedy_without_end, slots_needed
from selective_compile.bench.rounds import check_lengths, run_benchmark, run_rounds, started_peers
from selective_compile.bench.separate_peers import STARTS
from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import MODELS, PEERS, QUICK_PEERS, TRACES, BenchSettings, chosen, listed
from selective_compile.bench.sizes import SHAPES, ModelName, TraceName
from selective_compile.bench.trace import Asked, Trace, log_uniform, make_trace, renewed
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
        ({"prompt_tokens": (8, 2000)}, "must together be at most 2048, got 0, 2000 and 256"),
        ({"prefix_tokens": 1281}, "must together be at most 2048, got 1281, 512 and 256"),
        ({"prefix_tokens": -1}, "prefix_tokens must be at least 0, got -1"),
        ({"model": "7b"}, "model must be one of 125m, 135m, 0.5b, 1b, 1b-a400m, got '7b'"),
        ({"trace": "short"}, "trace must be one of skewed, shared_prefix, alone, long_context, got 'short'"),
        ({"arrival_rate": 0.0}, "arrival_rate must be above 0, got 0.0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**wrong)  # type: ignore[arg-type]


def test_names_are_listed_by_commas() -> None:
    assert listed("engine, generate,") == ("engine", "generate")
    assert listed("") == () and listed("all") == ("all",) and listed("all", ("a", "b")) == ("a", "b")


@pytest.mark.parametrize(
    ("name", "millions"),
    {"125m": (120, 130), "135m": (134, 135), "0.5b": (493, 495), "1b": (1235, 1237), "1b-a400m": (1334, 1336)}.items(),
)
def test_each_model_has_the_size_that_is_promised(name: ModelName, millions: tuple[int, int]) -> None:
    with torch.device("meta"):
        model = random_decoder(SHAPES[name])
    assert millions[0] <= sum(each.numel() for each in model.parameters()) / 1e6 <= millions[1]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == SHAPES[name].tied == (name != "125m")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRACES)
def test_every_trace_fits_every_model(model: ModelName, name: TraceName, quick: bool) -> None:
    settings = chosen(quick=quick, model=model, trace=name)
    trace = make_trace(settings)
    lengths = [len(asked.prompt_ids) + asked.new_tokens for asked in trace.requests]
    assert max(lengths) <= settings.longest <= settings.shape.positions
    assert (len(lengths) == 1) == (name == "alone")
    prefixes = {tuple(asked.prompt_ids[: settings.prefix_tokens]) for asked in trace.requests}
    assert len(prefixes) == 1 and bool(settings.prefix_tokens) == (name == "shared_prefix")
    assert quick or (name == "long_context") == (max(lengths) > 8192)


def test_how_many_requests_can_be_asked_for() -> None:
    assert chosen(quick=False, trace="long_context", requests=9).requests == 9
    assert chosen(quick=True, requests=9).requests == 6 and chosen(quick=True, requests=2).requests == 2


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


def test_each_turn_asks_for_other_tokens_of_the_same_lengths() -> None:
    settings = chosen(quick=True, trace="shared_prefix")
    trace = make_trace(settings).arriving(rate=50, seed=3)
    first, second = (renewed(trace, settings, turn) for turn in (0, 1))
    assert first == renewed(trace, settings, 0) != second
    for one in (first, second):
        assert [len(asked.prompt_ids) for asked in one.requests] == [len(asked.prompt_ids) for asked in trace.requests]
        assert [(asked.new_tokens, asked.arrival) for asked in one.requests] == [
            (asked.new_tokens, asked.arrival) for asked in trace.requests
        ]
    (here,), (there,) = ({tuple(a.prompt_ids[:80]) for a in one.requests} for one in (first, second))
    assert here[:32] != there[:32]


# The floor


def step(*shares: tuple[str, int, int, bool]) -> StepRecord:
    made = tuple(StepShare(name, tokens, tokens > 1, samples, start) for name, start, tokens, samples in shares)
    return StepRecord(step=0, shares=made, preempted=(), seconds=1.0)


def test_the_floor_is_the_larger_of_reading_and_multiplying_in_each_step() -> None:
    work = Work(
        weight_bytes=900, head_bytes=100, flops_per_token=10, flops_per_row=100, flops_per_pair=1, kv_bytes_per_token=7
    )
    steps = [
        step(("a", 0, 4, False)),  # 900, without the head, + 4 * 7 bytes; 4 * 10 + (1 + 2 + 3 + 4) flops
        step(("a", 4, 2, True), ("b", 0, 1, True)),  # 1000 + (6 + 1) * 7; 3 * 10 + (5 + 6) + 1 + 2 * 100
        step(("a", 6, 1, True)),  # 1000 + 7 * 7; 10 + 7 + 100
        step(("b", 0, 2, True)),  # again from nothing: 1000 + 2 * 7; 20 + 3 + 100
    ]
    reading = Ceilings(bytes_per_second=1.0, flops_per_second=1e9)
    assert floor_seconds(steps, work, reading) == 928 + 1049 + 1049 + 1014
    multiplying = Ceilings(bytes_per_second=1e9, flops_per_second=1.0)
    assert floor_seconds(steps, work, multiplying) == 50 + 242 + 117 + 123
    mixed = Ceilings(bytes_per_second=1.0, flops_per_second=242 / 2000)
    assert floor_seconds(steps, work, mixed) == pytest.approx(928 + 2000 + 1049 + 123 / 242 * 2000)
    roofline = Roofline(work, mixed)
    assert [roofline(one).limit for one in steps] == ["memory", "compute", "memory", "compute"]


def test_the_work_of_a_model_is_read_off_its_weights(checkpoint: Checkpoint) -> None:
    work = Work.of(replace(checkpoint, dtype="bfloat16").load())
    layers = 2 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 256)
    assert work.flops_per_token == 2 * layers and work.flops_per_row == 2 * 256 * 128
    assert (work.weight_bytes, work.head_bytes) == (2 * layers, 2 * 256 * 128)
    assert work.kv_bytes_per_token == 2 * (2 * 2 * 2 * 32)
    assert Work.of(replace(checkpoint, dtype="bfloat16").load(), "int8").kv_bytes_per_token == 2 * 2 * 2 * (32 + 4)
    assert work.flops_per_pair == 2 * 2 * 2 * 128
    assert work == Work.of(replace(checkpoint, dtype="bfloat16").skeleton())


def test_the_work_of_a_model_with_tied_embeddings_and_heads_of_a_size_of_their_own(tmp_path: Path) -> None:
    shape = replace(QUICK.shape, tied=True, head_size=64)
    found = Checkpoint(folder=tmp_path, shape=shape, dtype="bfloat16")
    found.write(seed=0)
    work = Work.of(found.load())
    layers = 2 * (2 * 128 * 4 * 64 + 2 * 128 * 2 * 64 + 3 * 128 * 256)
    assert (work.weight_bytes, work.head_bytes) == (2 * layers, 2 * 256 * 128)
    assert work.kv_bytes_per_token == found.slot_bytes == 2 * (2 * 2 * 2 * 64)
    assert work.flops_per_pair == 4 * 2 * 4 * 64
    norms = 128 * (2 * 2 + 1)
    assert found.weight_bytes == 2 * (layers + 256 * 128 + norms)  # the embedding once
    (file,) = tmp_path.glob("*.safetensors")
    assert found.weight_bytes < file.stat().st_size < found.weight_bytes + 20_000


def test_blocks_are_read() -> None:
    blocks, order = torch.ones(5, 2, 64), torch.tensor([4, 0, 2], dtype=torch.int32)
    read_blocks(blocks, order)
    read_blocks(blocks, order[:0])
    with pytest.raises(ValueError, match="blocks must be contiguous, of a multiple of 64 bytes, got strides"):
        read_blocks(blocks.transpose(1, 2), order)
    with pytest.raises(ValueError, match="got .* 60 bytes"):
        read_blocks(torch.ones(5, 15), order)
    with pytest.raises(ValueError, match="order must be of the 5 blocks, got 0 to 5"):
        read_blocks(blocks, torch.tensor([5, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="order must be int32, one behind the other, got torch.int64"):
        read_blocks(blocks, order.long())


def test_ceilings_are_rates() -> None:
    found = measure_ceilings(torch.float32, device=torch.device("cpu"), read_bytes=2**22)
    assert 1e8 < found.bytes_per_second < 1e13 and 1e8 < found.flops_per_second < 1e16
    slower, faster = (Ceilings(bytes_per_second=each, flops_per_second=5.0 - each) for each in (1.0, 2.0))
    assert slower.best(faster) == faster.best(slower) == Ceilings(bytes_per_second=2.0, flops_per_second=4.0)


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
        assert timed.requests[-1].arrival < run.seconds
        if name == "engine":  # the second run finds nothing of the first
            assert sum(share.tokens for record in run.records for share in record.shares) == every_token(trace)
        for moments, asked in zip(run.moments, timed.requests, strict=True):
            assert 0 < moments[0] and moments == sorted(moments) and moments[-1] <= run.seconds - asked.arrival
            assert len(set(moments)) == len(moments)  # told token by token
        for tokens, prompt, asked in zip(run.tokens, ids, timed.requests, strict=True):
            config = greedy_without_end(asked.new_tokens)
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            assert tokens == expected[0, prompt.shape[1] :].tolist()
    about = peer.describe()
    assert about["weights"] == about["keys_and_values"] == "float32"
    assert about["attention"] != "unknown"


def test_the_engine_finds_what_requests_share_and_nothing_of_another_round(checkpoint: Checkpoint) -> None:
    """And the floor of such a trace has the prefix computed once, and read for each request."""
    settings = chosen(quick=True, trace="shared_prefix", threads=1, compile=False)
    trace = make_trace(settings)
    peer = PEERS_HERE["engine"](checkpoint.load(), trace, settings)
    nothing = Work(
        weight_bytes=0, head_bytes=0, flops_per_token=0, flops_per_row=0, flops_per_pair=0, kv_bytes_per_token=0
    )
    work = replace(nothing, flops_per_token=1, kv_bytes_per_token=1)
    contexts = [len(each.prompt_ids) + made for each in trace.requests for made in range(each.new_tokens)]
    for _ in range(2):  # the very same tokens again
        records = peer.run(trace).records
        computed = floor_seconds(records, work, Ceilings(bytes_per_second=1e9, flops_per_second=1.0))
        assert computed == every_token(trace) - 3 * 64  # two of its blocks are found by three of the four requests
        read = floor_seconds(records, work, Ceilings(bytes_per_second=1.0, flops_per_second=1e9))
        assert read >= sum(contexts)  # and chunks of prompts, which are read again


def every_token(trace: Trace) -> int:
    """That goes through a model which computes all of them once; the last of each request does not."""
    return sum(len(each.prompt_ids) + each.new_tokens - 1 for each in trace.requests)


def test_a_peer_that_gives_too_few_tokens_or_moments_is_found_out() -> None:
    trace = Trace(requests=(Asked(prompt_ids=[1], new_tokens=3, arrival=0.0),))
    run = PeerRun(seconds=1.0, tokens=[[1, 2]], moments=[[0.1, 0.2]])
    with pytest.raises(PeerError, match="generate must give request 0 3 tokens, gave 2"):
        check_lengths("generate", run, trace)
    with pytest.raises(PeerError, match="generate must tell when 3 tokens of request 0 came, told 2"):
        check_lengths("generate", replace(run, tokens=[[1, 2, 3]]), trace)


def test_generate_batch_says_what_it_lacks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_peers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="psutil must be installed"):
        PEERS_HERE["generate_batch"](checkpoint.load(), make_trace(QUICK), QUICK)


def test_generate_batch_of_transformers_5_17_is_told_its_pages(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the field has another name."""

    class Older:
        def __init__(
            self,
            num_blocks: int,
            block_size: int,
            allow_block_sharing: bool,
            max_batch_tokens: int,
            max_memory_percent: float,
        ) -> None:
            self.block_size, self.max_batch_tokens = block_size, max_batch_tokens

    monkeypatch.setattr(transformers_peers, "ContinuousBatchingConfig", Older)
    peer = PEERS_HERE["generate_batch"](checkpoint.load(), make_trace(QUICK), QUICK)
    assert peer.describe()["page_size"] == 256


def test_the_pool_holds_all_requests_in_pages_of_their_own() -> None:
    trace = Trace(requests=tuple(Asked(prompt_ids=[1] * 200, new_tokens=new, arrival=0.0) for new in (56, 57)))
    assert slots_needed(trace) == 256 + 512 + 256


def test_every_peer_that_can_be_named_is_there() -> None:
    assert set(STARTS) == set(PEERS) and set(QUICK_PEERS) < set(PEERS_HERE)


class Recorder:
    """A peer that notes when it runs, and fails at the run that it is told to."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def run(self, trace: Trace) -> PeerRun:
        self.log.append(self.name)
        if self.log.count(self.name) == self.fails_at:
            raise PeerError(f"{self.name} has ended")
        tokens = [[1] * asked.new_tokens for asked in trace.requests]
        return PeerRun(seconds=1.0, tokens=tokens, moments=[[1.0] * len(row) for row in tokens])

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


def test_peers_run_in_turns_after_a_round_that_is_not_counted() -> None:
    log: list[str] = []
    failed: dict[str, str] = {}
    peers: dict[str, Peer] = {name: Recorder(name, log) for name in "ab"}
    runs = run_rounds(peers, make_trace(QUICK), replace(QUICK, rounds=3), silent, "", failed)
    assert log == ["a", "b"] * 4 and failed == {}
    assert {name: len(own) for name, own in runs.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_peer_that_fails_is_named_and_the_others_go_on(fails_at: int) -> None:
    log: list[str] = []
    failed: dict[str, str] = {}
    peers: dict[str, Peer] = {"a": Recorder("a", log, fails_at), "b": Recorder("b", log)}
    runs = run_rounds(peers, make_trace(QUICK), replace(QUICK, rounds=3), silent, "", failed)
    assert failed == {"a": "a has ended"}
    assert list(peers) == list(runs) == ["b"] and len(runs["b"]) == 3
    assert log.count("a") == fails_at and log.count("a closed") == 1 and log.count("b") == 4


def test_a_peer_that_cannot_be_started_is_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, *_: object) -> Recorder:
        if name == "openvino":
            raise CommandError("pip install failed")
        return Recorder(name, [])

    monkeypatch.setattr(rounds, "STARTS", dict.fromkeys(PEERS, start))
    failed: dict[str, str] = {}
    settings = replace(QUICK, peers=("openvino", "generate"))
    peers = started_peers(checkpoint, make_trace(QUICK), settings, silent, "", failed)
    assert list(peers) == ["generate"] and failed == {"openvino": "pip install failed"}


def test_a_quick_benchmark_tells_all_that_a_reader_needs() -> None:
    modes = ("saturated", "arriving")
    settings = replace(QUICK, dtypes=("float32",), modes=modes, arrival_rate=200.0, peers=("engine", "generate"))
    results = dict(run_benchmark(settings, silent))
    assert list(results) == ["quick 125m skewed float32 saturated", "quick 125m skewed float32 arriving"]
    saturated, arriving = results.values()
    assert (saturated["arrival_rate"], arriving["arrival_rate"]) == (None, 200.0)
    assert 0 < saturated["peers"]["engine"]["share_of_floor"] < 1
    assert "share_of_floor" not in arriving["peers"]["engine"]
    for result in results.values():
        assert set(result["peers"]) == {"engine", "generate"} and result["failed"] == {}
        engine = result["peers"]["engine"]
        for peer in result["peers"].values():
            (seconds,) = peer["rounds_seconds"]
            assert peer["tokens_per_second"] == pytest.approx(result["new_tokens"] / seconds)
            ratio = engine["tokens_per_second"] / peer["tokens_per_second"]
            assert peer["engine_ratio"] == pytest.approx(ratio)
            assert peer["same_tokens_as_generate"] == 1.0
            assert 0 < peer["first_token_p50"] <= peer["first_token_p99"] <= peer["latency_p99"] <= seconds
            assert 0 < peer["between_tokens_p50"] <= peer["between_tokens_p99"]
            least = result["weight_bytes"] + result["pool_bytes"]
            assert peer["serving_bytes"] == pytest.approx(peer["memory_ratio"] * least)
            assert peer["serving_bytes"] > result["weight_bytes"] and peer["loading_bytes"] > result["weight_bytes"]
        assert result["settings"]["threads"] == 1
        assert {"processor", "cores"} <= set(result["machine"]) and "torch" in result["versions"]
