"""A model that prepares the inputs of `generate` in its own way runs whole, and gives the tokens of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import selective_compile as sc
from selective_compile.handed_inputs import handed_refusal
from tests.models import FAMILIES, shallow, tiny
from tests.oracle import generated_alone

PROMPTS = [[5, 7, 9], [8], [3, 1, 4, 1, 5, 9, 2, 6]]


class OtherPositions(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs | {"position_ids": inputs["position_ids"] * 3 + 5}


class OtherIds(GPT2LMHeadModel):
    def prepare_inputs_for_generation(self, input_ids: Any, is_first_iteration: Any = False, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        return inputs | {"input_ids": (inputs["input_ids"] + 1) % self.config.vocab_size}


class OtherLater(LlamaForCausalLM):
    """Only what it hands on from step to step is its own."""

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> dict[str, Any]:
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return updated | {"position_ids": updated["position_ids"] + 7}


class WithoutMask(LlamaForCausalLM):
    """`generate` takes no attention mask for it."""

    def prepare_inputs_for_generation(self, input_ids: Any, **others: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **others)
        return inputs | {"position_ids": inputs["position_ids"] + 9}


def test_a_model_that_takes_no_mask_in_generate_is_looked_at_too() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    model.__class__ = WithoutMask
    refusal = handed_refusal(model)
    assert refusal is not None and "position_ids" in refusal.reason


SEPARATOR = 77


class AnewBehindSeparators(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        places = torch.arange(input_ids.shape[1])[None]
        positions = places - torch.where(input_ids == SEPARATOR, places, 0).cummax(1).values
        return inputs | {"position_ids": positions[:, -inputs["input_ids"].shape[1] :]}


class HidesSeparators(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs | {"attention_mask": input_ids.ne(SEPARATOR).long()}


class WantsSeparator(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        input_ids[0].tolist().index(SEPARATOR)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs


class TellsTypes(GPT2LMHeadModel):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        types = (input_ids == SEPARATOR).cumsum(1).clamp(max=1)
        return inputs | {"token_type_ids": types[:, -inputs["input_ids"].shape[1] :]}


@pytest.mark.parametrize(
    ("kind", "family", "name"),
    [
        (AnewBehindSeparators, "llama", "position_ids"),
        (HidesSeparators, "llama", "attention_mask"),
        (WantsSeparator, "llama", "inputs"),
        (TellsTypes, "gpt2", "token_type_ids"),
    ],
)
def test_what_depends_on_one_id_is_seen(kind: type, family: str, name: str) -> None:
    model: Any = tiny(family, **shallow(family))
    model.__class__ = kind
    refusal = handed_refusal(model)
    assert refusal is not None and f"other {name} than" in refusal.reason
    assert sc.explain(model).verdict == "sequential" or name == "inputs"


def test_what_adds_nothing_is_handed_every_id() -> None:
    class Same(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    model: Any = tiny("llama", num_hidden_layers=1)
    model.__class__ = Same
    assert handed_refusal(model) is None


@pytest.mark.parametrize(
    ("kind", "family", "name"),
    [(OtherPositions, "llama", "position_ids"), (OtherIds, "gpt2", "input_ids"), (OtherLater, "llama", "position_ids")],
)
def test_other_inputs_are_refused_by_name_and_run_whole(kind: type, family: str, name: str) -> None:
    model: Any = tiny(family, **shallow(family))
    model.__class__ = kind
    refusal = handed_refusal(model)
    assert refusal is not None and f"other {name} than" in refusal.reason
    assert sc.explain(model).verdict == "sequential"
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    requests = [engine.submit(prompt, max_new_tokens=5) for prompt in PROMPTS]
    alone = [generated_alone(model, prompt, 5) for prompt in PROMPTS]
    assert [list(request.result().tokens) for request in requests] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_of_transformers_own_are_the_tokens(family: str) -> None:
    model: Any = tiny(family, **shallow(family))
    assert handed_refusal(model) is None
    model.config.use_cache = model.generation_config.use_cache = False
    assert handed_refusal(model) is None
    with torch.no_grad():
        assert model(torch.tensor([[1, 2]])).logits.shape[1] == 2
