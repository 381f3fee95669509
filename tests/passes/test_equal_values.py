"""Which nodes are equal: the same operator on equal nodes and the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.equal_values import first_of_equal


def firsts(function: object, *arguments: Tensor) -> dict[str, str]:
    graph = make_fx(function)(*arguments).graph  # type: ignore[arg-type]
    return {node.name: first.name for node, first in first_of_equal(graph).items() if node is not first}


def test_equal_calls_on_equal_nodes() -> None:
    def twice(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x.cos() + 1) * y, (x.cos() + 1) * y]

    assert firsts(twice, torch.ones(2), torch.ones(2)) == {"cos_1": "cos", "add_1": "add", "mul_1": "mul"}


def test_others_are_themselves() -> None:
    def others(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.cos(), y.cos(), x + 1, x + 1.0, x - y, y - x, x.sum(0), x.sum(0, keepdim=True)]

    assert firsts(others, torch.ones(2), torch.ones(2)) == {}


def test_what_draws_numbers_or_changes_its_input_is_no_other() -> None:
    def drawn(x: Tensor) -> list[Tensor]:
        return [torch.rand_like(x), torch.rand_like(x), x.add_(1), x.add_(1)]

    assert firsts(drawn, torch.ones(2)) == {}
