"""What an engine refuses to serve: no language model, or a program of another."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModel, AutoModelForTokenClassification

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.sequential_program import SequentialProgram
from tests.models import tiny
from tests.runtime.simulated import simulated_engine

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=256)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForTokenClassification])
def test_a_model_without_a_language_models_head_is_refused(kind: type[AutoModel]) -> None:
    model = kind.from_config(tiny("llama", num_hidden_layers=1).config).eval()
    with pytest.raises(ValueError, match="model must have a language model's head, .* got Llama"):
        sc.Engine(model, CONFIG)
    report = sc.explain(model)
    assert report.verdict == "refused" and "must have a language model's head" in str(report)


def test_a_program_of_another_model_is_refused() -> None:
    model, other = (tiny("llama", num_hidden_layers=1, seed=seed) for seed in (0, 1))
    for program in (compile_step_program(model, CONFIG), SequentialProgram(model, ())):
        with pytest.raises(ValueError, match="program must be that of the model, got one of another LlamaForCausalLM"):
            sc.Engine(other, CONFIG, program=program)
        assert sc.Engine(model, CONFIG, program=program).submit([5, 6], max_new_tokens=2).result().error is None


def test_what_is_no_program_is_refused() -> None:
    program: Any = 3
    with pytest.raises(ValueError, match=r"program must be one of compile_step_program\(model, config\), got 3"):
        sc.Engine(tiny("llama", num_hidden_layers=1), CONFIG, program=program)


def test_what_cannot_be_called_is_no_observer() -> None:
    observer: Any = "x"
    with pytest.raises(ValueError, match="observer must be callable, got 'x'"):
        simulated_engine(observers=[observer])
    with pytest.raises(ValueError, match="observer must be callable, got 'x'"):
        simulated_engine().add_observer(observer)
