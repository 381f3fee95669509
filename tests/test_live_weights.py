"""What a compiled graph reads of the live model, while several engines look."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile import live_weights
from selective_compile.backend import compile_step_program
from selective_compile.tensor_state import states
from tests.decoders import Decoder
from tests.models import tiny

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=512)


def test_what_an_earlier_look_has_found_is_not_put_in_the_place_of_a_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines share a program, and a weight is replaced while the first of them looks the tensors up."""
    model = Decoder(layers=1)
    weights = compile_step_program(model, CONFIG).weights  # type: ignore[union-attr]
    looking, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        if threading.current_thread() is first:
            looking.set()
            assert go_on.wait(10)
        return states(*given)

    monkeypatch.setattr(live_weights, "states", slow)
    first, second = threading.Thread(target=weights.version), threading.Thread(target=weights.version)
    first.start()
    assert looking.wait(10)
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    second.start()
    second.join(0.1)
    go_on.set()
    first.join(10)
    second.join(10)
    tensors, seen = weights.seen
    assert any(tensor is model.head.weight for tensor in tensors) and seen.hold(tensors)


class Tripled(torch.Tensor):
    """A weight whose class makes another function of linear layers."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result * 3 if function is nn.functional.linear else result


def test_a_weight_of_another_class_is_told_by_an_engine_and_is_compiled_anew_for_generate() -> None:
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.15)
    ids = torch.tensor([[1, 5, 7]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    engine = sc.Engine(model, CONFIG)
    before = sc.generate(model, ids, engine_config=CONFIG, **options)
    linear = model.model.layers[0].mlp.up_proj
    linear._parameters["weight"] = linear.weight.detach().as_subclass(Tripled)
    told = engine.submit([1, 5, 7], max_new_tokens=4).result().error
    assert (
        told is not None
        and "the class of 'model.layers.0.mlp.up_proj.weight' must stay Tensor, as compiled, got Tripled" in told
    )
    expected = model.generate(ids, **options)
    assert not torch.equal(expected, before)
    assert torch.equal(sc.generate(model, ids, engine_config=CONFIG, **options), expected)
