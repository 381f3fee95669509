"""Part of pass 1: zeros for weights that are not numbers are one operator; of what else there is they stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.functional import make_functional
from selective_compile.passes.nan_guards import fold_nan_guards
from selective_compile.passes.normalise import tidy
from selective_compile.passes.spellings import SPELT_OUT

aten = torch.ops.aten
SCORES = torch.tensor([[1.0, 2.0, math.nan], [-math.inf] * 3, [0.0, 1.0, -math.inf]])


def instead(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(torch.isnan(weights), torch.zeros_like(weights), weights)


def filled(x: Tensor) -> Tensor:
    weights = x.softmax(-1, dtype=torch.float64).to(x.dtype)
    return weights.masked_fill(weights.isnan(), 0)


def given_as_tensor(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(weights.isnan(), torch.zeros(3, 3), weights)


def put(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    weights[torch.isnan(weights)] = 0
    return weights


def unequal(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(weights != weights, 0.0, weights)


def of_no_softmax(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.zeros_like(x), x)


def of_others(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(x.isnan(), torch.zeros_like(x), weights)


def of_more_rows(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(weights.isnan(), torch.zeros(2, 3, 3), weights)


def unequal_to_others(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return torch.where(weights != x, 0.0, weights)


def put_ones(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    weights[torch.isnan(weights)] = 1
    return weights


def with_ones(x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    return weights.masked_fill(weights.isnan(), 1.0)


FOLDED = (instead, filled, given_as_tensor, put, unequal)
OTHERS = (of_no_softmax, of_others, of_more_rows, with_ones, put_ones, unequal_to_others)


@pytest.mark.parametrize(("function", "count"), [*((each, 1) for each in FOLDED), *((each, 0) for each in OTHERS)])
def test_guards_of_a_softmax_are_folded(function: Callable[[Tensor], Tensor], count: int) -> None:
    module = make_fx(function, SPELT_OUT, tracing_mode="fake", pre_dispatch=True)(SCORES)
    make_functional(module)
    tidy(module)
    assert fold_nan_guards(module) == count
    assert sum(node.target is aten.nan_to_num.default for node in module.graph.nodes) == count
    torch.testing.assert_close(module(SCORES), function(SCORES), equal_nan=True)
    assert fold_nan_guards(module) == 0
    module.graph.lint()
