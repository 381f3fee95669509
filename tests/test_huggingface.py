"""`generate` and `wrap` against `model.generate`: the same rows; what is refused; the model as it was."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import tomllib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, T5Config, pipeline
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

import selective_compile as sc
from selective_compile import kept_engines
from selective_compile.generate_requests import ENGINES
from selective_compile.options import EngineConfig
from selective_compile.tiny_model import tokenizer as byte_tokenizer
from tests.oracle import MARGIN, assert_same_tokens, reference_logits

ROOT = Path(__file__).parents[1]
CONFIG = EngineConfig(compile=False, block_size=4)
PAD, EOS = 0, 7
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 512},
}


def tiny(family: str = "llama", layers: int = 1, **options: Any) -> Any:
    """Random weights, wide enough that logits are rarely close; no special tokens but those of a test."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if family == "gpt2":
        sizes = {}
    none = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    settings = {"vocab_size": 199, "initializer_range": 0.2, **sizes, **none, **FAMILIES[family], **options}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.generation_config = GenerationConfig()
    return model.eval()


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return tiny()


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    """One model for many tests, so that it is compiled once; its configuration is put back."""
    yield shared_model
    shared_model.generation_config = GenerationConfig()


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(10, 199, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch() -> tuple[Tensor, Tensor]:
    """Ids and mask [4, 13]: padding on the left, on the right, on both sides, and none."""
    ids = random_ids(4, 13)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, 9:] = 0
    mask[2, :3] = 0
    mask[2, 11:] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def left_padded() -> tuple[Tensor, Tensor]:
    ids, mask = random_ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :5] = 0
    mask[1, :2] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def some_generated_token(model: Any, ids: Tensor, step: int = 2) -> int:
    """One that ends row 0 after `step` tokens or before, if it is taken for an end-of-sequence id."""
    return int(sc.generate(model, ids[:1], max_new_tokens=step, engine_config=CONFIG)[0, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_generate_on_each_alone(family: str) -> None:
    model = tiny(family, layers=2)
    ids, mask = padded_batch()
    eos = int(sc.generate(model, ids, attention_mask=mask, max_new_tokens=4, engine_config=CONFIG)[1, -1])
    options = {"max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": PAD}
    result = sc.generate(model, ids, attention_mask=mask, engine_config=CONFIG, **options)
    assert torch.equal(result[:, :13], ids)
    assert result.shape[1] <= 13 + 24
    for row, new in enumerate(result[:, 13:]):
        prompt = ids[row][mask[row].bool()]
        alone = model.generate(prompt[None], **options)[0, len(prompt) :]
        tokens = new[: len(alone)].tolist()
        near = assert_same_tokens(model, prompt.tolist(), tokens)
        if not near:
            assert tokens == alone.tolist()
            assert (new[len(alone) :] == PAD).all()
    assert (result[1, 13 + 4 :] == PAD).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 5},
        {"max_new_tokens": 1},
        {"max_length": 15},
        {"max_length": 10, "max_new_tokens": 6},
        {"max_new_tokens": 8, "pad_token_id": 3},
        {"max_new_tokens": 8, "num_beams": 1, "use_cache": True, "top_p": 0.3, "stopping_criteria": []},
        {"max_new_tokens": 8, "synced_gpus": False, "streamer": None, "position_ids": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("eos", [None, "an int", "a list"])
def test_equals_generate_for_left_padding(model: Any, options: dict[str, Any], eos: str | None) -> None:
    """Shape, prompt columns, new tokens, what finished rows are filled with, and where it all is cut."""
    ids, mask = left_padded()
    if eos is not None:
        first = some_generated_token(model, ids[2:])
        options = {**options, "eos_token_id": first if eos == "an int" else [first, 8]}
    theirs = model.generate(ids, attention_mask=mask, **options)
    ours = sc.generate(model, ids, attention_mask=mask, engine_config=CONFIG, **options)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, theirs)


HOLES = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1]])


