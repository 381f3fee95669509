"""Layers that Dynamo traces once: the graph is that of all of them, and a layer that is set otherwise is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from selective_compile import layers_once
from selective_compile.capture import Captured, capture, traced
from selective_compile.layers_once import KNOWN, NotAlikeError, marked, written_out
from selective_compile.passes.normalise import source_name
from tests.models import tiny

pytestmark = pytest.mark.skipif(not KNOWN, reason="this release of torch traces marked layers each for itself")
SMALL = {"hidden_size": 32, "intermediate_size": 48}
TURNS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny("llama", num_hidden_layers=5, **SMALL),
    # Each divides its scores by another number.
    "gpt2": lambda: tiny("gpt2", n_layer=5, scale_attn_by_inverse_layer_idx=True),
    "gemma3_text": lambda: tiny("gemma3_text", **TURNS, **SMALL),
}


@pytest.fixture
def written_outs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bodies were traced, for each capture that could be written out."""
    counts: list[int] = []

    def noted(module: Any, *others: Any) -> Any:
        result = written_out(module, *others)
        counts.append(sum(name.startswith("subgraph") for name, _ in module.named_children()))
        return result

    monkeypatch.setattr("selective_compile.capture.written_out", noted)
    return counts


def shown(captured: Captured) -> list[Any]:
    placeholders = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
    sources = {node: source_name(node) for node in placeholders}
    lines: list[Any] = sorted(sources.values())
    # What nothing reads is left out: sizes that were asked for.
    captured.module.graph.eliminate_dead_code()
    names: dict[Any, str] = dict(sources)
    for node in captured.module.graph.nodes:
        if node.op != "placeholder":
            names[node] = f"node {len(names)}"
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda given: names[given])
            lines.append((node.op, str(node.target), repr(arguments), layers_once.module_path(node)))
    return lines


@pytest.mark.parametrize(("name", "bodies"), [("llama", 1), ("gpt2", 5), ("gemma3_text", 1)])
def test_the_graph_is_that_of_all_layers(
    name: str, bodies: int, written_outs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    found = capture(model)
    assert written_outs == [bodies]
    monkeypatch.setattr(layers_once, "KNOWN", False)
    expected = capture(model)
    assert written_outs == [bodies]
    assert shown(found) == shown(expected)
    assert {id(value) for value in found.examples if isinstance(value, Tensor)} >= {id(p) for p in model.parameters()}
    assert found.max_tokens == expected.max_tokens and found.read.names >= expected.read.names
    assert found.read.code >= expected.read.code


def test_nothing_of_the_model_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run in another thread, as may others of its classes."""
    model = MODELS["llama"]()
    places = [vars(owner) for module in model.modules() for owner in (module, type(module))]
    before = [dict(place) for place in places]
    children = [dict(module._modules) for module in model.modules()]

    def looked_at(*arguments: Any) -> Captured:
        assert [dict(place) for place in places] == before
        assert [dict(module._modules) for module in model.modules()] == children
        return traced(*arguments)

    monkeypatch.setattr("selective_compile.capture.traced", looked_at)
    capture(model)


class Inner(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale, self.unread = nn.Linear(8, 8), scale, 0
        self.act: Any = partial(nn.functional.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) * self.scale


class Layer(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.inner = Inner(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Derived(Layer):
    """Inherits its forward."""


class Mixture(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(8))


class Stack(nn.Module):
    def __init__(self, kind: type[Layer] = Layer, count: int = 5) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(9, 8), nn.ModuleList(kind() for _ in range(count))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def with_marks(model: nn.Module) -> list[str]:
    before = {path: type(module) for path, module in model.named_modules()}
    return [path for path, module in marked(model).named_modules() if type(module) is not before[path]]


def test_only_layers_of_which_there_are_several_are_marked() -> None:
    assert with_marks(Stack()) == [f"layers.{i}" for i in range(5)]
    few = Stack(count=3)
    assert marked(few) is few
    mixture = nn.Sequential(nn.ModuleList(Mixture() for _ in range(4)))
    assert with_marks(mixture) == [f"0.{i}" for i in range(4)]


def test_parameters_are_the_model_s_own() -> None:
    model = Stack()
    ours, theirs = dict(marked(model).named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in theirs)


def test_a_layer_that_inherits_its_forward_is_marked(written_outs: list[int]) -> None:
    capture(Stack(Derived).eval())
    assert written_outs == [1]


def test_a_layer_with_a_forward_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack().eval()
    model.layers[2].forward = lambda x: x * 5  # type: ignore[method-assign]
    assert with_marks(model) == ["layers.0", "layers.1", "layers.3", "layers.4"]
    found = shown(capture(model))
    monkeypatch.setattr(layers_once, "KNOWN", False)
    assert found == shown(capture(model))


def scaled(layer: Layer) -> None:
    layer.inner.scale = 3.0


def another_activation(layer: Layer) -> None:
    layer.inner.act = partial(nn.functional.gelu, approximate="none")


def no_bias(layer: Layer) -> None:
    layer.inner.linear.bias = None


def another_forward(layer: Layer) -> None:
    layer.inner.forward = lambda x: x * 5  # type: ignore[method-assign]


def unread(layer: Layer) -> None:
    layer.inner.unread = 7


@pytest.mark.parametrize("change", [scaled, another_activation, no_bias, another_forward])
def test_a_layer_that_is_set_otherwise_is_not_taken_for_another(
    change: Callable[[Layer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack().eval()
    change(model.layers[3])  # type: ignore[arg-type]
    found = shown(capture(model))
    monkeypatch.setattr(layers_once, "KNOWN", False)
    assert found == shown(capture(model))
    assert found != shown(capture(Stack().eval()))


def test_what_is_not_read_may_differ(written_outs: list[int]) -> None:
    model = Stack().eval()
    unread(model.layers[3])  # type: ignore[arg-type]
    capture(model)
    assert written_outs == [1]


def test_a_call_on_the_weights_of_another_layer_is_found() -> None:
    """As Dynamo of torch 2.13 makes it where a layer's forward is an attribute of the layer."""
    model = Stack().eval()
    captured = traced(marked(model), {})
    calls = [node for node in captured.module.graph.nodes if node.target is invoke_subgraph]
    weights = [[given for given in call.args[2:] if "weight" in given.name] for call in calls]
    calls[3].replace_input_with(weights[3][0], weights[2][0])
    with pytest.raises(NotAlikeError, match="is given"):
        written_out(captured.module, captured.examples, model, captured.read)


@pytest.mark.parametrize("change", [scaled, another_activation, no_bias, another_forward])
def test_what_dynamo_might_miss_is_looked_at(change: Callable[[Layer], None]) -> None:
    """Its graph of layers that were alike, and then are not."""
    model = Stack().eval()
    captured = traced(marked(model), {})
    written_out(captured.module, captured.examples, model, captured.read)
    change(model.layers[3])  # type: ignore[arg-type]
    with pytest.raises(NotAlikeError):
        written_out(captured.module, captured.examples, model, captured.read)
