"""A graph of which a few layers are traced and the others copied is that of which all are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from selective_compile.capture import capture
from selective_compile.captured import Captured
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.passes import Rewrite, rewrite
from selective_compile.passes import retrace as tracing
from selective_compile.passes.normalise import Symbols
from selective_compile.passes.spellings import SPELT_OUT
from tests.decoders import Decoder
from tests.models import tiny
from tests.passes.graphs import written

SMALL = {"hidden_size": 32, "intermediate_size": 48}
# A pattern of layers that comes several times, and is broken off.
TURNS = {"num_hidden_layers": 14, "layer_types": [*["sliding_attention", "full_attention"] * 7]}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny("llama", num_hidden_layers=10, **SMALL),
    "gemma2": lambda: tiny("gemma2", **TURNS, **SMALL),
    "decoder": lambda: Decoder(layers=9),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes went through each trace."""
    sizes: list[int] = []
    whole = tracing.traced

    def counted(module: fx.GraphModule, *others: Any) -> Any:
        sizes.append(len(module.graph.nodes))
        return whole(module, *others)

    monkeypatch.setattr(tracing, "traced", counted)
    return sizes


def rewritten(captured: Captured) -> Rewrite:
    return rewrite(captured.module, captured.examples, paged=True, ones=ATTENTION_MASK)


def test_code_is_written_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass changes the graph; for many layers its code takes long to write."""
    captured, write = capture(MODELS["decoder"]()), fx.Graph.python_code
    written: list[int] = []

    def counted(graph: fx.Graph, *args: Any, **options: Any) -> Any:
        written.append(len(graph.nodes))
        return write(graph, *args, **options)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    found = rewrite(captured.module, captured.examples, paged=True, ones=ATTENTION_MASK)
    assert len(written) <= 1  # of Dynamo's own graph
    assert found.flat is not None and "ragged_attention" in found.flat.module.code


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_were_copied_are_those_that_would_be_traced(
    name: str, traced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture(MODELS[name]())
    found, few = rewritten(captured), list(traced)
    traced.clear()
    monkeypatch.setattr(tracing, "repeats", lambda *_: [])
    expected = rewritten(captured)
    assert len(few) == len(traced) == 2
    assert all(less < 0.8 * whole for less, whole in zip(few, traced, strict=True))
    assert found.flat is not None and expected.flat is not None
    assert written(found.flat.module.graph, found.flat.weights) == written(
        expected.flat.module.graph, expected.flat.weights
    )
    assert [call.name for call in found.traced.calls] == [call.name for call in expected.traced.calls]
    assert found.traced.conditions == expected.traced.conditions


def both_ways(function: Callable[..., Any], count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``function`` of a ``[S, 4]`` tensor and ``count`` weights, traced in parts and as a whole."""
    graph, symbols = fx.Graph(), Symbols()
    given = [fx.Proxy(graph.placeholder(name)) for name in ("x", *(f"w{i}" for i in range(count)))]
    graph.output((function(given[0], given[1:]).node,))
    with symbols.mode:
        fakes = [torch.empty(symbols.size("token", 12), 4), *(torch.empty(4) for _ in range(count))]
    arguments: Any = (fx.GraphModule(nn.Module(), graph), fakes, SPELT_OUT, symbols.mode)
    return tracing.retraced(*arguments), tracing.traced(*arguments)[0]


def plain(x: Any, weights: list[Any]) -> Any:
    for weight in weights:
        y = (x * weight).relu() + weight
        x = x + (y * 2).tanh() * (y - 1).sigmoid() - y.exp() * 0.5
    return x


def one_sees_more(x: Any, weights: list[Any]) -> Any:
    first = x
    for number, weight in enumerate(weights):
        x = plain(x, [weight])
        x = x + first if number == 5 else x
    return x


def handed_on(x: Any, weights: list[Any]) -> Any:
    """`contiguous` of what is that already is no operator: what it gives is made in the layer before."""
    before = x
    for weight in weights:
        before = x.contiguous()
        x = plain(before, [weight])
    return x + before * 3


def handed_on_twice(x: Any, weights: list[Any]) -> Any:
    before = x
    for weight in weights:
        x, before = plain(x, [weight]) + before.contiguous(), x.contiguous()
    return x


def unread(x: Any, weights: list[Any]) -> Any:
    """Nothing behind the layers reads them."""
    plain(x, weights)
    return x * 2


def sizes_differ(x: Any, weights: list[Any]) -> Any:
    """Each layer leaves one token out: traced alike they are not."""
    for weight in weights:
        x = plain(x, [weight])[1:]
    return x


@pytest.mark.parametrize(
    ("function", "times"),
    [(plain, 1), (one_sees_more, 1), (handed_on, 2), (handed_on_twice, 2), (unread, 1), (sizes_differ, 2)],
)
def test_what_is_not_traced_alike_is_traced_whole(function: Callable[..., Any], times: int, traced: list[int]) -> None:
    found, expected = both_ways(function, 18)
    assert len(traced) == times + 1
    assert written(found.graph, ()) == written(expected.graph, ())
    arguments = [torch.randn(30, 4), *torch.randn(18, 4).unbind()]
    assert torch.equal(found(*arguments)[0], expected(*arguments)[0])
