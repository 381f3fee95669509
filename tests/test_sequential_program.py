"""Models in which something cannot be proved run whole, one request after another, as `generate` runs them."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import selective_compile as sc
from selective_compile.backend import compile_step_program, report_of
from selective_compile.coverage.random_model import random_model
from selective_compile.generate_requests import ENGINES
from selective_compile.runtime import StepError
from selective_compile.sequential_program import SequentialProgram
from tests.decoders import Decoder
from tests.leaving import STAYS, served_while_one_leaves
from tests.models import tiny
from tests.oracle import assert_generated_alone

VOCABULARY = 97
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
# Keys masked by a buffer; recurrent layers; both kinds of layers.
UNPROVED: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mamba": {"state_size": 4, "num_hidden_layers": 1},
    # Its recurrent state lies in attributes of its modules, not in the cache.
    "recurrent_gemma": {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "attention_window_size": 8,
    },
    "lfm2": {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    },
}
CONFIG = sc.EngineConfig(compile=False, token_budget=24, block_size=8, max_kv_tokens=8 * 10)


def unproved(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **UNPROVED[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def whole(model: Any) -> sc.Engine:
    program = SequentialProgram(model, ())
    assert program.not_captured
    return sc.Engine(model, CONFIG, program=program)


@pytest.mark.parametrize("family", UNPROVED)
def test_tokens_are_those_of_generate_on_each_request_alone(family: str) -> None:
    """Under random arrivals, prompts longer than a step's budget, and preemption."""
    model = unproved(family)
    engine = whole(model)
    draw = random.Random(family)
    prompts, requests = [], []
    for number in range(10):
        prompts.append([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 40))])
        config = GenerationConfig(max_new_tokens=draw.randint(1, 24), do_sample=False)
        requests.append(engine.submit(prompts[-1], config, request_id=number))
        for _ in range(draw.randint(0, 2)):
            engine.step()
    results = [request.result() for request in requests]
    assert engine.stats().preemptions == 0  # a model that is not causal could not go on from there
    for prompt, result in zip(prompts, results, strict=True):
        assert_generated_alone(model, prompt, result.tokens)
    assert not engine._program._requests  # type: ignore[union-attr]


def test_log_and_report_say_so_and_name_what_is_not_proved(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo cannot trace it, and what it cannot trace is no part of a layer."""
    model = random_model("reformer")
    with caplog.at_level(logging.WARNING):
        program = compile_step_program(model, CONFIG)
    assert "runs whole, one request after another" in caplog.text and "graph capture" in caplog.text
    report = sc.Engine(model, CONFIG, program=program).report
    assert report == report_of(program, model)
    assert report.verdict == "sequential" and not report.ok and report.refusals
    assert "one request after another" in str(report)


def test_refusing_instead_names_what_is_not_proved() -> None:
    with pytest.raises(sc.RefusedError, match="could not be proved"):
        sc.Engine(Decoder(mix=lambda x: x.flip(1)), sc.EngineConfig(fallback="refuse"))


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(sc.RefusedError):
        sc.Engine(Decoder(mix=lambda x: x.flip(1)), sc.EngineConfig(compile=False))


def test_wrapped_model_is_run_by_its_own_generate() -> None:
    """`wrap` puts another `generate` onto the object, which must not be taken for the model's own."""
    model, ids = unproved("mamba"), torch.tensor([[5, 7, 9]])
    alone = model.generate(ids, max_new_tokens=6, do_sample=False)
    with sc.wrapped(model):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), alone)


def test_weight_updates_are_seen() -> None:
    model = unproved("mamba")
    engine = whole(model)
    request = engine.submit([5, 7, 9], max_new_tokens=12, do_sample=False)
    for _ in range(4):
        engine.step()
    before = list(request.tokens)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.flip(0))
    tokens = list(request.result().tokens)
    ids = torch.tensor([[5, 7, 9, *before]])
    expected = model.generate(ids, max_new_tokens=12 - len(before), do_sample=False)[0, ids.shape[1] :].tolist()
    assert tokens[len(before) :] == expected


@pytest.mark.parametrize("count", [64, 128])
def test_other_tables_of_embeddings_are_refused_by_name(count: int) -> None:
    model = unproved("mamba")
    engine = whole(model)
    request = engine.submit([5, 7, 9], max_new_tokens=12, do_sample=False)
    engine.step()
    model.resize_token_embeddings(count, mean_resizing=False)
    for _ in range(2):
        with pytest.raises(StepError, match=rf"tables of embeddings must stay .*\[97, 32\].*got .*\[{count}, 32\]"):
            engine.submit([5, 7, 9], max_new_tokens=12, do_sample=False)
            engine.step()
    assert request.result().error is not None


