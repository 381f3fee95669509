"""In 16 bits the engine is no further from the float32 model than Hugging Face's own forward in them is."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import selective_compile as sc
from selective_compile.backend import compile_step_program, report_of
from selective_compile.coverage.random_model import random_model
from selective_compile.coverage.recorder import Recorder
from selective_compile.isolation import prove
from tests.models import BIASED_OWN, LATENT_OWN, REPEATED_OWN, VOCABULARY, tiny
from tests.oracle import reference_logits

ALLOWED = 1.1
CONFIG = sc.EngineConfig(compile=False, token_budget=64, max_kv_tokens=16 * 60)


# Which give logits in float32, and two of them what their scans return, whatever they compute in.
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 4, "chunk_size": 8},
}


CASES = [(family, torch.bfloat16) for family in ("llama", "gemma2", "gpt2", *LATENT_OWN, *REPEATED_OWN, *BIASED_OWN)]
CASES += [(family, torch.float16) for family in ("llama", *REPEATED_OWN, *BIASED_OWN)]


@pytest.mark.parametrize("family, dtype", CASES)
def test_error_against_float32(family: str, dtype: torch.dtype) -> None:
    assert_no_further(tiny(family, num_hidden_layers=4) if family == "llama" else tiny(family), dtype)


@pytest.mark.parametrize("family", RECURRENT)
def test_error_of_recurrences_against_float32(family: str) -> None:
    torch.manual_seed(0)
    sizes = RECURRENT[family] | {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    model.generation_config.eos_token_id = None
    assert_no_further(model)


@pytest.mark.parametrize("family", ["gpt_neo", "openai-gpt", "flint"])
def test_error_of_scores_in_float32_or_hidden_by_few_bits_against_float32(family: str) -> None:
    """Queries and keys cast up, which are kept as they were; -10,000, of which bfloat16 has -9,984 alone."""
    model: Any = random_model(family)
    model.generation_config.eos_token_id = None
    assert_no_further(model)


@pytest.mark.parametrize("family", ["longcat_flash", "minimax"])
def test_rounding_that_chooses_an_expert_is_no_departure(family: str) -> None:
    """Of a loop over experts that is proved, and of modules that run by themselves beside experts."""
    verdict = sc.explain(random_model(family).to(torch.bfloat16)).verdict
    assert verdict == ("ragged" if family == "longcat_flash" else "isolated")


class Blended(nn.Module):
    """Attention, and beside it the lesser of each two tokens: with a cache it goes on by one token alone."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        before = hidden_states[:, :1] * 0.0  # behind zeros that are none of a token it would be a shift, and ragged
        if cache is not None:
            kept = vars(cache).setdefault("before", {})
            if hidden_states.shape[1] == 1:
                before = kept.get(self.attention.layer_idx, before)
            kept[self.attention.layer_idx] = hidden_states[:, -1:]
        pairs = torch.stack([torch.cat([before, hidden_states[:, :-1]], dim=1), hidden_states], dim=-1)
        mixed, *others = self.attention(hidden_states=hidden_states, cache=cache, **kwargs)
        return mixed + pairs.median(-1).values, *others


def test_what_is_wrong_where_parts_begin_is_no_rounding() -> None:
    """In few rows of a trial, but in the first ones of parts."""
    model: Any = tiny("llama", num_hidden_layers=2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    for layer in model.model.layers:
        layer.self_attn = Blended(layer.self_attn)
    assert prove(model.to(torch.bfloat16), "sequential").mode == "one new token"


def assert_no_further(exact: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Over about 500 rows of logits of 16 requests, chunked and batched."""
    model = copy.deepcopy(exact).to(dtype)
    rounded = copy.deepcopy(model).float()  # the same weights, computed with in float32
    program: Any = compile_step_program(model, CONFIG)
    assert report_of(program, model).verdict == "ragged"
    recorder = Recorder(program)
    engine = sc.Engine(model, CONFIG, program=recorder, observers=[recorder.observe])
    draw = random.Random(1)
    longest = min(80, (program.max_positions or 112) - 32)
    prompts = [[draw.randrange(program.known_ids) for _ in range(draw.randint(5, longest))] for _ in range(16)]
    requests = [engine.submit(p, GenerationConfig(max_new_tokens=32), request_id=i) for i, p in enumerate(prompts)]
    ours, theirs = 0.0, 0.0
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        tokens = request.result().tokens
        truth = reference_logits(rounded, prompt, tokens)
        ours += float((torch.stack(recorder.logits[number]).float() - truth).square().sum())
        theirs += float((reference_logits(model, prompt, tokens) - truth).square().sum())
    assert ours**0.5 <= ALLOWED * theirs**0.5