def test_padding_between_tokens_is_as_nothing_without_windows(model: Any) -> None:
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(3))
    ours = sc.generate(model, ids, attention_mask=HOLES, max_new_tokens=6, do_sample=False, engine_config=CONFIG)
    theirs = model.generate(ids, attention_mask=HOLES, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, theirs)


def test_padding_between_tokens_is_refused_with_windows() -> None:
    """A window counts columns, and a hole shifts them."""
    model, ids = tiny("mistral"), torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_mask must have its ones side by side"):
        sc.generate(model, ids, attention_mask=HOLES, max_new_tokens=2, engine_config=CONFIG)


@pytest.mark.parametrize("pad", [None, PAD, EOS])
@pytest.mark.parametrize("eos", [[], [EOS], [EOS, 8]])
def test_attention_mask_is_inferred_as_generate_does(model: Any, pad: int | None, eos: list[int]) -> None:
    """From the padding id where there is one and it ends no sequence; else all is prompt."""
    ids, _ = left_padded()
    ids = ids.masked_fill(ids == PAD, PAD if pad is None else pad)
    options = {"max_new_tokens": 5, "pad_token_id": pad, "eos_token_id": eos or None}
    ours = sc.generate(model, ids, engine_config=CONFIG, **options)
    assert torch.equal(ours, model.generate(ids, **options))
    everything_is_prompt = sc.generate(model, ids, attention_mask=torch.ones_like(ids), engine_config=CONFIG, **options)
    assert torch.equal(ours, everything_is_prompt) == (pad is None or pad in eos)


def test_precedence_is_call_then_configuration_then_model(model: Any) -> None:
    ids = random_ids(2, 6)
    first = some_generated_token(model, ids)
    model.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=first, pad_token_id=5)
    of_call = GenerationConfig(max_new_tokens=4)
    for arguments in (
        {},
        {"generation_config": of_call},
        {"generation_config": of_call, "max_new_tokens": 3},
        {"generation_config": GenerationConfig(pad_token_id=9)},
        {"generation_config": GenerationConfig(max_length=8)},
        {"eos_token_id": None},
        {"eos_token_id": 198},
        {"eos_token_id": None, "max_new_tokens": None, "max_length": 11},
    ):
        ours = sc.generate(model, ids, engine_config=CONFIG, **arguments)
        assert torch.equal(ours, model.generate(ids, **arguments)), arguments
    assert sc.generate(model, ids, of_call, engine_config=CONFIG).shape == (2, 10)


def test_none_in_the_call_turns_off_what_the_model_sets(model: Any) -> None:
    ids = random_ids(1, 6)
    greedy = sc.generate(model, ids, max_new_tokens=12, engine_config=CONFIG)
    model.generation_config = GenerationConfig(do_sample=True, top_k=1, repetition_penalty=1.5)
    assert not torch.equal(sc.generate(model, ids, max_new_tokens=12, seed=3, engine_config=CONFIG), greedy)
    options = {"repetition_penalty": None, "max_new_tokens": 12, "engine_config": CONFIG, "seed": 3}
    assert torch.equal(sc.generate(model, ids, **options), greedy)
    assert torch.equal(sc.generate(model, ids, do_sample=None, top_k=None, **options), greedy)
    assert not torch.equal(sc.generate(model, ids, top_k=None, temperature=4.0, **options), greedy)


def test_max_length_counts_padding_and_must_leave_room(model: Any) -> None:
    ids, mask = left_padded()
    for arguments in ({"max_length": 9}, {"max_length": 3}, {"max_length": 9.5}, {"max_new_tokens": 0}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            sc.generate(model, ids, attention_mask=mask, engine_config=CONFIG, **arguments)


def test_numbers_of_numpy_are_taken(model: Any) -> None:
    ids, mask = left_padded()
    for number in ({"num_beams": np.int64(2)}, {"num_beams": torch.tensor(2)}, {"min_length": np.int64(9)}):
        arguments = {"attention_mask": mask, "max_new_tokens": np.int64(3), "pad_token_id": 0, **number}
        found = sc.generate(model, ids, engine_config=CONFIG, **arguments)
        plain = {name: int(each) if name != "attention_mask" else each for name, each in arguments.items()}
        assert torch.equal(found, model.generate(ids, **plain))


def test_without_prompt_it_begins_with_bos(model: Any) -> None:
    options = {"bos_token_id": 11, "max_new_tokens": 4}
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **options), model.generate(**options))
    with pytest.raises(ValueError, match="bos_token_id"):
        sc.generate(model, engine_config=CONFIG)


