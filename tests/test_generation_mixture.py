"""Thirty-two requests, no two alike and of every kind, that come over time: each is what it is by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig, WatermarkingConfig

import selective_compile as sc
from selective_compile.backend import Program
from selective_compile.runtime.request_result import RequestResult
from selective_compile.tiny_model.tokenizer import EOS
from tests.generation_rows import TEXTS, EndsAfter, Shifted, allowed, biases, letters
from tests.shipped import shipped

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=4096)
SEED = 7
Served = tuple[Any, Any, Program]

WARM: Mapping[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0}


def different(rng: Random, model: Any, tokenizer: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """The configurations by name; each is made anew where it is used, since objects may keep a state."""
    ends = [EOS, *letters(rng, 40)]
    biased = biases(rng)
    banned = [letters(rng, 2) for _ in range(100)]
    return {
        "greedy": dict,
        "repetition": lambda: {"repetition_penalty": 1.7, "eos_token_id": ends},
        "no n-gram again": lambda: {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3},
        "biased": lambda: {"sequence_bias": biased, "bad_words_ids": banned},
        "forced": lambda: {"forced_bos_token_id": 65, "forced_eos_token_id": EOS, "min_new_tokens": 3},
        "suppressed": lambda: {"suppress_tokens": [32, 51, 52], "begin_suppress_tokens": [49, 50], "logprobs": True},
        "decay": lambda: {"exponential_decay_length_penalty": (2, 1.8), "eos_token_id": [EOS, 53]},
        "temperature": lambda: dict(WARM),
        "top-k": lambda: {**WARM, "top_k": 5, "output_scores": True},
        "top-p": lambda: {**WARM, "top_p": 0.8, "processed_logprobs": True, "top_logprobs": 2},
        "min-p": lambda: {**WARM, "min_p": 0.05, "repetition_penalty": 0.7},
        "typical": lambda: {**WARM, "typical_p": 0.7},
        "cutoffs": lambda: {**WARM, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
        "top-h": lambda: {**WARM, "top_h": 0.6, "renormalize_logits": True},
        "samples": lambda: {**WARM, "top_k": 20, "num_return_sequences": 3},
        "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
        "SynthID": lambda: {
            **WARM,
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 7, 5]),
        },
        "guided": lambda: {"guidance_scale": 1.6},
        "guided away": lambda: {**WARM, "guidance_scale": 0.7, "negative_prompt_ids": torch.tensor([[97, 98, 50]])},
        "prefixes": lambda: {"prefix_allowed_tokens_fn": allowed(1)},
        "stop strings": lambda: {"stop_strings": ["5 6", "7\n", " e"], "tokenizer": tokenizer},
        "processor": lambda: {"logits_processor": [Shifted(3.0)], "output_logits": True},
        "sampled processor": lambda: {**WARM, "top_p": 0.9, "logits_processor": [Shifted(-4.0)]},
        "criterion": lambda: {"stopping_criteria": [EndsAfter(3)]},
        "regex": lambda: {"regex": "[0-9]{2,5} [a-c]+", "tokenizer": tokenizer},
        "schema": lambda: {**WARM, "json_schema": {"type": "object"}, "tokenizer": tokenizer},
        "lookup": lambda: {"prompt_lookup_num_tokens": 4, "prompt_logprobs": True},
        "first layers": lambda: {**WARM, "temperature": 0.7, "assistant_early_exit": 2},
        "assistant": lambda: {"assistant_model": model, "num_assistant_tokens": 3},
        "beams": lambda: {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.4, "eos_token_id": ends},
        "sampled beams": lambda: {**WARM, "num_beams": 2, "early_stopping": True, "output_scores": True},
        "guided beams": lambda: {"num_beams": 3, "guidance_scale": 1.3, "no_repeat_ngram_size": 2},
    }


@pytest.fixture(scope="module")
def served() -> Served:
    return shipped()


def assert_same(found: RequestResult, alone: RequestResult, name: str) -> None:
    assert (found.tokens, found.finish_reason, found.error) == (alone.tokens, alone.finish_reason, None), name
    for kept in ("scores", "logits"):
        ours, theirs = getattr(found, kept), getattr(alone, kept)
        assert (ours is None) == (theirs is None), name
        for mine, other in zip(ours or (), theirs or (), strict=True):
            assert torch.allclose(mine, other, atol=1e-4), (name, kept)
    for kept in ("logprobs", "processed_logprobs", "prompt_logprobs"):
        assert getattr(found, kept) == pytest.approx(getattr(alone, kept), abs=1e-4), (name, kept)
    for mine, other in zip(found.hypotheses or (), alone.hypotheses or (), strict=True):
        assert (mine.tokens, mine.beam_indices) == (other.tokens, other.beam_indices), name
        assert mine.score == pytest.approx(other.score, abs=1e-4), name


def test_each_of_thirty_two_different_requests_is_what_it_is_by_itself(served: Served) -> None:
    model, tokenizer, program = served
    rng = Random(SEED)
    kinds = different(rng, model, tokenizer)
    assert len(kinds) == 32
    cases = [(name, tokenizer(rng.choice(TEXTS)).input_ids, rng.randint(8, 12)) for name in kinds]
    rng.shuffle(cases)
    sizes = {"token_budget": 24, "block_size": 2, "max_kv_tokens": 96}
    engine = sc.Engine(model, sc.EngineConfig(**{**vars(CONFIG), **sizes}), program=program)
    handles, most = {}, 0
    for number, (name, ids, count) in enumerate(cases):
        handles[name] = engine.submit(ids, max_new_tokens=count, seed=number, **kinds[name]())
        if rng.random() < 0.3:
            engine.step()
            engine._scheduler.check()
            most = max(most, engine.stats().running)
    together = {name: [each.result() for each in handle.samples] for name, handle in handles.items()}
    stats = engine.stats()
    assert most > 5 and stats.preemptions > 0 and stats.tokens_reused > 0 and stats.blocks_used == 0
    for number, (name, ids, count) in enumerate(cases):
        one = sc.Engine(model, CONFIG, program=program).submit(ids, max_new_tokens=count, seed=number, **kinds[name]())
        for found, sample in zip(together[name], one.samples, strict=True):
            assert_same(found, sample.result(), name)
    assert len({results[0].tokens for results in together.values()}) > 20, "they are different"
