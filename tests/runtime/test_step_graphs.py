"""Steps that are captured and replayed: the tokens of Hugging Face, whoever comes and goes, and no new graphs."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from selective_compile import Engine, EngineConfig
from selective_compile.backend import compile_step_program
from selective_compile.runtime import StepError, model_runner
from selective_compile.runtime.token_marks import needs_marks
from selective_compile.step import StepInputs
from tests.longrope import longrope
from tests.models import VOCABULARY, tiny
from tests.oracle import assert_same_tokens
from tests.runtime.eager_rows import eager_rows as eager_rows
from tests.runtime.engine_checks import expect, run_until_idle
from tests.runtime.played_stream import PlayedStream, TapedStream
from tests.runtime.simulated import SimulatedProgram, simulated_engine


def tiny_mamba2(layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    config = AutoConfig.for_model("mamba2", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, **sizes)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def tiny_mixtral(layers: int = 2) -> Any:
    """Whose experts are an operator of transformers in float32, which loops over them on the host."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", vocab_size=VOCABULARY, **sizes, **heads)
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def submit_some(engine: Engine, seed: int, count: int, vocabulary: int) -> list[Any]:
    choice = random.Random(seed)
    requests = []
    for place in range(count):
        prompt = [choice.randrange(vocabulary) for _ in range(choice.randint(1, 20))]
        wanted: dict[str, Any] = {"max_new_tokens": choice.randint(1, 14)}
        if place % 3 == 1:
            wanted |= {"do_sample": True, "seed": place, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
        if place % 4 == 3:
            wanted["repetition_penalty"] = 1.4
        if place % 4 == 2:
            wanted |= {"min_new_tokens": 5, "eos_token_id": list(range(0, vocabulary, 3)), "suppress_tokens": [1, 2]}
        if place % 4 == 0:  # the host chooses
            wanted["logprobs"] = True
        if place == 5:
            wanted["stopping_criteria"] = [lambda ids, scores: ids[:, -1] % 3 == 0]
        requests.append(engine.submit(prompt, **wanted))
        for _ in range(choice.randint(0, 3)):
            engine.step()
    return requests


@pytest.mark.usefixtures("eager_rows")
@pytest.mark.parametrize(
    ("family", "budget", "invariant"),
    [
        *(("llama", 24, False), ("gemma2", 64, False), ("mamba2", 64, False), ("longrope", 64, False)),
        *(("llama", 24, True), ("gemma2", 64, True)),
    ],
)
def test_the_tokens_are_those_of_steps_that_are_not_captured(family: str, budget: int, invariant: bool) -> None:
    """Of longrope, some grow long, and begin anew."""
    others: dict[str, Any] = {"mamba2": tiny_mamba2, "longrope": partial(longrope, 16)}
    model = others[family]() if family in others else tiny(family)
    moods = random.Random(1)
    stream = TapedStream(lambda: moods.choice((0, 0, 1, 9)), captures=True)
    config = EngineConfig(
        compile=False,
        block_size=4,
        max_kv_tokens=4 * 40,
        max_requests=5,
        token_budget=budget,
        block_reuse=False,
        batch_invariant=invariant,
    )
    program = compile_step_program(model, config)
    engine = Engine(model, config, program=program, stream=stream)
    plain = Engine(model, config, program=program)
    vocabulary = model.config.vocab_size
    found, wanted = (submit_some(each, 3, 8, vocabulary) for each in (engine, plain))
    for each in (engine, plain):
        run_until_idle(each)
    for request, same in zip(found, wanted, strict=True):
        if request.params.do_sample or needs_marks(request.params):
            assert request.tokens == same.tokens
        else:
            assert_same_tokens(model, request.prompt_ids, request.tokens)
        assert request.finish_reason == same.finish_reason and request.params.logprobs == bool(request.logprobs)
        assert request.logprobs == (same.logprobs and pytest.approx(same.logprobs, abs=1e-4))
    assert stream.replayed > 10
    captured = engine.stats().captured
    again = submit_some(engine, 3, 8, vocabulary)
    run_until_idle(engine)
    assert [request.tokens for request in again] == [request.tokens for request in found]
    assert engine.stats().captured == captured, "no new graphs after the first time"


def test_changed_weights_are_seen_and_a_failed_step_leaves_nothing_wrong() -> None:
    model = tiny("llama")
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=400)
    program = compile_step_program(model, config)
    engine = Engine(model, config, program=program, stream=TapedStream(captures=True))
    prompt = [3, 4, 5]
    before = engine.submit(prompt, max_new_tokens=6)
    run_until_idle(engine)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    request = engine.submit(prompt, max_new_tokens=6)
    run_until_idle(engine)
    fresh = Engine(model, config, program=program)
    wanted = fresh.submit(prompt, max_new_tokens=6)
    run_until_idle(fresh)
    assert request.tokens == wanted.tokens != before.tokens
    captured = dict(engine._runner._graphs._graphs)  # type: ignore[union-attr]
    engine.drop_computed(if_idle=True)
    assert engine._runner._graphs._graphs == captured, "the weights lie where they lay"  # type: ignore[union-attr]
    failing = engine.submit(prompt, max_new_tokens=6)
    engine.step()
    engine.step()
    launch = engine._runner.launch

    def fail(step: Any) -> Any:
        raise MemoryError("no more")

    engine._runner.launch = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no more"):
        engine.step()
    engine._runner.launch = launch  # type: ignore[method-assign]
    assert failing.finish_reason == "error"
    again = engine.submit(prompt, max_new_tokens=6)
    run_until_idle(engine)
    assert again.tokens == wanted.tokens


