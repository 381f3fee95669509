"""Functions of `generate` that a model has of its own are tried, or of transformers and about no tokens, or refused."""

from __future__ import annotations

import functools
import gc
import logging
import types
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessorList, MaxLengthCriteria
from transformers.models.clvp.modeling_clvp import ClvpForCausalLM

import selective_compile as sc
from selective_compile.own_generation import FOLDER, FUNCTIONS, REPLACED, TRIED, is_of_transformers, unlike_transformers
from selective_compile.runtime import StepError
from tests.models import tiny

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=256)
IDS = torch.arange(1, 7)[None]


class Stopping(LlamaForCausalLM):
    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_stopping_criteria(*args, **kwargs)
        found.append(MaxLengthCriteria(8))
        return found


class Masking(LlamaForCausalLM):
    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._prepare_attention_mask_for_generation(*args, **kwargs)


class Preparing(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


class Another(LlamaForCausalLM):
    """With a loop of its own, that takes other arguments."""

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int = 20, temperature: float = 1.0) -> Any:
        raise NotImplementedError


class Ignoring(LlamaForCausalLM):
    """With one that takes whatever it is given, and runs the model."""

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        return self(inputs).logits.argmax(-1)


class Asking(Another):
    """That Dynamo does not trace, so that it runs whole."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        if (input_ids == 5).sum() > 1000:
            input_ids = input_ids + 1
        return super().forward(input_ids, **kwargs)


class Dropping(Another):
    """That knows no cache of transformers', as where a loop of its own keeps keys and values in another form."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids)


class AskingAndDropping(Dropping):
    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids + ((input_ids == 5).sum() > 1000 and 1))


class Older(Asking):
    """Prepares its inputs by a function that does not know what transformers hands it today."""

    def prepare_inputs_for_generation(self, input_ids: Any, past_key_values: Any = None) -> Any:
        return {"input_ids": input_ids}


def of_class(kind: type) -> Any:
    model: Any = tiny("llama", attention="eager", num_hidden_layers=1)
    model.__class__ = kind
    return model


def generated(model: Any) -> torch.Tensor:
    return sc.generate(model, IDS, max_new_tokens=6, engine_config=CONFIG)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Stopping, "_get_stopping_criteria"), (Masking, "_prepare_attention_mask_for_generation")],
)
def test_what_an_engine_does_in_its_place_is_refused_by_name(kind: type, name: str) -> None:
    with pytest.raises(
        ValueError, match=f"must generate as transformers does, got {kind.__name__} with its own {name}"
    ):
        generated(of_class(kind))


@pytest.mark.parametrize("kind", [Stopping, Preparing])
def test_an_engine_says_what_it_does_not_call(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "selective_compile"):
        sc.Engine(of_class(kind), CONFIG)
    said = "Stopping has its own _get_stopping_criteria, which an engine does not call"
    assert (said in caplog.messages) == (kind is Stopping)


def test_of_the_object_too_and_under_a_name_that_is_borrowed() -> None:
    model = of_class(LlamaForCausalLM)
    model._get_logits_processor = lambda *args, **kwargs: LogitsProcessorList()
    assert unlike_transformers(model) == "_get_logits_processor"
    del model._get_logits_processor
    original = GenerationMixin._prepare_model_inputs
    model._prepare_model_inputs = functools.wraps(original)(lambda *args, **kwargs: original(model, *args, **kwargs))
    assert unlike_transformers(model) == "_prepare_model_inputs"
    del model._prepare_model_inputs
    assert unlike_transformers(model) is None


def test_what_trials_run_is_tried_and_not_refused() -> None:
    model = of_class(Preparing)
    assert unlike_transformers(model) is None
    assert torch.equal(generated(model), model.generate(IDS, max_new_tokens=6))


def test_classes_of_transformers_may_take_other_inputs_than_tokens() -> None:
    assert unlike_transformers(ClvpForCausalLM.__new__(ClvpForCausalLM)) is None


def test_a_package_whose_name_begins_alike_is_another() -> None:
    code = (lambda: None).__code__
    kept = types.FunctionType(code.replace(co_filename=str(FOLDER / "models" / "any.py")), {})
    other = types.FunctionType(code.replace(co_filename=f"{FOLDER}_modules/any.py"), {})
    assert is_of_transformers(kept) and not is_of_transformers(other)


def test_the_names_are_transformers() -> None:
    assert {*REPLACED, *TRIED} <= {*FUNCTIONS}


def other(self: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    found = LlamaForCausalLM.prepare_inputs_for_generation(self, ids, **kwargs)
    if found["input_ids"].shape[1] == 1:
        found["input_ids"] = (found["input_ids"] + 1) % 97
    return found


@pytest.mark.parametrize("of_the_class", (False, True))
def test_what_steps_are_prepared_by_is_watched(of_the_class: bool) -> None:
    model = of_class(type("Changing", (LlamaForCausalLM,), {}))
    engine = sc.Engine(model, CONFIG)
    first = generated(model)
    assert torch.equal(first, model.generate(IDS, max_new_tokens=6))
    if of_the_class:
        type(model).prepare_inputs_for_generation = other
    else:
        model.prepare_inputs_for_generation = types.MethodType(other, model)
    found = generated(model)
    assert torch.equal(found, model.generate(IDS, max_new_tokens=6)) and not torch.equal(found, first)
    request = engine.submit(IDS[0].tolist(), max_new_tokens=2)
    with pytest.raises(StepError, match="prepare.* must stay "):
        engine.step()
    assert request.finish_reason == "error"


def test_it_keeps_no_model() -> None:
    model = of_class(LlamaForCausalLM)
    model.prepare_inputs_for_generation = types.MethodType(LlamaForCausalLM.prepare_inputs_for_generation, model)
    program = sc.Engine(model, CONFIG)._program
    alive = weakref.ref(model)
    watched = program.weights._tried
    del model, program
    gc.collect()
    assert watched and alive() is None


@pytest.mark.parametrize("value", (2, -1, 0.5))
def test_masks_are_of_0_and_1(value: float) -> None:
    mask = torch.ones(IDS.shape)
    mask[0, 3] = value
    with pytest.raises(ValueError, match=f"attention_mask must be of 0 and 1, got {value}"):
        sc.generate(of_class(LlamaForCausalLM), IDS, attention_mask=mask, engine_config=CONFIG)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        *[(Another, "ragged"), (Ignoring, "ragged"), (Asking, "sequential")],
        *[(Dropping, "ragged"), (AskingAndDropping, "sequential")],
    ],
)
def test_an_engine_serves_a_model_with_a_loop_of_its_own(kind: type, verdict: str) -> None:
    wanted = generated(of_class(LlamaForCausalLM))[0, IDS.shape[1] :].tolist()
    model = of_class(kind)
    assert sc.explain(model).verdict == verdict
    engine = sc.Engine(model, CONFIG)
    with engine.running():
        assert list(engine.submit(IDS[0].tolist(), max_new_tokens=6).result().tokens) == wanted


def test_a_model_that_cannot_run_whole_either_is_refused() -> None:
    model = of_class(Older)
    assert sc.explain(model).verdict == "refused"
    with pytest.raises(sc.RefusedError, match="nor can generate run it: TypeError: .*unexpected keyword"):
        sc.Engine(model, CONFIG)
