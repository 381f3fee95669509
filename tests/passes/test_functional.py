"""Part of pass 1: writes in place become values where nothing else sees them, and are left where something does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.functional import make_functional
from selective_compile.passes.traced_graph import is_mutable

X = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(0))


def graph_of(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic", pre_dispatch=True)(X.clone())


def writes(module: fx.GraphModule) -> int:
    return sum(node.op == "call_function" and is_mutable(node) for node in module.graph.nodes)


def added(x: Tensor) -> Tensor:
    return (x * 2).add_(x).relu_()


def narrower(x: Tensor) -> Tensor:
    return (x * 2).to(torch.bfloat16).add_(x)


def assigned(x: Tensor) -> Tensor:
    whole = x.new_zeros(x.shape[0], x.shape[1], 10)
    whole[..., :8] = x
    whole[..., 8] = 1
    return whole * 2


def through_a_permutation(x: Tensor) -> Tensor:
    return (x * 2).permute(2, 0, 1).mul_(3)


def part_of_a_part(x: Tensor) -> Tensor:
    whole = x * 1
    whole[:, 2:][..., :3] += 5
    return whole


def part_of_every_row(x: Tensor) -> Tensor:
    whole = x * 1
    whole[:, :, :3] = 0.0
    whole[:, :, 4:6] *= 3
    return whole + 1


def scattered(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_(-1, x.topk(2)[1], 1.0)


def of_several_results(x: Tensor) -> Tensor:
    values, places = x.topk(3)
    values /= values.sum(-1, keepdim=True)
    return values + places


REWRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "operators on what was made": (added, 2),
    "a type that adding would promote": (narrower, 1),
    "parts assigned": (assigned, 2),
    "through a permutation": (through_a_permutation, 1),
    "a part of a part": (part_of_a_part, 2),
    "a part of every row": (part_of_every_row, 3),
    "scattered": (scattered, 1),
    "one of several results": (of_several_results, 1),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_writes_become_values(name: str) -> None:
    function, count = REWRITTEN[name]
    module = graph_of(function)
    assert writes(module) == count
    assert make_functional(module) == count
    assert writes(module) == 0
    for length in (12, 5):
        expected = function(X[:, :length].clone())
        found = module(X[:, :length].clone())
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
    assert make_functional(module) == 0


def an_input(x: Tensor) -> Tensor:
    return x.add_(1)


def a_view_read_later(x: Tensor) -> Tensor:
    whole = x * 1
    part = whole[..., :4]
    whole.add_(1)
    return part + whole[..., 4:]


def a_base_read_later(x: Tensor) -> Tensor:
    whole = x * 1
    whole.transpose(1, 2).add_(1)
    return whole


def what_may_be_the_input(x: Tensor) -> Tensor:
    return x.contiguous().add_(1)


def what_dropout_returns(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, False).add_(1)


@pytest.mark.parametrize(
    "function", [an_input, a_view_read_later, a_base_read_later, what_may_be_the_input, what_dropout_returns]
)
def test_writes_that_something_else_sees_are_left(function: Callable[[Tensor], Tensor]) -> None:
    module = graph_of(function)
    before = writes(module)
    assert before == 1
    assert make_functional(module) == 0
    assert writes(module) == before
    torch.testing.assert_close(module(X.clone()), function(X.clone()))