@pytest.mark.parametrize("seed", range(3))
def test_after_a_failed_step_all_that_was_to_arrive_is_sent_again(seed: int) -> None:
    """Of block tables: the next request may have the slot and the blocks of one that failed."""
    moods = random.Random(seed)
    engine = simulated_engine(
        SimulatedProgram(captured=True),
        stream=PlayedStream(captures=True),
        block_size=2,
        max_kv_tokens=2 * 12,
        max_requests=2,
        token_budget=12,
        block_reuse=False,
    )
    launch = engine._runner.launch

    def launch_or_fail(step: Any) -> Any:
        if moods.random() < 0.15:
            raise MemoryError("no more")
        return launch(step)

    engine._runner.launch = launch_or_fail  # type: ignore[method-assign]
    kinds: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.5}, {"suppress_tokens": [0, 3]})
    ended = []
    for _ in range(60):
        prompts = [[moods.randrange(9) for _ in range(moods.randint(1, 5))] for _ in range(2)]
        requests = [engine.submit(prompt, max_new_tokens=5, **moods.choice(kinds)) for prompt in prompts]
        working = True
        while working:
            with contextlib.suppress(StepError):
                working = engine.step()
        ended += [request for request in requests if request.finish_reason != "error"]
    for request in ended:
        expect(request)
    assert 20 < len(ended) < 100


def test_rows_that_the_host_keeps_outlast_the_graph_that_computed_them() -> None:
    """Beams that are not all in one step: the search goes on when the last of them is computed."""
    model = tiny("llama")
    stream = TapedStream(captures=True)
    config = EngineConfig(compile=False, max_kv_tokens=400, max_requests=8, token_budget=6)
    engine = Engine(model, config, stream=stream)
    searches = [engine.submit([n, 5], max_new_tokens=8, num_beams=4) for n in (3, 4)]
    run_until_idle(engine)
    assert stream.replayed > 10
    for search in searches:
        wanted = model.generate(torch.tensor([search.prompt_ids]), max_new_tokens=8, num_beams=4, do_sample=False)
        assert search.prompt_ids + search.tokens == wanted[0].tolist()


