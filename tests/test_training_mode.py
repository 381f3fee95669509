"""Models that are in training mode when they are asked for tokens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

import selective_compile as sc
from selective_compile.generate_requests import ENGINES
from selective_compile.training_mode import differs_in_training, evaluated
from tests.huggingface.models import CONFIG, random_ids, tiny


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_that_computes_the_same_is_served_in_steps_and_left_as_it_was(checkpointing: bool) -> None:
    model, ids = tiny().train(), random_ids(3, 6)
    model.model.norm.eval()
    if checkpointing:
        model.gradient_checkpointing_enable()
    before, expected = modes(model), model.generate(ids, max_new_tokens=5)
    assert len(set(before)) == 2
    with sc.wrapped(model, CONFIG):
        for _ in range(2):
            assert torch.equal(model.generate(ids, max_new_tokens=5), expected)
            assert modes(model) == before
        with evaluated(model):
            assert ENGINES.engine_for(model, CONFIG, [1]).stats().steps == 10


def test_steps_of_training_between_calls_are_seen() -> None:
    model, plain, ids = tiny().train(), tiny().train(), random_ids(3, 6)
    for _ in range(4):
        found = []
        for each in (model, plain):
            with sc.wrapped(each, CONFIG) if each is model else torch.no_grad():
                found.append(each.generate(ids, max_new_tokens=5))
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            each(found[-1], labels=found[-1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*found)


@pytest.mark.parametrize("place", ["module", "function"])
def test_dropout_that_drops_is_that_of_the_models_own_generate(place: str) -> None:
    if place == "module":
        model: Any = tiny("gpt2", resid_pdrop=0.5).train()
    else:
        model = tiny(attention_dropout=0.5).train()
    ids = random_ids(3, 6)
    torch.manual_seed(5)
    expected = model.generate(ids, max_new_tokens=6)
    torch.manual_seed(5)
    assert torch.equal(sc.generate(model, ids, max_new_tokens=6, engine_config=CONFIG), expected)
    assert model.training
    with pytest.raises(ValueError, match="model must be in evaluation mode, got training mode"):
        sc.generate(model, ids.tolist(), max_new_tokens=6, engine_config=CONFIG)


def test_dropout_is_there_whatever_other_threads_do_meanwhile() -> None:
    model, ids = tiny(attention_dropout=0.5), random_ids(2, 6)
    plain = model.generate(ids, max_new_tokens=6)
    model.train()
    found: list[Tensor] = []

    def ask() -> None:
        for _ in range(6):
            found.append(sc.generate(model, ids, max_new_tokens=6, engine_config=CONFIG))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 18 and not any(torch.equal(each, plain) for each in found) and all(modes(model))


def test_layers_that_are_left_out_by_chance_are() -> None:
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 2}
    config = OPTConfig(vocab_size=199, num_hidden_layers=4, layerdrop=0.2, **sizes, **none)
    model, ids = OPTForCausalLM(config).train(), random_ids(2, 6)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = model.generate(ids, max_new_tokens=6, eos_token_id=None)
        torch.manual_seed(seed)
        assert torch.equal(sc.generate(model, ids, max_new_tokens=6, eos_token_id=None, engine_config=CONFIG), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_module_in_training_mode_of_a_model_that_is_not_counts(dropout: float) -> None:
    model, ids = tiny(attention_dropout=dropout), random_ids(2, 6)
    model.model.layers[0].train()
    before = modes(model)
    torch.manual_seed(3)
    expected = model.generate(ids, max_new_tokens=6)
    torch.manual_seed(3)
    assert torch.equal(sc.generate(model, ids, max_new_tokens=6, engine_config=CONFIG), expected)
    assert modes(model) == before


def test_models_that_share_modules_hold_them_together() -> None:
    model = tiny().train()
    around = nn.Sequential(model)
    with evaluated(model):
        with evaluated(around):
            assert not any(modes(around)[1:])
        assert not any(modes(model))
    assert all(modes(model))


class Counts(nn.Module):
    """Adds nothing, counts its runs, and draws."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.runs = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.seen += x.shape[1]
        return x + self.noise * torch.randn_like(x) if self.training and self.noise else x


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_the_trial_leaves_behind_is_gone(noise: float) -> None:
    model = tiny().train()
    model.model.norm = nn.Sequential(model.model.norm, Counts(noise))
    counts: Any = model.model.norm[1]
    state = torch.get_rng_state()
    assert differs_in_training(model) is (noise > 0)
    assert counts.runs == 0 and counts.seen == 0 and torch.equal(torch.get_rng_state(), state) and all(modes(model))


def test_the_mode_comes_back_with_the_last_of_several_calls() -> None:
    model = tiny().train()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with evaluated(model):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with pytest.raises(KeyError), evaluated(model):
        raise KeyError
    assert not any(modes(model))
    with evaluated(model):  # begun where the model is in evaluation mode by another call
        leave.set()
        thread.join()
        assert not any(modes(model))
    thread.join()
    assert all(modes(model))
