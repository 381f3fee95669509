"""What `generate` is given: which of several holds, what is inferred, what is refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GenerationConfig, T5Config

import selective_compile as sc
from tests.huggingface.models import (
    CONFIG,
    EOS,
    PAD,
    Recorder,
    assert_idle,
    left_padded,
    random_ids,
    some_generated_token,
    tiny,
)


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


@pytest.mark.parametrize("pad", ["0", [3, 4], -2, True, 0.5])
def test_a_padding_id_is_an_integer(model: Any, pad: Any) -> None:
    with pytest.raises(ValueError, match="pad_token_id must be an integer of at least -1, got"):
        sc.generate(model, random_ids(2, 4), max_new_tokens=2, pad_token_id=pad, engine_config=CONFIG)


def test_a_padding_id_may_be_one_that_no_token_has(model: Any) -> None:
    ids = random_ids(1, 4)  # of more rows `model.generate` computes it
    options = {"max_new_tokens": 6, "eos_token_id": some_generated_token(model, ids), "pad_token_id": -1}
    assert torch.equal(sc.generate(model, ids, engine_config=CONFIG, **options), model.generate(ids, **options))


def test_a_row_of_padding_ids_says_so(model: Any) -> None:
    ids = torch.tensor([[5, 6], [PAD, PAD]])
    with pytest.raises(ValueError, match=f"input_ids must have a token beside the padding id {PAD} .* in row 1"):
        sc.generate(model, ids, max_new_tokens=2, pad_token_id=PAD, engine_config=CONFIG)


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


def test_fields_in_the_models_own_configuration_are_refused_as_by_generate(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(1, 4)
    monkeypatch.setattr(model.config, "temperature", 0.5, raising=False)
    for generate in (model.generate, partial(sc.generate, model, engine_config=CONFIG)):
        with pytest.raises(ValueError, match="temperature"):
            generate(input_ids=ids, max_new_tokens=2)
    given = GenerationConfig(max_new_tokens=2)
    assert torch.equal(sc.generate(model, ids, given, engine_config=CONFIG), model.generate(ids, given))


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


UNSUPPORTED: dict[str, Any] = {
    "synced_gpus": True,
    "trust_remote_code": True,
    "assistant_tokenizer": "a tokenizer",
    "cache": "a cache",
    "logprobs": True,
    "cache_implementation": "paged",
    "cu_seq_lens_q": torch.zeros(2),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_is_refused_by_name(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*must be .*got .*; .*(leave it out|give it|drafts without)"):
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, **{name: UNSUPPORTED[name]})
    assert_idle(model)


def test_labels_beside_a_batch_are_left_out_as_generate_does(model: Any) -> None:
    ids, mask = left_padded()
    arguments = {"attention_mask": mask, "labels": ids, "max_new_tokens": 3, "pad_token_id": 0}
    wanted = model.generate(ids, **arguments)
    assert torch.equal(sc.generate(model, ids, engine_config=CONFIG, **arguments), wanted)
    with sc.wrapped(model, CONFIG):
        assert torch.equal(model.generate(ids, **arguments), wanted)


def test_labels_of_a_model_that_takes_none_are_an_unknown_argument(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = type(model).forward

    def without_labels(self: Any, input_ids: Any = None, attention_mask: Any = None) -> Any:
        return forward(self, input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(type(model), "forward", without_labels)
    with pytest.raises(ValueError, match="argument of generate must be a known one, got 'labels'"):
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, labels=random_ids(1, 6))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_new_token", " where 'max_new_tokens' is one"),
        ("do_samples", " where 'do_sample' is one"),
        ("max_tokens", " where 'max_new_tokens' is one"),
        ("attention_masks", " where 'attention_mask' is one"),
        ("pixels", ""),
        ("config", ".*"),
        ("by_model", ".*"),
    ],
)
def test_a_name_that_nobody_knows_is_told_beside_the_one_that_is_meant(model: Any, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"^argument of generate must be a known one, got '{name}'{near}; known are "):
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, **{name: 3})
    assert torch.equal(
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, max_new_tokens=2, **{name: None}),
        sc.generate(model, random_ids(1, 6), engine_config=CONFIG, max_new_tokens=2),
    )


def test_what_is_no_configuration_of_an_engine_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="engine_config must be an EngineConfig or None, got {'a': 1}"):
        sc.generate(model, random_ids(1, 6), engine_config={"a": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="EngineConfig.record must be None in engine_config, got 'a.log'"):
        sc.generate(model, random_ids(1, 6), engine_config=sc.EngineConfig(record="a.log"))
    with pytest.raises(ValueError, match="config must be an EngineConfig or None, got 5"):
        sc.wrap(model, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": torch.ones(3, dtype=torch.int64)}, r"input_ids must have shape \[B, S\], got \[3\]"),
        ({"inputs": torch.ones(0, 3, dtype=torch.int64)}, r"input_ids must have shape \[B, S\]"),
        ({"inputs": torch.ones(1, 3)}, "input_ids must be integers, got torch.float32"),
        ({"inputs": torch.ones(1, 3, dtype=torch.int64, device="meta")}, "input_ids must hold token ids, got .* meta"),
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
        ({"inputs": [[1]], "seed": np.int64(-1)}, "seed must be an integer of at least 0"),
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
    with pytest.raises(ValueError, match="torch.nn.Module"):
        sc.generate("gpt2", ids)
    empty = tiny().to("meta")
    for call in (lambda: sc.generate(empty, ids), lambda: sc.explain(empty), lambda: sc.Engine(empty, CONFIG)):
        with pytest.raises(ValueError, match=r"must hold its weights, got .*embed_tokens.weight' on the device meta"):
            call()
    with pytest.raises(ValueError, match="must have a language model's head, as AutoModelForCausalLM gives it, got Ll"):
        sc.generate(tiny().model, ids)
    encoder_decoder = nn.Module()
    encoder_decoder.config = T5Config()
    with pytest.raises(ValueError, match="without an encoder"):
        sc.generate(encoder_decoder.eval(), ids)