def test_what_cannot_be_captured_is_launched_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    stream = TapedStream(captures=True)

    def refuse(work: Any, keep: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    stream.capture = refuse  # type: ignore[method-assign]
    engine = Engine(model, EngineConfig(compile=False, max_kv_tokens=400), stream=stream)
    request = engine.submit([3, 4, 5], max_new_tokens=5)
    with caplog.at_level("WARNING"):
        run_until_idle(engine)
    assert_same_tokens(model, [3, 4, 5], request.tokens)
    assert "not captured" in caplog.text and "not permitted" in caplog.text
    assert engine.captured_step is None


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("stream_class", [PlayedStream, TapedStream])
def test_pools_and_graphs_go_with_their_engine_and_wait_for_no_collection(stream_class: Any, refused: bool) -> None:
    stream = stream_class(captures=True)

    def refuse(work: Any, keep: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    if refused:
        stream.capture = refuse
    engine = Engine(tiny("llama"), EngineConfig(compile=False, max_kv_tokens=400), stream=stream)
    request = engine.submit([3, 4, 5], max_new_tokens=4)
    run_until_idle(engine)
    assert stream.replayed > 2 or refused
    runner, gone = engine._runner, []
    for what in (runner._pools[0][0], runner._graphs, runner):
        weakref.finalize(what, gone.append, type(what).__name__)  # type: ignore[arg-type]
    gc.disable()
    try:
        del engine, runner, request, what
        assert set(gone) == {"Tensor", "StepGraphs", "ModelRunner"}
    finally:
        gc.enable()


def test_when_a_capture_has_failed_none_is_tried_again_and_the_log_tells_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was captured before is replayed."""
    stream, tried = PlayedStream(captures=True), 0
    capture = stream.capture

    def sometimes(work: Any, keep: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried > 2:
            raise RuntimeError("operation not permitted")
        return capture(work, keep)

    monkeypatch.setattr(stream, "capture", sometimes)
    engine = simulated_engine(SimulatedProgram(captured=True), stream=stream, max_requests=4)
    with caplog.at_level("WARNING"):
        engine.warm_up()
        requests = [engine.submit([1, 2, n], max_new_tokens=6, do_sample=n > 2, seed=3) for n in range(4)]
        run_until_idle(engine)
    for request in requests:
        expect(request)
    (told,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "not permitted" in told.message and engine.stats().captured == 2 < engine.stats().captured_max
    assert tried == 4, "it is tried once more, and the others are not"
    tried = -1000
    engine._runner._graphs.check([1])  # type: ignore[union-attr]
    engine.warm_up()
    assert engine.stats().captured == engine.stats().captured_max, "where the weights lie elsewhere, all begins anew"


def test_a_capture_that_another_thread_has_ended_is_tried_once_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, tried = PlayedStream(captures=True), 0
    capture = stream.capture

    def ended_at_first(work: Any, keep: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried % 2:
            raise RuntimeError("operation failed due to a previous error during capture")
        return capture(work, keep)

    monkeypatch.setattr(stream, "capture", ended_at_first)
    engine = simulated_engine(SimulatedProgram(captured=True), stream=stream, max_requests=4, token_budget=4)
    with caplog.at_level("WARNING"):
        engine.warm_up()
    assert engine.stats().captured == engine.stats().captured_max == tried // 2 > 0 and not caplog.records
    request = engine.submit([1, 2, 3], max_new_tokens=6)
    run_until_idle(engine)
    expect(request)


def test_of_a_step_that_reads_the_device_nothing_is_captured_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, stream = tiny_mixtral().half(), TapedStream(captures=True)  # no kernel for CPUs takes it
    with caplog.at_level("INFO"):
        engine = Engine(model, EngineConfig(compile=False, max_kv_tokens=400), stream=stream)
    (told,) = (record for record in caplog.records if "not captured" in record.message)
    assert told.levelname == "INFO" and "transformers.grouped_mm_fallback" in told.message
    assert "moe.py:" in told.message and "\n" not in told.message
    request = engine.submit([3, 4, 5], max_new_tokens=5)
    engine.warm_up()
    run_until_idle(engine)
    assert_same_tokens(model, [3, 4, 5], request.tokens)
    assert stream.captured == engine.stats().captured_max == 0 and engine.captured_step is None


def test_steps_of_experts_that_a_kernel_of_ours_multiplies_are_captured() -> None:
    model, stream = tiny_mixtral(), TapedStream(captures=True)
    engine = Engine(model, EngineConfig(compile=False, max_kv_tokens=400), stream=stream)
    engine.warm_up()
    request = engine.submit([3, 4, 5], max_new_tokens=5)
    run_until_idle(engine)
    assert_same_tokens(model, [3, 4, 5], request.tokens)
    assert engine.stats().captured == engine.stats().captured_max > 0


@pytest.mark.parametrize(
    ("reason", "graphs", "captured"), [(None, True, True), (None, False, False), ("it says so", True, False)]
)
def test_room_to_compute_in_is_kept_for_graphs_that_there_can_be(
    reason: str | None, graphs: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much again as the largest step takes, where the blocks take what is left."""
    program, stream, taken = SimulatedProgram(captured=True), PlayedStream(captures=True), []
    program.not_captured = reason

    def blocks(*arguments: Any, reserved: int, **others: Any) -> list[int]:
        taken.append(reserved)
        return [64]

    monkeypatch.setattr(model_runner, "num_blocks", blocks)
    monkeypatch.setattr(stream, "peak_bytes", lambda step: 100)
    engine = simulated_engine(program, stream=stream, max_kv_tokens=None, cuda_graphs=graphs)
    assert taken == [200 if captured else 100] and bool(engine.stats().captured_max) == captured


def test_an_operator_of_another_library_is_not_captured_by_who_plays_a_device() -> None:
    from transformers.integrations import moe  # noqa: F401 - registers it

    experts = torch.ops.transformers.grouped_mm_fallback
    rows, weights, ends = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(AssertionError, match="nobody knows"):
        TapedStream(captures=True).capture(lambda: experts(rows, weights, ends), [])


def test_the_last_step_alone_is_its_graph_and_none_where_it_has_none() -> None:
    model = tiny("llama")
    stream = TapedStream(captures=True)
    engine = Engine(model, EngineConfig(compile=False, max_kv_tokens=400), stream=stream)
    assert engine.captured_step is None
    request = engine.submit([3, 4, 5], max_new_tokens=8)
    for _ in range(5):
        engine.step()
    again = engine.captured_step
    assert again is not None
    replayed, told = stream.replayed, list(request.tokens)
    stream.enqueue(again)
    assert stream.replayed == replayed + 1 and request.tokens == told, "it is a graph, and nobody is told of it"
    run_until_idle(engine)
    engine.submit([3, 4, 5], max_new_tokens=1, prompt_logprobs=True)  # more rows of logits than requests
    run_until_idle(engine)
    assert engine.captured_step is None


@pytest.mark.parametrize("read", [lambda values: int(values[1]), lambda values: values[values > 2].sum()])
def test_a_step_that_is_captured_reads_no_number_of_the_host(read: Any) -> None:
    stream = TapedStream(captures=True)
    values = torch.arange(4)

    def reads() -> None:
        values.add_(read(values))

    with pytest.raises(AssertionError, match="reads a number"):
        stream.capture(reads, [])


class EachARequest(SimulatedProgram):
    """Of a batch-invariant engine, whose rows are requests and whose steps never have few rows."""

    def __call__(self, inputs: StepInputs, *pools: Any) -> Tensor:
        tokens = int(inputs.cu_seqlens_q[-1])
        assert inputs.cu_seqlens_q.diff().tolist() == [1] * tokens + [0] * (len(inputs.context_lens) - tokens)
        assert len(inputs.input_ids) == len(inputs.context_lens) >= 32
        return super().__call__(inputs, *pools)


@pytest.mark.parametrize("budget", [9, 70])
def test_in_steps_of_a_batch_invariant_engine_each_row_is_a_request(budget: int) -> None:
    moods, stream = random.Random(2), PlayedStream(captures=True)
    program = EachARequest(captured=True)
    engine = simulated_engine(
        program, stream=stream, token_budget=budget, max_requests=5, block_size=2, batch_invariant=True
    )
    requests = []
    for _ in range(12):
        prompt = [moods.randrange(3) for _ in range(moods.randint(1, 30))]
        requests.append(engine.submit(prompt, max_new_tokens=moods.randint(1, 6)))
        engine.step()
    run_until_idle(engine)
    for request in requests:
        expect(request)
    assert stream.replayed == engine.stats().steps, "each of them is a graph"


class Timed(SimulatedProgram):
    """The device takes a millisecond for a step and a tenth of one for each token."""

    def __init__(self, stream: PlayedStream) -> None:
        super().__init__(captured=True)
        self.stream = stream

    def __call__(self, inputs: StepInputs, *pools: Any) -> Tensor:
        self.stream.busy += 1.0 + 0.1 * len(inputs.input_ids)
        return super().__call__(inputs, *pools)


@pytest.mark.parametrize(("launching", "replayed"), [(1.0, False), (8.0, True)])
def test_mixed_steps_are_captured_if_the_device_would_wait_for_the_host(launching: float, replayed: bool) -> None:
    stream = PlayedStream(captures=True)
    stream.launching = launching
    engine = simulated_engine(Timed(stream), stream=stream, token_budget=64, max_requests=4)
    request = engine.submit(list(range(40)), max_new_tokens=1)
    run_until_idle(engine)
    expect(request)
    assert stream.replayed == replayed
    # 12 ms are more than what 64 tokens take, 7.4 ms; 1.5 ms less than 16 tokens do.
    sizes = engine._runner._graphs._sizes.mixed  # type: ignore[union-attr]
    assert [size.tokens for size in sizes if size.requests == 4] == ([16, 32, 48, 64] if replayed else [])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_on_a_gpu(family: str) -> None:
    model, alone = tiny(family).cuda(), tiny(family)
    config = EngineConfig(compile=False, max_kv_tokens=4096, max_requests=5, token_budget=64)
    engine = Engine(model, config)
    engine.warm_up()
    found = submit_some(engine, 3, 8, model.config.vocab_size)
    run_until_idle(engine)
    on_cpu = Engine(alone, config)
    wanted = submit_some(on_cpu, 3, 8, model.config.vocab_size)
    run_until_idle(on_cpu)
    for request, same in zip(found, wanted, strict=True):
        if not request.params.do_sample:
            assert_same_tokens(alone, request.prompt_ids, request.tokens)
            assert request.logprobs == (same.logprobs and pytest.approx(same.logprobs, abs=1e-3))
    assert engine.stats().captured == engine.stats().captured_max > 0


@pytest.mark.gpu
def test_a_decode_step_on_a_gpu_reads_nothing_but_the_late_tokens() -> None:
    model: Any = tiny("llama").cuda()
    engine = Engine(model, EngineConfig(max_kv_tokens=4096, max_requests=5))
    requests = [engine.submit([1, 2, 3 + n], max_new_tokens=40, do_sample=n > 1) for n in range(4)]
    for _ in range(8):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run_until_idle(engine)
    assert all(len(request.tokens) == 40 for request in requests)
