"""A graph cut into layers: these are found, cuts lie where nothing is lost, and the parts give what the whole does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from selective_compile.capture import capture
from selective_compile.compiled_step import CompiledStep
from selective_compile.layered import Layered
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.passes import rewrite
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.fuse_rotary import fuse_rotary
from selective_compile.passes.layer_cut import Part, cut
from selective_compile.passes.normalise import Symbols
from selective_compile.passes.retrace import kind_of
from tests.decoders import Decoder
from tests.exactness import logits_in_chunks, step_program
from tests.models import VOCABULARY, tiny

PROMPTS = [[(13 * place + 7 * n) % VOCABULARY for place in range(length)] for n, length in enumerate((7, 3, 11))]
SMALL = {"hidden_size": 32, "intermediate_size": 48}
TURNS = {"num_hidden_layers": 14, "layer_types": ["sliding_attention", "full_attention"] * 7}


def flat_graph(model: nn.Module) -> FlatGraph:
    captured = capture(model)
    flat = rewrite(captured.module, captured.examples, paged=True, ones=ATTENTION_MASK).flat
    assert flat is not None
    return flat


@pytest.fixture(scope="module")
def flat() -> FlatGraph:
    """Of a Llama of 8 layers; to be cut, and not changed but by what comes last."""
    return flat_graph(tiny("llama", num_hidden_layers=8, **SMALL))


@pytest.mark.parametrize(
    ("family", "changes", "least"),
    [
        ("llama", {"num_hidden_layers": 9, **SMALL}, 7),
        ("gemma2", {**TURNS, **SMALL}, 5),
    ],
)
def test_logits_are_those_of_the_whole_graph(family: str, changes: Any, least: int) -> None:
    program = step_program(tiny(family, **changes))
    expected = logits_in_chunks(program, PROMPTS, 4)
    pieces = cut(program._flat)
    assert pieces is not None and len(pieces.calls) >= least
    called: list[int] = []

    def counted(part: Any, examples: list[Any]) -> Any:
        assert len(examples) == len(part.inputs)
        return lambda *given: (called.append(len(given)), part.module.forward(*given))[1]

    program._run = CompiledStep(Layered(program._flat, pieces, counted), program._flat.example_inputs, native=False)
    found = logits_in_chunks(program, PROMPTS, 4)
    assert len(called) == 3 * (len(pieces.calls) + 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def parallel(value: Tensor, weights: list[Tensor]) -> Tensor:
    """The first layer is given one value where the others are given two."""
    total = hidden = value.relu()
    for weight in weights:
        mixed = (hidden @ weight).tanh() * 2 - hidden.sigmoid()
        total = (total + mixed) * 0.5 + (mixed * 3).cos() - (total * 2).sin()
        hidden = (total * 4).sigmoid() + mixed.exp() * 0.1
    return total + hidden


def shared_weight(value: Tensor, weights: list[Tensor]) -> Tensor:
    """Two layers in a row have one weight where the others have two."""
    for number in range(0, len(weights) - 1, 2):
        other = weights[number if number < 6 else number + 1]
        mixed = (value @ weights[number]).tanh() * 2 - (value @ other).sigmoid()
        value = (value + mixed) * 0.5 + (mixed * 3).cos() - (value * 2).sin()
        value = (value * 4).sigmoid() + mixed.exp() * 0.1
    return value


@pytest.mark.parametrize("function", (parallel, shared_weight))
def test_values_that_are_one_for_some_layers_alone(function: Callable[..., Tensor]) -> None:
    symbols = Symbols()
    with symbols.mode:
        fakes = [torch.empty(symbols.size("token", 12), 4), *(torch.empty(4, 4) for _ in range(40))]
        module = make_fx(lambda value, *weights: (function(value, list(weights)),), tracing_mode="real")(*fakes)
    flat: Any = SimpleNamespace(module=module, example_inputs=fakes)
    arguments = [torch.randn(7, 4), *torch.randn(40, 4, 4).unbind()]
    pieces = cut(flat)
    assert pieces is not None
    layered = Layered(flat, pieces, lambda part, _: part.module.forward)
    assert torch.equal(layered(*arguments)[0], module(*arguments)[0])


def test_examples_of_what_parts_are_given_share_no_memory(flat: FlatGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the values of nodes do that are alike; what is compiled for inputs that are one would not be for two."""
    pieces = cut(flat)
    assert pieces is not None
    first: dict[Any, Any] = {}
    for node in flat.module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            monkeypatch.setitem(node.meta, "val", first.setdefault(kind_of(node.meta["val"]), node.meta["val"]))
    found: list[int] = []

    def compiled(part: Part, examples: list[Any]) -> Callable[..., Any]:
        made = {n: e for n, e in zip(part.inputs, examples, strict=True) if n.op != "placeholder"}
        assert all(kind_of(example) == kind_of(node.meta["val"]) for node, example in made.items())
        memory = [StorageWeakRef(example.untyped_storage()) for example in made.values() if isinstance(example, Tensor)]
        assert len(set(memory)) == len(memory)
        found.append(len(memory))
        return part.module.forward

    Layered(flat, pieces, compiled)
    assert max(found) > 1


def test_every_weight_is_read_by_one_call(flat: FlatGraph) -> None:
    pieces = cut(flat)
    assert pieces is not None
    weights = [node for node in flat.module.graph.nodes if node.op == "placeholder"][: len(flat.weights)]
    given = [pieces.first.inputs, *(inputs for inputs, _ in pieces.calls), pieces.last.inputs]
    for weight in weights:
        assert sum(weight in inputs for inputs in given) == 1


def test_a_value_leaves_with_the_last_call_that_reads_it(flat: FlatGraph) -> None:
    """Else the memory of every layer's result would be held to the end of the step."""
    pieces = cut(flat)
    assert pieces is not None
    layered = Layered(flat, pieces, lambda part, _: part.module.forward)
    read: set[int] = set()
    for _, given, left, done in reversed(layered._calls):
        own = {place for place in given if place >= len(flat.example_inputs)}
        assert set(done) == own - read and not set(done) & set(left)
        read |= own
    assert read


def test_two_values_cross_in_front_of_a_product(flat: FlatGraph) -> None:
    """What is normed, and what it will be added to: Inductor would have put both into memory anyhow."""
    for rotary in (False, True):
        assert not rotary or fuse_rotary(flat) == 8
        pieces = cut(flat)
        assert pieces is not None and len(pieces.layer.outputs) == 2
        first = next(node for node in pieces.layer.module.graph.nodes if node.op == "call_function")
        assert "linear" in str(first.target)


@pytest.mark.parametrize("layers", (1, 4))
def test_few_layers_are_not_cut(layers: int) -> None:
    assert cut(flat_graph(Decoder(layers=layers))) is None


def test_layers_that_all_differ_are_not_cut() -> None:
    assert cut(flat_graph(tiny("gpt2", n_layer=7, scale_attn_by_inverse_layer_idx=True))) is None
