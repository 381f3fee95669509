"""Hidden states, attentions and caches that `sc.generate` returns, against those of `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from selective_compile.generate_states import CACHE

CONFIG = sc.EngineConfig(compile=False)
RETURNS = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
WIDTH = 9


def gemma() -> Any:
    """With a window shorter than the prompts."""
    config = Gemma2Config(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def gpt2() -> Any:
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_implementation="eager")
    return GPT2LMHeadModel(config)


MODELS = {"gemma": gemma, "gpt2": gpt2}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return MODELS[request.param]().eval()


def rows() -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (3, WIDTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_they_equal_those_of_generate(model: Any, case: str) -> None:
    """All of them, at the positions of real tokens; `model.generate` computes the others too."""
    arguments = {**rows(), "max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0, **RETURNS, **CASES[case]}
    ours = sc.generate(model, engine_config=CONFIG, **arguments)
    theirs = model.generate(**arguments)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
    beams = CASES[case].get("num_beams", 1)
    real = rows()["attention_mask"].bool().repeat_interleave(beams, dim=0)
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == len(theirs[name]) == 7
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert len(mine) == len(other) >= 2
            for layer, wanted in zip(mine, other, strict=True):
                assert layer.shape == wanted.shape
                if layer.shape[-2] >= WIDTH:  # a step that computes the prompt, padding included
                    layer, wanted = (each.movedim(-2, 1)[:, :WIDTH][real] for each in (layer, wanted))
                assert torch.allclose(layer, wanted, atol=1e-5)
    assert (getattr(ours, CACHE) is None) == (getattr(theirs, CACHE) is None) == (case == "without cache")
    if getattr(ours, CACHE) is not None:
        for mine, other in zip(getattr(ours, CACHE).layers, getattr(theirs, CACHE).layers, strict=True):
            assert mine.keys.shape == other.keys.shape and torch.allclose(mine.values[0], other.values[0], atol=1e-5)


def test_rows_that_end_and_searches_that_end_keep_their_place() -> None:
    """The states of a row are those of its own tokens, whatever the others do."""
    torch.manual_seed(3)
    model = gpt2().eval()
    arguments = {**rows(), "max_new_tokens": 8, "pad_token_id": 0, **RETURNS}
    free = sc.generate(model, engine_config=CONFIG, eos_token_id=None, **arguments)
    end = int(free.sequences[0, WIDTH + 2])
    for beams in (1, 2):
        asked = {**arguments, "eos_token_id": end, "num_beams": beams, "early_stopping": True}
        found = sc.generate(model, engine_config=CONFIG, **asked)
        theirs = model.generate(**asked)
        assert torch.equal(found.sequences, theirs.sequences)
        steps = len(found.hidden_states)
        assert steps == len(theirs.hidden_states) > 3
        for row in range(3 * beams):
            alone = [
                torch.allclose(a[-1][row], b[-1][row], atol=1e-5) or not a[-1][row].any()
                for a, b in zip(found.hidden_states[1:], theirs.hidden_states[1:], strict=True)
            ]
            assert all(alone), (beams, row, alone)


def test_prompts_padded_on_the_right_are_returned_as_if_on_the_left() -> None:
    torch.manual_seed(3)
    model = gpt2().eval()
    left = rows()
    order = [*range(4, WIDTH), *range(4)]
    right = {name: each.clone() for name, each in left.items()}
    for each in right.values():
        each[1] = each[1][order]
    found, wanted = (
        sc.generate(model, engine_config=CONFIG, max_new_tokens=4, pad_token_id=0, eos_token_id=None, **each, **RETURNS)
        for each in (right, left)
    )
    assert torch.equal(found.sequences[:, WIDTH:], wanted.sequences[:, WIDTH:])
    for mine, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_wrapped_model_returns_them_and_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    model = gpt2().eval()
    with sc.wrapped(model, CONFIG):
        found = model.generate(rows()["input_ids"], max_new_tokens=3, eos_token_id=None, pad_token_id=0, **RETURNS)
        assert "generate" in vars(model)
    assert len(found.attentions) == 3 and getattr(found, CACHE).get_seq_length() == WIDTH + 2
    # Asked for by itself, of the class that is asked for.
    asked = {"use_cache": True, "cache_implementation": "static", "return_dict_in_generate": True, "max_new_tokens": 3}
    found = sc.generate(model, **rows(), eos_token_id=None, pad_token_id=0, engine_config=CONFIG, **asked)
    cache = getattr(found, CACHE)
    theirs = getattr(model.generate(**rows(), eos_token_id=None, pad_token_id=0, **asked), CACHE)
    assert type(cache) is type(theirs) and cache.layers[0].keys.shape == theirs.layers[0].keys.shape
    plain = sc.generate(model, rows()["input_ids"], max_new_tokens=3, output_hidden_states=True, engine_config=CONFIG)
    assert isinstance(plain, Tensor), "without return_dict_in_generate nothing else is returned, as there"


def test_refused_before_anything_runs() -> None:
    torch.manual_seed(3)
    model = gpt2().eval()
    with pytest.raises(ValueError, match="output_hidden_states must be False for a list of prompts"):
        sc.generate(model, [[1, 2], [3]], engine_config=CONFIG, **RETURNS)
    with pytest.raises(ValueError, match="'output_hidden_states' must be False or None, got True.*sc.generate"):
        sc.Engine(model, CONFIG).submit([1, 2], output_hidden_states=True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="output_attentions must be False for a model with 'sdpa' attention"):
        sc.generate(model, torch.tensor([[1, 2]]), engine_config=CONFIG, **RETURNS)


def test_arguments_of_forward_that_change_nothing() -> None:
    torch.manual_seed(3)
    model = gpt2().eval()
    inputs = rows()
    wanted = sc.generate(model, max_new_tokens=4, pad_token_id=0, engine_config=CONFIG, **inputs)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    given = {"position_ids": positions, "logits_to_keep": 0, "output_router_logits": True}
    assert torch.equal(
        sc.generate(model, max_new_tokens=4, pad_token_id=0, engine_config=CONFIG, **inputs, **given), wanted
    )
    for name, value, message in (
        ("position_ids", positions + 1, "must number the tokens of each row from 0"),
        ("position_ids", positions[:2], r"must have shape \[3, 9\]"),
        ("logits_to_keep", -1, "must be an integer of at least 0"),
        ("output_router_logits", 1, "must be True, False or None, got"),
    ):
        with pytest.raises(ValueError, match=f"{name} {message}"):
            sc.generate(model, engine_config=CONFIG, **inputs, **{name: value})
    with pytest.raises(ValueError, match="position_ids must be None for a list of prompts"):
        sc.generate(model, [[1, 2]], engine_config=CONFIG, position_ids=positions)


@pytest.mark.parametrize("asked", [{"use_cache": True}, {"output_hidden_states": True}], ids=str)
def test_beams_of_a_model_with_a_cache_of_its_own_kind(asked: dict[str, Any]) -> None:
    model: Any = random_model("xlnet")
    ids = torch.tensor([[7, 8, 9, 10]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "num_beams": 2, **asked}
    options["return_dict_in_generate"] = True
    found = sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **options)
    expected = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(getattr(found, CACHE)) == len(getattr(expected, CACHE))
    for ours, theirs in zip(getattr(found, CACHE), getattr(expected, CACHE), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("option", [{"max_attention_window": 4}, {"kv_dtype": "int8"}, {"weights": "int8"}], ids=str)
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions", "use_cache"])
def test_an_engine_that_computes_otherwise_returns_none(option: dict[str, Any], asked: str) -> None:
    """They are those of the model's own loop, of which its tokens did not come."""
    call = {
        "inputs": torch.tensor([[1, 2, 3]]),
        "max_new_tokens": 3,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    config = sc.EngineConfig(compile=False, **option)
    with pytest.raises(ValueError, match=f"{asked} must be left out with EngineConfig.{next(iter(option))}="):
        sc.generate(gpt2().eval(), **call, engine_config=config, **{asked: True})
    assert sc.generate(gpt2().eval(), **call, engine_config=config).sequences.shape == (1, 6)
    embeds = torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match="return_dict_in_generate must be left out with"):
        sc.generate(gpt2().eval(), **call | {"inputs": None, "inputs_embeds": embeds}, engine_config=config)
