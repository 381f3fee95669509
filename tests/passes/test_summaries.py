"""What is taken off the end of a padded call's graph, and what has to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.summaries import Summary, behind_layers, take_off_summary
from tests.passes.graphs import WIDTH, analysed, trace

WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))


def mean(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    counted = mask[..., None].to(x.dtype)
    return (F.linear(x, weight) * counted).sum(1) / counted.sum(1)


def rows_and_mean(x: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    rows = F.linear(x, weight)
    return rows, (rows * mask[..., None].to(x.dtype)).sum(1)


def two_of_one(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.linear(x, weight)
    total = rows.sum(1)
    return total, rows.relu(), total


def headed(x: Tensor, weight: Tensor) -> Tensor:
    """A layer of what one request has is none of tokens."""
    return F.linear(F.linear(x, weight).sum(1), weight)


def loss(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), mask.long().flatten())


def smoothed_loss(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), mask.long().flatten(), label_smoothing=0.1)


def layer_behind(x: Tensor, weight: Tensor) -> Tensor:
    rows = F.linear(x, weight)
    return F.linear(rows - rows.mean(1, keepdim=True), weight)


def product_behind(x: Tensor, weight: Tensor) -> Tensor:
    rows = F.linear(x, weight)
    return rows.flip(1) @ rows.transpose(1, 2)


def compared(x: Tensor, weight: Tensor) -> Tensor:
    return (F.linear(x, weight) > 1).sum(1)


def drawn(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(F.linear(x, weight).sum(1))


def without_layers(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return (x * mask[..., None].to(x.dtype)).sum(1)


def taken(function: Callable[..., Any], *weights: Tensor) -> tuple[Any, Summary | None]:
    first = analysed(function, *weights)
    traced = trace(function, *weights)
    return traced, take_off_summary(traced, behind_layers(first, first.refusals))


@pytest.mark.parametrize("function", [mean, rows_and_mean, two_of_one, headed, loss, smoothed_loss])
def test_what_is_left_and_what_was_taken_off_give_the_results(function: Callable[..., Any]) -> None:
    traced, summary = taken(function, WEIGHT)
    assert summary is not None
    arguments = [given.example for given in traced.inputs]
    left = traced.module(*arguments)
    made = summary.module(*(arguments[index] for index in summary.inputs), *(left[place] for place in summary.rows))
    results = [(*left, *made)[place] for place in summary.results]
    wanted = function(*arguments[2:])
    for ours, theirs in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_a_loss_what_is_of_one_token_alone_stays() -> None:
    """A softmax of each takes long, and what was taken off is run several times."""
    traced, summary = taken(loss, WEIGHT)
    assert summary is not None
    left, made = (str(module.graph) for module in (traced.module, summary.module))
    assert "aten.log_softmax" in left and "aten.log_softmax" not in made


def test_rows_that_are_a_result_too_are_left_once() -> None:
    traced, summary = taken(rows_and_mean, WEIGHT)
    assert summary is not None and summary.rows == (0,) and summary.results == (0, 1)
    assert len(traced.output_node.args[0]) == 1


@pytest.mark.parametrize("function", [layer_behind, product_behind, compared, drawn, without_layers])
def test_what_stays(function: Callable[..., Any]) -> None:
    first = trace(function, WEIGHT)
    traced, summary = taken(function, WEIGHT)
    assert summary is None
    assert str(traced.graph) == str(first.graph)
