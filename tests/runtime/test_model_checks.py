"""What an engine refuses to serve: no language model, or a program of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForTokenClassification, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

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


class Older(LlamaPreTrainedModel):
    """As code for versions before 4.50, of which `PreTrainedModel` was a `GenerationMixin`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, use_cache: bool = False) -> Any:
        found = self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.output(found.last_hidden_state))


@torch.no_grad()
def test_a_model_with_a_head_needs_nothing_of_generate() -> None:
    wanted = tiny("llama", num_hidden_layers=1)
    model = Older(wanted.config).eval()
    model.model.load_state_dict(wanted.model.state_dict())
    model.output.weight.copy_(wanted.lm_head.weight)
    assert not model.can_generate() and sc.explain(model).verdict == "ragged"
    expected = wanted.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, eos_token_id=None)
    request = sc.Engine(model, CONFIG).submit([5, 6, 7], max_new_tokens=4)
    assert list(request.result().tokens) == expected[0, 3:].tolist() and request.error is None
    found = sc.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=4, engine_config=CONFIG)
    assert torch.equal(found, expected)


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
