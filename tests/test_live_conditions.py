"""What a forward may ask of a model besides plain attributes, and what an engine does when the answer is another."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile.capture import capture
from tests.test_live_settings import PROMPTS, RAGGED, alone, ours, small, told

SCALE = 1.5
TOTAL = {"scale": 1.5}  # whose name ends as Dynamo's for what is local


def multiplied(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Options:
    scale = 1.5

    def __init__(self) -> None:
        self.given = self._hooks_scale = 1.5

    @property
    def doubled(self) -> float:
        return self.given * 2


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.5


def times(factor: float) -> Any:
    def multiplied(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def change(new: float) -> None:
        nonlocal factor
        factor = new

    multiplied.change = change  # type: ignore[attr-defined]
    return multiplied


class Asking(nn.Module):
    """A layer that multiplies by what it asks for, in one way."""

    def __init__(self, layer: nn.Module, config: Any, ask: Any) -> None:
        super().__init__()
        self.layer, self.ask = layer, ask
        self.config = config
        self.options, self.slots = Options(), Slots()
        self.adapters = {"a": SimpleNamespace(scale=1.5)}
        self.listed = [SimpleNamespace(scale=1.5)]
        self.functions, self.layers = [torch.tanh], [nn.Tanh()]
        self.queue = deque([1.5])
        self.tensors = {"a": torch.tensor(1.5)}
        self.array = np.array([1.5], dtype=np.float32)
        self.number = np.sqrt(2)
        self.times = times(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ask(self, self.layer(x))


# What is asked, and what changes the answer.
ASKED: dict[str, tuple[Any, Any]] = {
    "an attribute that may not be there": (
        lambda own, x: x * getattr(own, "scale", 1.5),
        lambda own: setattr(own, "scale", -3.0),
    ),
    "whether an attribute is there": (
        lambda own, x: x * -3 if hasattr(own, "scale") else x,
        lambda own: setattr(own, "scale", None),
    ),
    "whether the configuration has a field": (
        lambda own, x: x * own.config.own_scale if hasattr(own.config, "own_scale") else x,
        lambda own: setattr(own.config, "own_scale", -3.0),
    ),
    "whether an object has an attribute": (
        lambda own, x: x * -3 if hasattr(own.options, "extra") else x,
        lambda own: setattr(own.options, "extra", 1),
    ),
    "of an object what its class has": (
        lambda own, x: x * own.options.scale,
        lambda own: setattr(own.options, "scale", -3.0),
    ),
    "a property of an object": (
        lambda own, x: x * own.options.doubled,
        lambda own: setattr(own.options, "given", -3.0),
    ),
    "an object with slots": (lambda own, x: x * own.slots.scale, lambda own: setattr(own.slots, "scale", -3.0)),
    "an object in a dictionary": (
        lambda own, x: x * own.adapters["a"].scale,
        lambda own: setattr(own.adapters["a"], "scale", -3.0),
    ),
    "an object in a list": (
        lambda own, x: x * own.listed[0].scale,
        lambda own: setattr(own.listed[0], "scale", -3.0),
    ),
    "a function in a list": (
        lambda own, x: own.functions[0](x),
        lambda own: own.functions.__setitem__(0, torch.relu),
    ),
    "a module in a list": (lambda own, x: own.layers[0](x), lambda own: own.layers.__setitem__(0, nn.ReLU())),
    "how long a list is": (lambda own, x: x * len(own.functions), lambda own: own.functions.append(None)),
    "a queue": (lambda own, x: x * own.queue[0], lambda own: own.queue.__setitem__(0, -3.0)),
    "a tensor in a dictionary": (
        lambda own, x: x * own.tensors["a"],
        lambda own: own.tensors.__setitem__("a", torch.tensor(-3.0)),
    ),
    "an array": (
        lambda own, x: x * torch.from_numpy(own.array)[0],
        lambda own: own.array.__setitem__(0, -3.0),
    ),
    "a number of numpy": (lambda own, x: x / own.number, lambda own: setattr(own, "number", np.sqrt(8))),
    "an attribute of an object whose name is like that of torch's hooks": (
        lambda own, x: x * own.options._hooks_scale,
        lambda own: setattr(own.options, "_hooks_scale", -3.0),
    ),
    "what a function has closed over": (lambda own, x: own.times(x), lambda own: own.times.change(-3.0)),
    "a buffer that may not be there": (
        lambda own, x: x if own._buffers.get("late") is None else x * own._buffers["late"],
        lambda own: own.register_buffer("late", torch.tensor(-3.0)),
    ),
}


def asking(ask: Any) -> tuple[Any, Asking]:
    model = small()
    model.model.layers[0].mlp = own = Asking(model.model.layers[0].mlp, model.config, ask).eval()
    return model, own


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPTS[1]])).logits


@pytest.mark.parametrize("asked", ASKED)
def test_another_answer_is_seen(asked: str) -> None:
    ask, change = ASKED[asked]
    model, own = asking(ask)
    before, holds = logits(model), capture(model).holds_for(model)
    own.unread = own.options.unread = object()
    assert holds.change() == ""
    change(own)
    assert not torch.equal(logits(model), before)
    assert "as compiled, got" in holds.change()


def test_names_in_a_python_module_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = asking(lambda own, x: multiplied(x) * SCALE)
    holds = capture(model).holds_for(model)
    for name, other in (("SCALE", -3.0), ("multiplied", torch.relu)):
        assert holds.change() == ""
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], name, other)
            assert "must stay" in holds.change()


def test_a_table_in_a_python_module_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = asking(lambda own, x: x * TOTAL["scale"])
    holds = capture(model).holds_for(model)
    assert holds.change() == ""
    monkeypatch.setitem(TOTAL, "scale", -3.0)
    assert "TOTAL['scale'] must stay 1.5, as compiled, got -3.0" in holds.change()


def test_a_weight_that_there_was_none_of_is_seen() -> None:
    """Another weight in the place of one is read as it is, by the same graph."""
    model = small()
    before, holds = logits(model), capture(model).holds_for(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)
    assert holds.change() == ""
    model.lm_head.bias = nn.Parameter(torch.ones(model.config.vocab_size))
    assert not torch.equal(logits(model), before)
    assert "lm_head._parameters['bias'] must stay None, as compiled, got Parameter" in holds.change()


def test_another_answer_is_compiled_anew_by_the_next_call_and_refused_by_an_engine() -> None:
    ask, change = ASKED["a function in a list"]
    model, own = asking(ask)
    before = alone(model)
    engine = sc.Engine(model, RAGGED)
    assert ours(model) == before and told(engine) is None
    change(own)
    after = alone(model)
    assert after != before and ours(model) == after
    for _ in range(2):  # in no step behind the first refusal either
        assert "functions[0] must stay tanh, as compiled, got relu" in (told(engine) or "")


def test_a_start_from_a_kept_capture_knows_what_it_holds_for() -> None:
    ask, change = ASKED["whether the configuration has a field"]
    for _ in range(2):
        model, own = asking(ask)
        before = alone(model)
        assert ours(model) == before
    change(own)
    assert ours(model) == alone(model) != before


def test_nothing_is_compiled_anew_while_all_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = asking(ASKED["an object in a dictionary"][0])
    ours(model)
    own.unread = own.options.unread = object()
    monkeypatch.setattr("selective_compile.kept_engines.compile_step_program", None)
    ours(model)


NORM = nn.LayerNorm(64, elementwise_affine=False)
REPLACED = {
    "an activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "a layer by one around it": lambda model: setattr(
        model.model.layers[0], "mlp", nn.Sequential(model.model.layers[0].mlp, NORM)
    ),
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_a_module_without_weights_that_is_replaced_is_compiled_anew(replaced: str) -> None:
    model = small()
    before = alone(model)
    engine = sc.Engine(model, RAGGED)
    assert ours(model) == before
    REPLACED[replaced](model)
    after = alone(model)
    assert after != before and ours(model) == after == ours(model)
    assert "modules must stay those" in (told(engine) or "")


def test_what_it_says_names_what_changed_as_one_writes_it() -> None:
    model, own = asking(ASKED["an object in a dictionary"][0])
    holds = capture(model).holds_for(model)
    assert holds.change() == ""
    own.adapters["a"].scale = 4.0
    assert holds.change() == "model.model.layers.0.mlp.adapters['a'].scale must stay 1.5, as compiled, got 4.0"
    del own.adapters["a"]
    assert "as compiled, got" in holds.change()


def test_the_copy_that_reads_given_embeddings_follows_the_model() -> None:
    ask, change = ASKED["an attribute that may not be there"]
    model, own = asking(ask)
    rows = model.get_input_embeddings()(torch.tensor([PROMPTS[1]])).detach()

    def found() -> list[int]:
        return list(sc.generate(model, inputs_embeds=rows, max_new_tokens=6, engine_config=RAGGED)[0].tolist())

    def expected() -> list[int]:
        return list(model.generate(inputs_embeds=rows, max_new_tokens=6, do_sample=False)[0].tolist())

    before = expected()
    assert found() == before
    change(own)
    assert found() == expected() != before


def test_it_keeps_no_model() -> None:
    model, own = asking(ASKED["an object in a dictionary"][0])
    own.adapters["a"].back = model
    holds = capture(model).holds_for(model)
    alive = weakref.ref(own)
    del model, own
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None and holds.change() == ""