def test_list_of_prompts_with_a_configuration_each(model: Any) -> None:
    prompts = [random_ids(length, seed=length) for length in (3, 17, 8)]
    configs = [GenerationConfig(max_new_tokens=count) for count in (5, 2, 9)]
    results = sc.generate(
        model, [prompts[0].tolist(), prompts[1], tuple(prompts[2].tolist())], configs, engine_config=CONFIG
    )
    for prompt, config, result in zip(prompts, configs, results, strict=True):
        assert torch.equal(result, model.generate(prompt[None], config)[0])
    one_for_all = sc.generate(model, input_ids=prompts, max_new_tokens=3, engine_config=CONFIG)
    assert [len(result) for result in one_for_all] == [6, 20, 11]


def test_list_with_end_of_sequence_is_not_padded(model: Any) -> None:
    prompts = [random_ids(5, seed=2), random_ids(9, seed=3)]
    first = some_generated_token(model, prompts[0][None])
    short, _ = sc.generate(model, prompts, max_new_tokens=30, eos_token_id=first, engine_config=CONFIG)
    assert int(short[-1]) == first
    assert len(short) <= 5 + 2


def test_returns_the_class_of_generate(model: Any) -> None:
    ids = random_ids(2, 6)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    ours = sc.generate(model, ids, engine_config=CONFIG, **options)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, model.generate(ids, **options).sequences)
    assert list(ours) == ["sequences"]
    of_list = sc.generate(model, list(ids), engine_config=CONFIG, **options)
    assert [row.tolist() for row in of_list.sequences] == ours.sequences.tolist()


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append((value.tolist(), value.dtype, value.device.type))

    def end(self) -> None:
        self.seen.append("end")


def test_streamer_gets_what_generate_gives_it(model: Any) -> None:
    ids = random_ids(1, 6)
    ours, theirs = Recorder(), Recorder()
    result = sc.generate(model, ids, max_new_tokens=5, streamer=ours, engine_config=CONFIG)
    model.generate(ids, max_new_tokens=5, streamer=theirs)
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 1 + 5 + 1
    of_list = Recorder()
    sc.generate(model, [ids[0]], max_new_tokens=5, streamer=of_list, engine_config=CONFIG)
    assert of_list.seen == theirs.seen
    assert result.shape == (1, 11)


class Failing(Recorder):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.seen) == 3:
            raise OSError("the reader went away")


def test_a_failing_streamer_leaves_nothing_running(model: Any) -> None:
    with pytest.raises(OSError, match="went away"):
        sc.generate(model, random_ids(1, 6), max_new_tokens=50, streamer=Failing(), engine_config=CONFIG)
    assert_idle(model)


def assert_idle(model: nn.Module, config: EngineConfig = CONFIG) -> None:
    stats = ENGINES.engine_for(model, config, [1]).stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


