"""Weights that a graph casts to fewer bits become inputs that are cast once; and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selective_compile.cast_weights import CastWeights
from selective_compile.int8_weights import Int8Weights
from selective_compile.passes.cast_once import cast_once
from selective_compile.passes.flat_graph import Cast, FlatGraph, Quantised
from selective_compile.passes.flatten import flatten
from selective_compile.passes.lower import lower
from selective_compile.passes.lower_grouped import CASTS
from selective_compile.passes.merge import merge
from selective_compile.passes.quantise import quantise
from selective_compile.tensor_state import states
from tests.passes.graphs import WIDTH, analysed, flat_arguments, sample

LENGTHS = (5, 1, 12, 3)
ops = torch.ops.selective


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def flat_of(function: Callable[..., Any], *weights: Tensor) -> FlatGraph:
    return flatten(analysed(function, *weights), paged=False)


def results(flat: FlatGraph) -> Tensor:
    requests = [[sample("x", 1, length, seed=length)] for length in LENGTHS]
    arguments: list[Any] = flat_arguments(flat, requests, LENGTHS)
    weights = arguments[: len(flat.weights)]
    with torch.no_grad():
        arguments += Int8Weights(flat.quantised).of(weights, states(weights))
        arguments += CastWeights(flat.cast, in_place=False).of(weights, states(weights))
        return flat.module(*arguments)[0]  # type: ignore[no-any-return]


def casts_of_weights(flat: FlatGraph) -> int:
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    weights = placeholders[: len(flat.weights)]
    return sum(node.target in CASTS and node.args[0] in weights for node in flat.module.graph.nodes)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()


def mlp(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """As autocast has it: each layer casts its rows for itself."""
    return F.silu(F.linear(x.bfloat16(), gate.bfloat16())) * F.linear(x.bfloat16(), up.bfloat16())


def test_a_layer_reads_what_was_cast() -> None:
    flat = flat_of(layer, drawn(8, WIDTH), drawn(8))
    before, inputs = results(flat), len(flat.example_inputs)
    assert casts_of_weights(flat) == 2 and cast_once(flat) == 2 and casts_of_weights(flat) == 0
    assert flat.cast == (Cast(0, torch.bfloat16), Cast(1, torch.bfloat16))
    assert len(flat.example_inputs) == inputs + 2
    assert torch.equal(results(flat), before)
    assert not flat.symbols.env.guards


def test_what_is_cast_alike_is_one_input() -> None:
    def tied(x: Tensor, weight: Tensor) -> Tensor:
        once = F.linear(x.bfloat16(), weight.bfloat16())
        return F.linear(once, weight.bfloat16()).float() + F.linear(x.half(), weight.half()).float()

    flat = flat_of(tied, drawn(WIDTH, WIDTH))
    before = results(flat)
    assert cast_once(flat) == 2 and flat.cast == (Cast(0, torch.bfloat16), Cast(0, torch.float16))
    assert torch.equal(results(flat), before)


class Own(nn.Parameter):
    """What it is cast to, only its class knows."""


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x, w: F.linear(x, w.float()), drawn(8, WIDTH, dtype=torch.bfloat16)),
        (lambda x, w: F.linear(x.bfloat16(), w.bfloat16()), drawn(8, WIDTH, dtype=torch.float16)),
        (lambda x, w: F.linear(x.bfloat16(), (w + 1).bfloat16()), drawn(8, WIDTH)),
        (lambda x, w: x * w.to(torch.int32), torch.arange(WIDTH)),
        (lambda x, w: F.linear(x.bfloat16(), w.bfloat16()), Own(torch.randn(8, WIDTH))),
    ],
)
def test_near_misses_are_left_alone(function: Callable[..., Tensor], weight: Tensor) -> None:
    flat = flat_of(function, weight)
    code = flat.module.code
    assert cast_once(flat) == 0 and flat.module.code == code and flat.cast == ()


def test_layers_that_cast_the_same_rows_are_one_call_on_a_cpu() -> None:
    flat = flat_of(mlp, drawn(8, WIDTH), drawn(8, WIDTH))
    before = results(flat)
    assert lower(flat) == 2 and merge(flat) == 2
    targets = [node.target for node in flat.module.graph.nodes]
    assert targets.count(ops.linears.default) == 1 and sum(target in CASTS for target in targets) == 3
    assert torch.equal(results(flat), before)
    assert cast_once(flat) == 2 and torch.equal(results(flat), before)


def test_what_a_weight_was_cast_to_stays_in_front_of_the_layers_that_read_it_before() -> None:
    """As where a block is run twice, with a weight that its code casts once."""

    def twice(x: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
        weight = shared.bfloat16()
        once = F.silu(F.linear(x.bfloat16(), weight))
        return F.linear(once, weight) * F.linear(once, gate.bfloat16())

    flat = flat_of(twice, drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH))
    before = results(flat)
    assert lower(flat) == 3 and merge(flat) == 2
    flat.module.graph.lint()
    assert torch.equal(results(flat), before)


def test_int8_numbers_stand_for_what_was_cast() -> None:
    flat = flat_of(mlp, drawn(8, WIDTH), drawn(8, WIDTH))
    before = results(flat)
    lower(flat)
    merge(flat)
    assert quantise(flat) == 2 and casts_of_weights(flat) == 0 and cast_once(flat) == 0
    assert (results(flat) - before).abs().max() < 0.05 * before.abs().max()  # small ones are what large ones leave


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_has_eight_bits_already_is_not_quantised(dtype: torch.dtype) -> None:
    """As where a layer keeps numbers, which its code casts and scales."""

    def scaled(x: Tensor, numbers: Tensor, scales: Tensor, head: Tensor) -> Tensor:
        return F.linear(F.linear(x, numbers.float()) * scales, head)

    numbers = torch.randint(-127, 127, (WIDTH, WIDTH)).to(dtype)
    flat = flat_of(scaled, numbers, drawn(WIDTH), drawn(8, WIDTH))
    before = results(flat)
    assert lower(flat) == 2 and quantise(flat) == 1 and flat.quantised == (Quantised(2),)
    assert (results(flat) - before).abs().max() < 0.05 * before.abs().max()
