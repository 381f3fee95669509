"""Random calls of `sc.generate` next to `model.generate`: how many sequences, what is returned, prompts and padding."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.generate_states import CACHE
from selective_compile.tiny_model.tokenizer import EOS, PAD
from tests.generation_rows import TEXTS, letters
from tests.test_generate_returns import CONFIG, dice

CALLS = 20  # of each kind
KEPT = ("output_scores", "output_logits")
STATES = ("output_hidden_states", "output_attentions")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    model, tokenizer = tiny_model.load()
    model.set_attn_implementation("eager")
    tokenizer.padding_side = "left"
    return model, tokenizer


def random_call(rng: Random, tokenizer: Any, kind: str) -> dict[str, Any]:
    call: dict[str, Any] = {"max_new_tokens": rng.randint(1, 8), "pad_token_id": rng.choice([PAD, PAD, 0, 32])}
    call["eos_token_id"] = rng.choice([None, EOS, [EOS, *letters(rng, 30)]])
    if rng.random() < 0.2:
        call["bos_token_id"] = rng.choice([65, 51, 99])
    else:
        found = tokenizer(rng.sample(TEXTS, rng.randint(1, 3)), return_tensors="pt", padding=True)
        call |= {"input_ids": found.input_ids, "attention_mask": found.attention_mask}
    asked = rng.random() < 0.8
    call |= {"return_dict_in_generate": asked, **{name: asked and rng.random() < 0.7 for name in KEPT}}
    if kind == "samples":
        call |= {"do_sample": True, "temperature": 2.0, "num_return_sequences": rng.randint(1, 4)}
    elif rng.random() < 0.6:
        beams = rng.randint(2, 4)
        call |= {"num_beams": beams, "num_return_sequences": rng.randint(1, beams)}
    if kind == "states":  # rows that have ended have none, which `tests/test_generate_states.py` looks at
        call |= {"return_dict_in_generate": True, "eos_token_id": None, "use_cache": rng.random() < 0.7}
        call |= {name: rng.random() < 0.7 for name in STATES}
    return call


@pytest.mark.parametrize("kind", ["samples", "searches", "states"])
def test_random_calls_equal_generate(loaded: tuple[Any, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    rng = Random(kind)
    for number in range(CALLS):
        call = random_call(rng, tokenizer, kind)
        ours = sc.generate(model, engine_config=CONFIG, seed=number, **call)
        with dice(number, monkeypatch):
            theirs = model.generate(**call)
        assert type(ours) is type(theirs), call
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs), call
            continue
        assert torch.equal(ours.sequences, theirs.sequences), call
        assert set(theirs) - set(ours) <= {CACHE} and set(ours) <= set(theirs), call
        assert_values_equal(ours, theirs, call)
        for name in {"hidden_states", "attentions"} & set(theirs):
            assert_states_equal(ours[name], theirs[name], call)


def assert_values_equal(ours: Any, theirs: Any, call: dict[str, Any]) -> None:
    """Scores of rows that have ended are left out: there they are computed with padding."""
    steps = theirs.sequences.shape[1] - (call["input_ids"].shape[1] if "input_ids" in call else 1)
    if "beam_indices" in theirs:
        assert torch.equal(ours.beam_indices, theirs.beam_indices), call
        if "sequences_scores" in theirs:
            assert torch.allclose(ours.sequences_scores, theirs.sequences_scores, atol=1e-4), call
    ends = call["eos_token_id"]
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])
    for name in {"scores", "logits"} & set(theirs):
        assert len(ours[name]) == len(theirs[name]), call
        ended = torch.zeros(len(theirs.sequences), dtype=torch.bool)
        for step, (mine, other) in enumerate(zip(ours[name], theirs[name], strict=True)):
            assert mine.shape == other.shape and mine.dtype == other.dtype, call
            if "beam_indices" not in theirs:
                mine, other = mine[~ended], other[~ended]
                ended |= torch.isin(theirs.sequences[:, step - steps], ends)
            elif step and len(ends):  # a search that has ended goes on there
                continue
            assert torch.allclose(mine, other, atol=1e-4), (name, step, call)


def assert_states_equal(ours: Any, theirs: Any, call: dict[str, Any]) -> None:
    """At the positions of real tokens."""
    mask = call.get("attention_mask", torch.ones(1, 1)).bool()
    rows = theirs[0][0].shape[0] // len(mask)
    real = mask.repeat_interleave(rows, dim=0)
    assert len(ours) == len(theirs), call
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other) >= 1
        for layer, wanted in zip(mine, other, strict=True):
            assert layer.shape == wanted.shape, call
            if layer.shape[-2] >= mask.shape[1] > 1:  # a step that computes the prompt, padding included
                layer, wanted = (each.movedim(-2, 1)[:, : mask.shape[1]][real] for each in (layer, wanted))
            assert torch.allclose(layer, wanted, atol=1e-4), call
