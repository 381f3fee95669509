"""Types of transformers whose layers are recurrences, and nothing that can be read off a graph: ragged, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from tests.exactness import TOLERANCE, engine_error

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
