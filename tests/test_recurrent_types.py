"""Types of transformers whose layers are recurrences, and nothing that can be read off a graph: ragged, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from selective_compile.model_recurrences import recurrences_of
from tests.exactness import TOLERANCE, engine_error, greatest

# Heads of Mamba-2 models of 130 and 370 million parameters: of some numbers values grow to nearly the end of float32.
HEADS = (16, 24, 32)
FAMILIES = {"minimax": "linear attention", "xlstm": "mlstm"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_recurrences_of_a_type_are_ragged_and_go_on_as_in_generate(model_type: str) -> None:
    model: Any = random_model(model_type)
    report = sc.explain(model)
    assert report.verdict == "ragged", str(report)
    assert {call.family for call in report.recurrences} == {FAMILIES[model_type]}
    assert engine_error(model, vocabulary=101) < TOLERANCE
    prompts = [torch.randint(1, 101, (length,), generator=torch.Generator().manual_seed(length)) for length in (3, 50)]
    config = sc.EngineConfig(compile=False)
    found = sc.generate(model, prompts, max_new_tokens=6, do_sample=False, engine_config=config)
    for prompt, row in zip(prompts, found, strict=True):
        assert row.tolist() == model.generate(prompt[None], max_new_tokens=6, do_sample=False)[0].tolist()


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next"])
def test_under_autocast_they_are_ragged_too(model_type: str) -> None:
    model: Any = random_model(model_type)
    ids = torch.randint(1, 101, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounding = greatest(model(ids).logits - plain)
            assert engine_error(model, vocabulary=101) < 2 * rounding


@pytest.mark.parametrize("heads", HEADS)
def test_scans_are_known_whatever_the_number_of_heads(heads: int) -> None:
    sizes = {
        "num_heads": heads,
        "head_dim": 8,
        "hidden_size": 4 * heads,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
    }
    config = AutoConfig.for_model("mamba2", vocab_size=101, num_hidden_layers=1, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert {place.name: known.family.name for place, known in recurrences_of(model).items()} == {
        "mamba2_chunk_scan": "ssd"
    }
