"""Generation options: what is implemented is read as `generate` reads it, all else is refused by name."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

from selective_compile.runtime.generation import GenerationParams, Served
from selective_compile.runtime.generation_fields import FIELDS, IMPLEMENTED, INSTEAD, NEUTRAL, WITHOUT_EFFECT
from selective_compile.runtime.generation_values import WHEN_SAMPLING
from tests.runtime.simulated import simulated_engine

VOCABULARY = 50


def resolve(
    config: GenerationConfig | None = None,
    model_config: GenerationConfig | None = None,
    prompt_length: int = 5,
    max_positions: int | None = None,
    **options: Any,
) -> GenerationParams:
    served = Served(config=model_config, max_positions=max_positions, vocab_size=VOCABULARY)
    return GenerationParams.resolve(config, options, served, prompt=range(prompt_length), default_seed=17)


class WantsMore(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any, more: Any) -> Any:
        return scores


def config_with(**fields: Any) -> GenerationConfig:
    """A configuration with these attributes, also with values that its own validation refuses."""
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_nothing_set_is_greedy_for_twenty_tokens() -> None:
    assert resolve() == GenerationParams(
        max_new_tokens=20,
        eos_token_ids=frozenset(),
        do_sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=17,
        logprobs=False,
    )


def test_request_comes_before_model_and_option_before_both() -> None:
    of_model = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, top_p=0.8, eos_token_id=[1, 2])
    params = resolve(GenerationConfig(temperature=0.7, top_k=9), of_model, top_k=3, seed=5, logprobs=True)
    assert (params.do_sample, params.temperature, params.top_k, params.top_p) == (True, 0.7, 3, 0.8)
    assert params.eos_token_ids == {1, 2}
    assert (params.seed, params.logprobs) == (5, True)
    assert not resolve(GenerationConfig(do_sample=False), of_model).do_sample


def test_sampling_without_top_k_keeps_fifty_as_generate_does() -> None:
    assert resolve(GenerationConfig(do_sample=True)).top_k == 50
    assert resolve(GenerationConfig(do_sample=True, top_k=0)).top_k == 0


def test_greedy_decoding_does_not_look_at_sampling_fields() -> None:
    assert resolve(config_with(temperature=0.0, top_k=-1, top_p=2.0)) == resolve()


@pytest.mark.parametrize(
    ("config", "of_model", "expected"),
    [
        ({"max_new_tokens": 3}, {}, 3),
        ({"max_length": 12}, {}, 7),
        ({"max_length": 12, "max_new_tokens": 3}, {}, 3),
        ({"max_length": 12}, {"max_new_tokens": 3}, 3),
        ({}, {"max_length": 6}, 1),
        ({"max_new_tokens": 30}, {}, 30),
        ({}, {}, 11),
    ],
)
def test_length(config: dict[str, Any], of_model: dict[str, Any], expected: int) -> None:
    """`max_positions` 16 caps nothing but the default of 20."""
    params = resolve(GenerationConfig(**config), GenerationConfig(**of_model), max_positions=16)
    assert params.max_new_tokens == expected


def test_a_watermark_as_a_dictionary() -> None:
    """As `generate` takes it of its own arguments."""
    processors = resolve(watermarking_config={"bias": 3.0, "greenlist_ratio": 0.4}).processors
    assert processors is not None and [each.bias for each in processors.processors] == [3.0]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integers_of_numpy_and_of_tensors(kind: Any) -> None:
    params = resolve(config_with(max_new_tokens=kind(3), do_sample=True, top_k=kind(5)), seed=kind(9))
    assert (params.max_new_tokens, params.top_k, params.seed) == (3, 5, 9)
    assert all(type(each) is int for each in (params.max_new_tokens, params.top_k, params.seed))


@pytest.mark.parametrize("value", [7, [7], torch.tensor([7]), torch.tensor(7)])
def test_end_of_sequence_ids_in_every_form(value: Any) -> None:
    assert resolve(config_with(eos_token_id=value)).eos_token_ids == {7}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.0},
        {"max_new_tokens": True},
        {"max_new_tokens": np.bool_(True)},
        {"max_new_tokens": torch.tensor(True)},
        {"max_new_tokens": torch.tensor([3, 4])},
        {"max_length": 5},
        {"max_length": -1},
        {"do_sample": "yes"},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"top_p": float("nan")},
        {"eos_token_id": 1.5},
        {"eos_token_id": ["a"]},
        {"eos_token_id": [10**400]},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 1.0},
        {"logprobs": 3},
        {"processed_logprobs": "yes"},
        {"top_logprobs": 2},
        {"min_p": 1.5},
        {"top_h": 0.0},
        {"typical_p": -1.0},
        {"epsilon_cutoff": 2.0},
        {"eta_cutoff": -1.0},
        {"repetition_penalty": 0},
        {"repetition_penalty": 10**400},
        {"guidance_scale": "a"},
        {"negative_prompt_ids": [[1], [2]]},
        {"negative_prompt_ids": "abc"},
        {"negative_prompt_attention_mask": []},
        {"encoder_repetition_penalty": -1.0},
        {"no_repeat_ngram_size": -1},
        {"encoder_no_repeat_ngram_size": 1.5},
        {"min_length": -1},
        {"min_new_tokens": True},
        {"forced_bos_token_id": -1},
        {"forced_bos_token_id": VOCABULARY},
        {"forced_eos_token_id": []},
        {"forced_eos_token_id": [1, VOCABULARY]},
        {"suppress_tokens": [1.5]},
        {"suppress_tokens": [10**400]},
        {"bad_words_ids": []},
        {"bad_words_ids": [[VOCABULARY]]},
        {"sequence_bias": {}},
        {"sequence_bias": {(VOCABULARY,): 1.0}},
        {"exponential_decay_length_penalty": [1]},
        {"exponential_decay_length_penalty": (1, "a")},
        {"exponential_decay_length_penalty": (1, 10**400)},
        {"watermarking_config": {"greenlist": 0.5}},
        {"max_time": -1.0},
        {"max_time": 10**400},
        {"stop_strings": ["a", ""]},
        {"stop_strings": 3},
        {"output_scores": 1},
        {"logits_processor": [3]},
        {"logits_processor": "a"},
        {"logits_processor": [WantsMore()]},
        {"stopping_criteria": 3},
        {"prefix_allowed_tokens_fn": [1]},
    ],
    ids=lambda fields: "-".join(map(str, fields)),  # the values may have an address in their names
)
def test_a_wrong_value_is_named(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=rf"^{name} must be .*got "):
        resolve(config_with(**{"do_sample": True, **fields}))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="tokenizer must be a tokenizer of transformers, got 5"):
        simulated_engine().submit([1], stop_strings="a", tokenizer=5)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_is_implemented_without_effect_or_refused_by_name(name: str) -> None:
    """Also those of a later transformers: the names come from the installed GenerationConfig."""
    config = config_with(**{name: "something"})
    if name in WITHOUT_EFFECT:
        assert resolve(config) == resolve()
    elif name in IMPLEMENTED:
        if name in WHEN_SAMPLING:
            config.do_sample = True
        with pytest.raises(ValueError, match="tokenizer" if name == "stop_strings" else name):
            resolve(config)
    else:
        with pytest.raises(ValueError, match=f"generation option '{name}' must be .*None, got 'something'"):
            resolve(config)
        with pytest.raises(ValueError, match=f"'{name}' .*from model.generation_config"):
            resolve(None, config)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_values_pass(name: str) -> None:
    for value in NEUTRAL[name]:
        assert resolve(config_with(**{name: value})) == resolve()


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], torch.tensor([1, 1]), object()])
def test_values_that_cannot_be_compared_are_refused_too(value: Any) -> None:
    with pytest.raises(ValueError, match="'output_attentions' must be False or None"):
        resolve(config_with(output_attentions=value))


def test_the_defaults_that_generate_fills_in_are_neutral() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filled = GenerationConfig(**GenerationConfig._get_default_generation_params())
    filled.max_length = None
    assert resolve(filled) == resolve()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="known one, got 'max_tokens' where 'max_new_tokens' is one; known .*top_k"):
        resolve(max_tokens=3)
    with pytest.raises(ValueError, match="got 'max_tokens'"):
        resolve(max_tokens=None)
    with pytest.raises(ValueError, match="got 'max_tokens'"):
        resolve(config_with(max_tokens=3))
    with pytest.raises(ValueError, match="got '_from_model_config'"):
        resolve(_from_model_config=True)


def test_names_of_a_models_makers_are_passed_over() -> None:
    of_model = config_with(chat_format="chatml", max_new_tokens=4)
    assert resolve(None, of_model).max_new_tokens == 4
    copied = copy.deepcopy(of_model)
    copied.max_new_tokens = 6
    assert resolve(copied, of_model).max_new_tokens == 6
    copied.chat_format = "other"
    with pytest.raises(ValueError, match="got 'chat_format'"):
        resolve(copied, of_model)


def test_seed_may_stand_in_the_configuration() -> None:
    assert resolve(GenerationConfig(seed=8)).seed == 8


def test_none_turns_off_what_the_configurations_set() -> None:
    of_model = GenerationConfig(do_sample=True, top_k=5, min_p=0.5, repetition_penalty=1.5, eos_token_id=3)
    off = resolve(None, of_model, top_k=None, min_p=None, repetition_penalty=None, eos_token_id=None, seed=None)
    assert off == resolve(do_sample=True, top_k=0)
    assert not resolve(None, of_model, do_sample=None).do_sample


def test_what_is_refused_says_what_to_do_instead() -> None:
    refused = FIELDS - IMPLEMENTED - WITHOUT_EFFECT
    assert set(INSTEAD) & FIELDS == refused
    for name in refused:
        with pytest.raises(ValueError, match=re.escape(INSTEAD[name])):
            resolve(config_with(**{name: "something"}))


def test_a_value_that_transformers_refuses_is_refused_with_the_request() -> None:
    for fields in ({"bad_words_ids": ["a"]}, {"sequence_bias": {(1,): 2}}, {"sequence_bias": [[[1], "a"]]}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            resolve(config_with(**fields))
    with pytest.raises(ValueError, match="eos_token_id must be set for exponential_decay_length_penalty"):
        resolve(exponential_decay_length_penalty=(3, 1.5))


def test_something_else_than_a_configuration() -> None:
    with pytest.raises(ValueError, match="generation_config must be a transformers.GenerationConfig, got"):
        resolve({"max_new_tokens": 3})


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("forced_bos_token_id", {"forced_bos_token_id": 0, "suppress_tokens": [0, 3]}),
        ("forced_eos_token_id", {"forced_eos_token_id": [7, 3], "suppress_tokens": torch.tensor([3, 7])}),
    ],
)
def test_a_token_must_be_left_where_one_is_forced(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{name} must have a token that is not among suppress_tokens"):
        resolve(config_with(**fields))
    less = {**fields, "suppress_tokens": [3]}
    assert resolve(config_with(**less))


def test_n_grams_longer_than_the_prompt_take_no_memory() -> None:
    processors = resolve(config_with(encoder_no_repeat_ngram_size=10**6)).processors
    assert processors is not None and processors.processors[0].ngram_size == 6
