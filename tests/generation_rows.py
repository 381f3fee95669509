"""Random configurations for each field of generation that is said to equal `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig, WatermarkingConfig

from selective_compile.tiny_model.tokenizer import EOS

LETTERS = range(32, 123)  # what the model that ships is likely to write
TEXTS = ("12+7=", "count 3 to 9:", "letters c to j:", "the key is in", "spell word:", "3+4=7 and 5+", "aabab aab", "q")


def letters(rng: Random, most: int) -> list[int]:
    return rng.sample(LETTERS, rng.randint(1, most))


def sampled(**fields: Any) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, **fields}


def hot(rng: Random, **fields: Any) -> dict[str, Any]:
    """Warm enough for the filters to have something to take away."""
    return sampled(temperature=rng.uniform(1.0, 3.0), **fields)


class Shifted(LogitsProcessor):
    """A user's: what it adds depends on the tokens so far and on how often it was called."""

    def __init__(self, step: float) -> None:
        self.step, self.calls = step, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        bias = torch.arange(scores.shape[-1]) % 7 == (int(input_ids.sum()) + self.calls) % 7
        return scores + self.step * bias


def shifted(step: float) -> list[LogitsProcessor]:
    return [Shifted(step)]


class EndsAfter(StoppingCriteria):
    """A user's: the sequence is done once the sum of its ids is a multiple of a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.sum(-1) % self.number == 0


def allowed(wanted: int) -> Callable[[int, Tensor], list[int]]:
    return lambda row, ids: [token for token in LETTERS if (token + len(ids)) % wanted == row]


def biases(rng: Random) -> dict[tuple[int, ...], float]:
    single = {(token,): rng.uniform(-6, 6) for token in letters(rng, 20)}
    return {**single, **{tuple(letters(rng, 2)): rng.uniform(-6, 6) for _ in range(300)}}


ROWS: Mapping[str, Callable[[Random], dict[str, Any]]] = {
    "do_sample": lambda rng: rng.choice([sampled(), {"do_sample": True}, {"do_sample": False, "temperature": 0.3}]),
    "temperature": lambda rng: sampled(temperature=rng.uniform(0.3, 4.0)),
    "top_k": lambda rng: hot(rng, top_k=rng.choice([1, 2, 5, 40, 1000])),
    "top_p": lambda rng: hot(rng, top_p=rng.uniform(0.05, 1.0)),
    "min_p": lambda rng: hot(rng, min_p=rng.uniform(0.0, 0.5)),
    "top_h": lambda rng: hot(rng, top_h=rng.uniform(0.1, 1.0)),
    "typical_p": lambda rng: hot(rng, typical_p=rng.uniform(0.1, 1.2)),
    "epsilon_cutoff": lambda rng: hot(rng, epsilon_cutoff=rng.choice([0.0, 0.001, 0.02, 0.2])),
    "eta_cutoff": lambda rng: hot(rng, eta_cutoff=rng.choice([0.0, 0.001, 0.02, 0.2])),
    "repetition_penalty": lambda rng: {"repetition_penalty": rng.uniform(0.5, 3.0)},
    "encoder_repetition_penalty": lambda rng: {"encoder_repetition_penalty": rng.uniform(0.5, 3.0)},
    "no_repeat_ngram_size": lambda rng: {"no_repeat_ngram_size": rng.randint(0, 4)},
    "encoder_no_repeat_ngram_size": lambda rng: {"encoder_no_repeat_ngram_size": rng.randint(0, 3)},
    "bad_words_ids": lambda rng: {"bad_words_ids": [letters(rng, 2) for _ in range(200)]},
    "sequence_bias": lambda rng: {"sequence_bias": biases(rng)},
    "min_length": lambda rng: {"min_length": rng.randint(0, 25), "eos_token_id": [EOS, *letters(rng, 60)]},
    "min_new_tokens": lambda rng: {"min_new_tokens": rng.randint(0, 6), "eos_token_id": [EOS, *letters(rng, 60)]},
    "forced_bos_token_id": lambda rng: {"forced_bos_token_id": rng.choice(LETTERS)},
    "forced_eos_token_id": lambda rng: {"forced_eos_token_id": rng.choice([EOS, [rng.choice(LETTERS), EOS]])},
    "suppress_tokens": lambda rng: {"suppress_tokens": [*letters(rng, 60), 999]},
    "begin_suppress_tokens": lambda rng: {"begin_suppress_tokens": letters(rng, 90)},
    "exponential_decay_length_penalty": lambda rng: {
        "exponential_decay_length_penalty": (rng.randint(0, 3), rng.uniform(1.1, 3.0)),
        "eos_token_id": letters(rng, 4),
    },
    "watermarking_config": lambda rng: rng.choice(
        [
            sampled(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 7, 5])),
            {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
            {"watermarking_config": WatermarkingConfig(bias=rng.uniform(1, 6), greenlist_ratio=0.4)},
        ]
    ),
    "guidance_scale": lambda rng: {
        "guidance_scale": rng.uniform(0.5, 3.0),
        **rng.choice([{}, {"negative_prompt_ids": torch.tensor([letters(rng, 9)])}, {"use_cache": False}]),
    },
    "remove_invalid_values": lambda rng: {"remove_invalid_values": True, "suppress_tokens": letters(rng, 60)},
    "renormalize_logits": lambda rng: rng.choice([{}, hot(rng, top_k=9)]) | {"renormalize_logits": True},
    "eos_token_id": lambda rng: {"eos_token_id": rng.choice([EOS, [EOS, *letters(rng, 60)]])},
    "pad_token_id": lambda rng: {"pad_token_id": rng.choice(LETTERS), "eos_token_id": letters(rng, 60)},
    "max_new_tokens": lambda rng: {"max_new_tokens": rng.randint(1, 9)},
    "max_length": lambda rng: {"max_length": rng.randint(18, 24), "max_new_tokens": None},
    "stop_strings": lambda rng: {"stop_strings": [chr(rng.choice(LETTERS)) for _ in range(9)] + [" t", "ab", "7\n"]},
    "max_time": lambda rng: {"max_time": rng.choice([0, 1e-9, 1e9])},
    "prefix_allowed_tokens_fn": lambda rng: {"prefix_allowed_tokens_fn": allowed(rng.randint(1, 9))},
    "logits_processor": lambda rng: {
        **rng.choice([{}, hot(rng, top_p=0.8)]),
        "logits_processor": partial(shifted, rng.uniform(-5, 5)),
    },
    "stopping_criteria": lambda rng: {"stopping_criteria": [EndsAfter(rng.randint(2, 9))]},
    "use_cache": lambda rng: {"use_cache": rng.random() < 0.5},
    "cache_implementation": lambda rng: {"cache_implementation": rng.choice(["dynamic", "static"])},
    "beams that are one": lambda rng: {
        "num_beams": 1,
        "length_penalty": rng.uniform(-1, 2),
        "early_stopping": rng.choice([True, False, "never"]),
        "num_beam_groups": 1,
        "diversity_penalty": rng.uniform(0, 1),
    },
    "drafts that are none": lambda rng: {
        "num_assistant_tokens": rng.randint(1, 9),
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": rng.random(),
        "assistant_lookbehind": 3,
        "target_lookbehind": 3,
        "assistant_ensemble_weight": 0.5,
        "max_matching_ngram_size": 3,
    },
    "prompt_lookup_num_tokens": lambda rng: {
        "prompt_lookup_num_tokens": rng.randint(1, 9),
        "max_matching_ngram_size": rng.choice([None, 1, 3]),
        **rng.choice([{}, {"repetition_penalty": 0.6}, {"no_repeat_ngram_size": 3}]),
    },
    "assistant_early_exit": lambda rng: {
        "assistant_early_exit": rng.randint(1, 3),
        "num_assistant_tokens": rng.choice([None, 2, 7]),
        **rng.choice([{}, {"repetition_penalty": 0.6}, {"no_repeat_ngram_size": 3}]),
    },
    "caches of transformers": lambda rng: {
        "prefill_chunk_size": rng.randint(1, 9),
        "max_cache_len": 99,
        "cache_config": {"nbits": 4},
        "decoder_start_token_id": 3,
        "disable_compile": True,
        "low_memory": rng.choice([True, False]),
    },
}