UNSUPPORTED: dict[str, Any] = {
    "synced_gpus": True,
    "custom_generate": "someone/something",
    "trust_remote_code": True,
    "assistant_tokenizer": "a tokenizer",
    "past_key_values": "a cache",
    "logprobs": True,
    "max_new_token": 3,
    "do_samples": False,
    "cache_implementation": "paged",
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_is_refused_by_name(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*must be .*got .*; .*(leave it out|give it|drafts without)"):
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, **{name: UNSUPPORTED[name]})
    assert_idle(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": torch.ones(3, dtype=torch.int64)}, r"input_ids must have shape \[B, S\], got \[3\]"),
        ({"inputs": torch.ones(0, 3, dtype=torch.int64)}, r"input_ids must have shape \[B, S\]"),
        ({"inputs": torch.ones(1, 3)}, "input_ids must be integers, got torch.float32"),
        ({"inputs": [1, 2, 3]}, "input_ids must be a tensor .* or a list of prompts"),
        ({"inputs": [torch.tensor(3)]}, "input_ids must be a tensor .* or a list of prompts"),
        ({"inputs": "text"}, "input_ids must be a tensor .* or a list of prompts, got str text"),
        ({"inputs": {"input_ids": [[1]]}}, "input_ids must be a tensor .* or a list of prompts, got dict"),
        ({"inputs": []}, "input_ids must hold at least one prompt"),
        ({"inputs": [[1], []]}, "at least one token id, got none"),
        ({"inputs": [[1], [199]]}, "less than the vocabulary size 199, got 199"),
        ({"inputs": [[1], ["a"]]}, "must be integers in one dimension"),
        ({"inputs": torch.ones(1, 3).long(), "input_ids": torch.ones(1, 3).long()}, "got both"),
        (
            {"inputs": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 4)},
            r"attention_mask must have the shape of input_ids, \[2, 3\], got \[2, 4\]",
        ),
        (
            {"inputs": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "attention_mask must leave .* got none in row 1",
        ),
        ({"inputs": [[1]], "attention_mask": torch.ones(1, 1)}, "attention_mask must be None for a list"),
        (
            {"inputs": [[1]], "generation_config": [None, None]},
            "generation_config must be .*got 2 for 1 prompts",
        ),
        ({"inputs": torch.ones(1, 3).long(), "generation_config": [None]}, "generation_config must be one"),
        ({"inputs": [[1]], "generation_config": {"top_k": 3}}, "must be a transformers.GenerationConfig"),
        ({"inputs": [[1], [2]], "streamer": Recorder()}, "streamer must be None for a list of more than one prompt"),
        ({"inputs": [[1], [2]], "seed": [1]}, "seed must be an integer or a list of 2"),
        ({"inputs": [[1]], "eos_token_id": "a"}, "eos_token_id must be a token id"),
        ({"inputs": [[1]], "seed": -1}, "seed must be an integer of at least 0"),
        ({"inputs": [[1]], "seed": ["a"]}, "seed must be an integer of at least 0"),
        ({"inputs": [[1]], "do_sample": True, "temperature": 0.0}, "temperature must be a number above 0"),
        ({"inputs": [[1] * 10], "max_new_tokens": 504}, "max_new_tokens must be at most 503"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_refused(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sc.generate(model, engine_config=CONFIG, **arguments)
    assert_idle(model)


def test_a_model_that_cannot_be_served_is_refused() -> None:
    ids = random_ids(1, 6)
    training = tiny().train()
    with pytest.raises(ValueError, match="evaluation mode"):
        sc.generate(training, ids, engine_config=CONFIG)
    sc.generate(training.eval(), ids, max_new_tokens=2, engine_config=CONFIG)
    with pytest.raises(ValueError, match="evaluation mode"):
        sc.generate(training.train(), ids, engine_config=CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast must be off"):
        sc.generate(training.eval(), ids, engine_config=CONFIG)
    with pytest.raises(ValueError, match="torch.nn.Module"):
        sc.generate("gpt2", ids)
    encoder_decoder = nn.Module()
    encoder_decoder.config = T5Config()
    with pytest.raises(ValueError, match="without an encoder"):
        sc.generate(encoder_decoder.eval(), ids)


def test_sampling_repeats_with_torch_manual_seed(model: Any) -> None:
    ids = random_ids(3, 6)
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "engine_config": CONFIG}
    torch.manual_seed(5)
    first, second = sc.generate(model, ids, **options), sc.generate(model, ids, **options)
    torch.manual_seed(5)
    assert torch.equal(sc.generate(model, ids, **options), first)
    assert not torch.equal(first, second)


def test_greedy_decoding_does_not_draw(model: Any) -> None:
    state = torch.get_rng_state()
    sc.generate(model, random_ids(3, 6), max_new_tokens=3, engine_config=CONFIG)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_decides_whatever_the_batch(model: Any) -> None:
    ids = random_ids(1, 6).repeat(3, 1)
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 12, "engine_config": CONFIG}
    together = sc.generate(model, ids, seed=40, **options)
    assert len({tuple(row) for row in together.tolist()}) == 3
    assert torch.equal(sc.generate(model, ids[:1], seed=42, **options)[0], together[2])
    assert torch.equal(sc.generate(model, ids, seed=[42, 41, 40], **options), together.flip(0))


def test_sampling_follows_the_distribution_of_generate(model: Any) -> None:
    """4,000 draws of one token among the four likeliest, against their probabilities."""
    ids, draws = random_ids(1, 6), 4000
    result = sc.generate(
        model,
        ids.repeat(draws, 1),
        do_sample=True,
        top_k=4,
        temperature=2.0,
        max_new_tokens=1,
        seed=0,
        engine_config=CONFIG,
    )
    logits = reference_logits(model, ids[0].tolist(), [0])[0] / 2.0
    likeliest = logits.topk(4)
    expected = likeliest.values.softmax(0) * draws
    seen = torch.stack([(result[:, -1] == token).sum() for token in likeliest.indices])
    assert int(seen.sum()) == draws
    # 16.27 is the 0.1 % point of chi-square with 3 degrees of freedom.
    assert float(((seen - expected) ** 2 / expected).sum()) < 16.27


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models and configurations that were compiled."""
    calls: list[Any] = []
    original = kept_engines.compile_step_program

    def counted(model: nn.Module, config: EngineConfig) -> Any:
        calls.append(config)
        return original(model, config)

    monkeypatch.setattr(kept_engines, "compile_step_program", counted)
    return calls


def test_engine_is_kept_and_grows_without_compiling_again(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG)
    engine = ENGINES.engine_for(model, CONFIG, [1])
    # Two requests of 6 + 3 tokens in blocks of 4.
    assert engine.stats().blocks_max == 6
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    assert ENGINES.engine_for(model, CONFIG, [1]) is engine
    result = sc.generate(model, ids, max_new_tokens=30, engine_config=CONFIG)
    assert ENGINES.engine_for(model, CONFIG, [1]).stats().blocks_max == 18
    assert torch.equal(result, model.generate(ids, max_new_tokens=30))
    assert len(compiled) == 1


def test_configured_pool_is_taken_as_it_is(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(4, 6)
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=64, token_budget=8)
    result = sc.generate(model, ids, max_new_tokens=40, engine_config=config)
    stats = ENGINES.engine_for(model, config, [1]).stats()
    assert stats.blocks_max == 16
    assert stats.preemptions > 0
    assert torch.equal(result, model.generate(ids, max_new_tokens=40))
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    assert compiled == [config, CONFIG]


def test_weights_are_those_of_the_moment(compiled: list[Any]) -> None:
    """Changed in place; moved to another dtype; a layer replaced by one of the same shape."""
    model, ids = tiny(), random_ids(2, 6)
    options = {"max_new_tokens": 6, "engine_config": CONFIG}
    before = sc.generate(model, ids, **options)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = sc.generate(model, ids, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(ids, max_new_tokens=6))
    assert len(compiled) == 1
    model.lm_head = nn.Linear(64, 199, bias=False)
    assert torch.equal(sc.generate(model, ids, **options), model.generate(ids, max_new_tokens=6))
    assert len(compiled) == 2
    model.to(torch.bfloat16)
    assert sc.generate(model, ids, **options).shape == (2, 12)
    assert len(compiled) == 3


def test_weights_changed_through_data_between_calls_are_seen() -> None:
    """PyTorch counts no such change; keys and values of the call before are not reused for the same prompt."""
    model, ids = tiny(), random_ids(2, 13)
    options = {"max_new_tokens": 6, "engine_config": CONFIG}
    before = sc.generate(model, ids, **options)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(-3)
    after = sc.generate(model, ids, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(ids, max_new_tokens=6))


def test_first_call_in_inference_mode_does_not_spoil_the_next(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    with torch.inference_mode():
        inside = sc.generate(model, ids, max_new_tokens=5, engine_config=CONFIG)
    assert torch.equal(sc.generate(model, ids, max_new_tokens=5, engine_config=CONFIG), inside)
    assert len(compiled) == 1


def test_model_is_freed_with_its_engine() -> None:
    model = tiny()
    sc.wrap(model, CONFIG)
    model.generate(random_ids(1, 6), max_new_tokens=2)
    gone, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    gc.collect()  # the engine has cycles of its own, and goes after the model
    assert gone() is None
    assert weight() is None


def everything(model: nn.Module) -> dict[str, Any]:
    """What there is to see of a model object, by identity where it has one."""
    return {
        name: {key: id(value) for key, value in vars(module).items()} | {"forward": module.forward.__func__}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("how", ["generate", "wrapped", "backend", "explain"])
def test_model_object_is_as_before(how: str) -> None:
    """Attributes, forward, configuration, attention implementation, weights, gradients."""
    model, ids = tiny(), random_ids(2, 6)
    torch.compile(model, backend="eager")  # leaves a mark of its own on every module
    before, config = everything(model), copy.deepcopy(model.config.to_dict())
    weights = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = gradients_of(model, ids)
    if how == "generate":
        sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG)
    elif how == "wrapped":
        with sc.wrapped(model, CONFIG):
            model.generate(ids, max_new_tokens=3)
    elif how == "backend":
        with torch.no_grad():
            torch.compile(model, backend="selective", options={"inductor": False})(ids)
    else:
        sc.explain(model)
    assert everything(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == weights[name][0]
        assert torch.equal(tensor, weights[name][1])
    for name, gradient in gradients_of(model, ids).items():
        assert torch.equal(gradient, gradients[name]), name


def gradients_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of one training step's loss; the model is left in evaluation mode and without gradients."""
    with torch.enable_grad():
        model.train()(ids, labels=ids).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.eval()
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def test_wrapped_generate_is_that_of_the_engine(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    theirs = model.generate(ids, max_new_tokens=5)
    assert sc.wrap(model, CONFIG) is model
    assert torch.equal(model.generate(ids, max_new_tokens=5), theirs)
    assert torch.equal(model.generate(ids, GenerationConfig(max_new_tokens=5)), theirs)
    assert torch.equal(model.generate(inputs=ids, max_new_tokens=5), theirs)
    # `generate` takes the configuration that the model was wrapped with, and the same engine.
    assert torch.equal(sc.generate(model, ids, max_new_tokens=5), theirs)
    assert compiled == [CONFIG]
    with pytest.raises(ValueError, match="must not be wrapped already"):
        sc.wrap(model)
    assert sc.unwrap(model) is model
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5), theirs)
    assert len(compiled) == 1
    with pytest.raises(ValueError, match="model must be wrapped"):
        sc.unwrap(model)
    with pytest.raises(ValueError, match="with a generate method, got Linear"):
        sc.wrap(nn.Linear(2, 2))


def test_wrapped_ends_with_its_block_and_keeps_a_generate_put_there_before() -> None:
    model = tiny()

    def own(*_: Any, **__: Any) -> str:
        return "own"

    model.generate = own
    with pytest.raises(OSError), sc.wrapped(model, CONFIG) as same:
        assert same is model
        assert model.generate(random_ids(1, 4), max_new_tokens=2).shape == (1, 6)
        raise OSError
    assert model.generate is own


def test_copies_of_a_wrapped_model_are_wrapped_themselves() -> None:
    model, ids = tiny(), random_ids(2, 6)
    theirs = model.generate(ids, max_new_tokens=5)
    sc.wrap(model, CONFIG)
    model.generate(ids, max_new_tokens=5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert torch.equal(twin.generate(ids, max_new_tokens=5), theirs)
        sc.unwrap(twin)
        assert "generate" not in vars(twin)
        model.lm_head.weight.data.copy_(twin.lm_head.weight)
    sc.unwrap(model)


def test_calls_from_several_threads_share_the_engine(model: Any) -> None:
    prompts = [random_ids(1, length, seed=length) for length in range(4, 12)]

    def call(ids: Tensor) -> Tensor:
        return sc.generate(model, ids, max_new_tokens=10, engine_config=CONFIG)

    call(random_ids(8, 20))  # room for all of them, so that nobody brings a larger pool
    with ThreadPoolExecutor(max_workers=len(prompts)) as executor:
        results = list(executor.map(call, prompts))
    for ids, result in zip(prompts, results, strict=True):
        assert torch.equal(result, model.generate(ids, max_new_tokens=10))
    assert_idle(model)


@pytest.mark.parametrize("do_sample", [False, True])
def test_wrapped_model_in_a_pipeline(do_sample: bool) -> None:
    """Greedy: the text of the model itself. Sampling is the pipeline's default."""
    model = tiny(vocab_size=byte_tokenizer.VOCAB_SIZE)
    model.generation_config = GenerationConfig(
        bos_token_id=byte_tokenizer.BOS, eos_token_id=byte_tokenizer.EOS, pad_token_id=byte_tokenizer.PAD
    )
    texts = ["12+7=", "one two three", "a"]
    options = {"max_new_tokens": 10, "do_sample": do_sample}

    def run(**more: Any) -> Any:
        pipe = pipeline("text-generation", model=model, tokenizer=byte_tokenizer.build(), device="cpu", **more)
        torch.manual_seed(3)
        plain = [pipe(texts, **options), pipe("", **options), pipe(texts, return_full_text=False, **options)]
        return [*plain, pipe("a", stop_sequence=plain[0][2][0]["generated_text"][3], **options)]

    theirs = run()
    with sc.wrapped(model, CONFIG):
        ours = run()
        batched = run(batch_size=3)
    if do_sample:
        assert len(ours[0]) == 3 and len(ours) == 4
        assert all(result[0]["generated_text"].startswith(text) for result, text in zip(ours[0], texts, strict=True))
    else:
        assert ours == theirs
        assert batched == theirs


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_generate_of_a_compiled_model_gives_the_same_tokens(family: str) -> None:
    """Its graphs carry a Hugging Face cache: they run as they came."""
    model = tiny(family)
    ids, mask = left_padded()
    before = model.generate(ids, attention_mask=mask, max_new_tokens=8)
    model.compile(backend="selective", options={"inductor": False})
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8), before)
    assert torch.equal(sc.generate(model, ids, attention_mask=mask, max_new_tokens=8, engine_config=CONFIG), before)


def test_generate_takes_a_compiled_model(model: Any) -> None:
    ids, mask = left_padded()
    fast = torch.compile(model, backend="selective", options={"inductor": False})
    result = sc.generate(fast, ids, attention_mask=mask, max_new_tokens=4, engine_config=CONFIG)
    assert torch.equal(result, model.generate(ids, attention_mask=mask, max_new_tokens=4))


FRESH = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)).eval()
ids, mask = torch.arange(22).view(2, 11), torch.ones(2, 11, dtype=torch.int64)
mask[0, :4] = 0
assert "selective_compile" not in sys.modules
fast = torch.compile(model, backend="selective", options={"inductor": False})
with torch.no_grad():
    difference = (fast(ids, attention_mask=mask).logits - model(ids, attention_mask=mask).logits)[mask.bool()]
assert difference.abs().max() < MARGIN, difference
from selective_compile import selective
assert selective.reports[-1].ok, selective.reports[-1]
"""


@pytest.mark.slow
def test_backend_by_name_in_a_fresh_process(tmp_path: Path) -> None:
    """By its entry point; where the package is not installed, by a copy of what an install would write."""
    environment = {**os.environ, "PYTHONPATH": ""}
    if "selective" not in entry_points(group="torch_dynamo_backends").names:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        info = tmp_path / f"selective_compile-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: selective-compile\nVersion: {project['version']}\n"
        )
        ((group, points),) = project["entry-points"].items()
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    code = FRESH.replace("MARGIN", repr(MARGIN))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
