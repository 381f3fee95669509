"""The model object is as it was; wrapping it, and undoing that."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

import selective_compile as sc
from tests.huggingface.models import CONFIG, random_ids, tiny


def everything(model: nn.Module) -> dict[str, Any]:
    """What there is to see of a model object, by identity where it has one."""
    return {
        name: {key: id(value) for key, value in vars(module).items()} | {"forward": module.forward.__func__}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("how", ["generate", "wrapped", "backend", "explain"])
def test_model_object_is_as_before(how: str) -> None:
    """Attributes, forward, configuration, attention implementation, weights, gradients."""
    model, ids = tiny(), random_ids(2, 6)
    torch.compile(model, backend="eager")  # leaves a mark of its own on every module
    before, config = everything(model), copy.deepcopy(model.config.to_dict())
    weights = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = gradients_of(model, ids)
    if how == "generate":
        sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG)
    elif how == "wrapped":
        with sc.wrapped(model, CONFIG):
            model.generate(ids, max_new_tokens=3)
    elif how == "backend":
        with torch.no_grad():
            torch.compile(model, backend="selective", options={"inductor": False})(ids)
    else:
        sc.explain(model)
    assert everything(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == weights[name][0]
        assert torch.equal(tensor, weights[name][1])
    for name, gradient in gradients_of(model, ids).items():
        assert torch.equal(gradient, gradients[name]), name


def gradients_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Of one training step's loss; the model is left in evaluation mode and without gradients."""
    with torch.enable_grad():
        model.train()(ids, labels=ids).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.eval()
    return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


def test_wrapped_generate_is_that_of_the_engine(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    theirs = model.generate(ids, max_new_tokens=5)
    assert sc.wrap(model, CONFIG) is model
    assert torch.equal(model.generate(ids, max_new_tokens=5), theirs)
    assert torch.equal(model.generate(ids, GenerationConfig(max_new_tokens=5)), theirs)
    assert torch.equal(model.generate(inputs=ids, max_new_tokens=5), theirs)
    # `generate` takes the configuration that the model was wrapped with, and the same engine.
    assert torch.equal(sc.generate(model, ids, max_new_tokens=5), theirs)
    assert compiled == [CONFIG]
    with pytest.raises(ValueError, match="must not be wrapped already"):
        sc.wrap(model)
    assert sc.unwrap(model) is model
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5), theirs)
    assert len(compiled) == 1
    with pytest.raises(ValueError, match="model must be wrapped"):
        sc.unwrap(model)
    with pytest.raises(ValueError, match="must be a torch.nn.Module, got NoneType"):
        sc.unwrap(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with a generate method, got Linear"):
        sc.wrap(nn.Linear(2, 2))


def test_wrapped_ends_with_its_block_and_keeps_a_generate_put_there_before() -> None:
    model = tiny()

    def own(*_: Any, **__: Any) -> str:
        return "own"

    model.generate = own
    with pytest.raises(OSError), sc.wrapped(model, CONFIG) as same:
        assert same is model
        assert model.generate(random_ids(1, 4), max_new_tokens=2).shape == (1, 6)
        raise OSError
    assert model.generate is own


def test_copies_of_a_wrapped_model_are_wrapped_themselves() -> None:
    model, ids = tiny(), random_ids(2, 6)
    theirs = model.generate(ids, max_new_tokens=5)
    sc.wrap(model, CONFIG)
    model.generate(ids, max_new_tokens=5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        assert torch.equal(twin.generate(ids, max_new_tokens=5), theirs)
        sc.unwrap(twin)
        assert "generate" not in vars(twin)
        model.lm_head.weight.data.copy_(twin.lm_head.weight)
    sc.unwrap(model)