@pytest.mark.parametrize("name", ["moshi", "cpmant"])
@pytest.mark.parametrize("times", [1, 2])
def test_requests_that_begin_again_make_the_calls_that_they_made(name: str, times: int) -> None:
    """To these models a prompt and what was generated from it are not what a longer prompt is."""
    model, prompt, count = random_model(name), [3, 14, 15, 9, 26, 5], 16
    engine = whole(model)
    request = engine.submit(prompt, max_new_tokens=count, do_sample=False)
    beams = engine.submit(prompt[1:], max_new_tokens=6, num_beams=2, do_sample=False)
    for _ in range(times):
        for _ in range(4):
            engine.step()
        with torch.no_grad():
            next(model.parameters()).add_(0.0)
    assert_generated_alone(model, prompt, request.result().tokens)
    ids = torch.tensor([prompt[1:]])
    expected = model.generate(ids, max_new_tokens=6, num_beams=2, do_sample=False, attention_mask=torch.ones_like(ids))
    assert list(beams.result().tokens) == expected[0, 5:].tolist()
    assert engine.stats().preemptions


def test_engines_that_share_a_program_do_not_share_requests() -> None:
    model = unproved("gpt_neo")
    program = SequentialProgram(model, ())
    first, second = (sc.Engine(model, CONFIG, program=program) for _ in range(2))
    for _ in range(2):  # an id may be used again
        prompts = ([5, 7, 9, 11], [8, 6])
        pair = [
            engine.submit(prompt, max_new_tokens=6, do_sample=False, request_id="one")
            for engine, prompt in zip((first, second), prompts, strict=True)
        ]
        while not all(request.finished for request in pair):
            first.step()
            second.step()
        for prompt, request in zip(prompts, pair, strict=True):
            assert_generated_alone(model, prompt, request.result().tokens)


def test_cancelled_request_leaves_nothing_behind() -> None:
    engine = whole(unproved("mamba"))
    request = engine.submit([5, 7, 9], max_new_tokens=12, do_sample=False)
    other = engine.submit([5, 7], max_new_tokens=3, do_sample=False)
    engine.step()
    request.cancel()
    assert len(other.result().tokens) == 3
    assert not engine._program._requests  # type: ignore[union-attr]


def test_nothing_is_reused_where_there_are_no_pools() -> None:
    """A second request with the prompt of the first: what that one computed is not its own."""
    model = unproved("mamba")
    engine = whole(model)
    prompt = list(range(1, 41))
    first, second = (list(engine.submit(prompt, max_new_tokens=6).result().tokens) for _ in range(2))
    assert second == first
    assert engine.stats().tokens_reused == 0


@pytest.mark.parametrize("step", [1, 2])
def test_who_leaves_between_plan_and_run_leaves_nothing(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unproved("gpt_neo")
    program = SequentialProgram(model, ())
    assert_generated_alone(model, STAYS, served_while_one_leaves(model, program, CONFIG, step, monkeypatch))
    assert not program._requests


@pytest.mark.parametrize("shared", [True, False], ids=["one program", "two programs"])
def test_engines_in_threads_of_their_own_do_not_see_one_anothers_states(shared: bool) -> None:
    """Where a model keeps its recurrent state in attributes of its modules, which are there once."""
    model = unproved("recurrent_gemma")
    programs = [SequentialProgram(model, ())] * 2 if shared else [SequentialProgram(model, ()) for _ in range(2)]
    engines = [sc.Engine(model, CONFIG, program=program) for program in programs]
    prompts = [[number + 1, 7, 9, 2 * number] for number in range(12)]
    with engines[0].running(), engines[1].running():
        requests = [
            engines[number % 2].submit(prompt, max_new_tokens=10, do_sample=False)
            for number, prompt in enumerate(prompts)
        ]
        results = [request.result(timeout=120) for request in requests]
    for prompt, result in zip(prompts, results, strict=True):
        assert_generated_alone(model, prompt, result.tokens)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["moshi", "cpmant", "prophetnet"])
def test_use_cache_is_what_the_call_says(name: str, beams: int) -> None:
    """Of these models transformers' own tokens are others without a cache."""
    model = random_model(name)
    ids = torch.randint(3, 60, (1, 11), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    found = {}
    for use_cache in (True, False):
        asked: dict[str, Any] = {**options, "use_cache": use_cache}
        found[use_cache] = sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **asked).tolist()
        assert found[use_cache] == model.generate(ids, **asked).tolist()
    assert found[True] != found[False] or beams > 1
    model.generation_config.use_cache = False
    assert sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **options).tolist() == found[False]
    asked = {**options, "generation_config": GenerationConfig(use_cache=True)}
    assert sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **asked).tolist() == found[True]


class Masked(nn.Module):
    """Reads a buffer; and writes another one, once it ``keeps`` something."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.keeps = mlp, False
        self.register_buffer("mask", torch.ones(64))
        self.register_buffer("last", torch.zeros(1, 1, 64))

    def forward(self, x: Tensor) -> Any:
        if self.keeps:
            self.last.copy_(x[:, -1:])
        return self.mlp(x * self.mask) + self.last


def masked() -> Any:
    """With a second layer: what a first one has kept of a token is made anew where the token is computed anew alone."""
    model = tiny("llama", num_hidden_layers=2, initializer_range=0.15)
    model.model.layers[0].mlp = Masked(model.model.layers[0].mlp)
    return model


def test_a_buffer_that_changes_is_seen() -> None:
    model = masked()
    engine, prompt = whole(model), [9, 2, 77, 31]
    request = engine.submit(prompt, max_new_tokens=12, do_sample=False)
    for _ in range(4):
        engine.step()
    before = list(request.tokens)
    model.model.layers[0].mlp.mask[::2] = -2.0
    tokens, ids = list(request.result().tokens), torch.tensor([[*prompt, *before]])
    expected = model.generate(ids, max_new_tokens=12 - len(before), do_sample=False)[0, ids.shape[1] :].tolist()
    assert (
        tokens[len(before) :] == expected
        and expected
        != masked().generate(ids, max_new_tokens=12 - len(before), do_sample=False)[0, ids.shape[1] :].tolist()
    )


def test_a_model_that_begins_to_keep_something_is_refused_by_name_and_then_kept_apart() -> None:
    """Requests have shared it: of a buffer that a trial has not seen written, none has one of its own at first."""
    model, greedy = masked(), {"max_new_tokens": 4, "do_sample": False}
    engine, layer = whole(model), model.model.layers[0].mlp
    assert len(engine.submit([9, 2], **greedy).result().tokens) == 4
    layer.keeps = True
    told = engine.submit([9, 2], **greedy).result().error
    assert told is not None and told.endswith("got model.layers.0.mlp.last: the next step has one for each request")
    layer.last.zero_()
    requests = [engine.submit(prompt, **greedy) for prompt in ([9, 2], [5, 7, 1])]
    for request in requests:
        found = request.result().tokens
        assert not layer.last.any()
        assert_generated_alone(model, request.prompt_ids, found)
        layer.last.zero_()


def counting(model: Any) -> Any:
    layer = model.model.layers[0].mlp
    layer.register_buffer("seen", torch.zeros((), dtype=torch.long))
    layer.register_forward_hook(lambda module, given, out: module.seen.add_(out.shape[1]) and None)
    return model


def test_what_hooks_write_is_theirs() -> None:
    """As observers of a quantisation do, for which such a model runs whole."""
    served, alone = (counting(tiny("llama", num_hidden_layers=1)) for _ in range(2))
    ids, greedy = torch.tensor([[9, 2, 77]]), {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(sc.generate(served, ids, engine_config=CONFIG, **greedy), alone.generate(ids, **greedy))
    assert served.model.layers[0].mlp.seen == alone.model.layers[0].mlp.seen == 6


def test_a_model_that_generate_has_run_whole_is_freed() -> None:
    model = counting(tiny("llama", num_hidden_layers=1))
    gone = weakref.ref(model)
    sc.generate(model, torch.tensor([[9, 2]]), engine_config=CONFIG, max_new_tokens=2, do_sample=False)
    kept = ENGINES._kept.of(model)
    assert kept is not None and isinstance(kept.program, SequentialProgram)
    del model, kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("vocabulary", [3, 5])
def test_a_vocabulary_may_be_of_few_tokens(vocabulary: int) -> None:
    """As of nucleotides."""
    config = AutoConfig.for_model("rwkv", vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, context_length=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    hooked = tiny("llama", vocab_size=vocabulary, bos_token_id=0)
    hooked.register_forward_hook(lambda *_: None)
    for each in (model, hooked):
        tokens = sc.Engine(each, CONFIG).submit([1, 2, 0], max_new_tokens=5).result().tokens
        assert_generated_alone(each, [1, 2, 0], tokens)
