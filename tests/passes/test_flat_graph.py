"""Passes 1, 8 and 10, the output tails, and what the flat graph is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes import PIPELINE
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.lower import lower
from selective_compile.passes.merge import merge
from selective_compile.passes.normalise import tidy
from selective_compile.passes.output_tails import Tail, take_off_tails
from selective_compile.passes.sampled_rows import keep_sampled_rows
from tests.passes.graphs import analysed, flat_arguments, reasons, sample, trace
from tests.passes.spellings import attend

GENERATOR = torch.Generator().manual_seed(0)
HEAD, WEIGHT = torch.randn(20, 8, generator=GENERATOR), torch.randn(8, 8, generator=GENERATOR)
LENGTHS = (5, 1, 12, 3)


def logits(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
    return F.linear(F.layer_norm(F.linear(x, w).relu(), (8,)), head)


def flat_of(function: Any, *weights: Tensor) -> FlatGraph:
    return flatten(analysed(function, *weights), paged=False)


def arguments(flat: FlatGraph) -> list[Tensor]:
    return flat_arguments(flat, [[sample("x", 1, length, seed=length)] for length in LENGTHS], LENGTHS)


def targets(flat: FlatGraph) -> list[str]:
    return [str(node.target) for node in flat.module.graph.nodes]


def test_head_runs_on_the_rows_that_are_asked_for() -> None:
    flat = flat_of(lambda x, w, head: logits(x + x.relu(), w, head), WEIGHT, HEAD)
    every = flat.module(*arguments(flat))[0]
    assert keep_sampled_rows(flat) == 1
    rows = torch.tensor([20, 3, 3, 0, 7])
    torch.testing.assert_close(flat.module(*arguments(flat), rows)[0], every[:, rows])
    order = targets(flat)
    places = [order.index(f"aten.{name}") for name in ("add.Tensor", "index_select.default", "linear.default")]
    assert places == sorted(places)
    assert keep_sampled_rows(flat) == 0


def test_a_graph_input_is_not_cut() -> None:
    flat = flat_of(logits, WEIGHT, HEAD)
    assert keep_sampled_rows(flat) == 1
    order = targets(flat)
    assert order.index("aten.linear.default") < order.index("aten.index_select.default")


def test_rows_are_not_selected_above_a_value_that_others_read() -> None:
    flat = flat_of(lambda x, w, head: F.linear(F.linear(x, w) + F.linear(x, w).relu(), head), WEIGHT, HEAD)
    every = flat.module(*arguments(flat))[0]
    assert keep_sampled_rows(flat) == 1
    rows = torch.tensor([1, 20])
    torch.testing.assert_close(flat.module(*arguments(flat), rows)[0], every[:, rows])
    order = targets(flat)
    assert order.count("aten.index_select.default") == 1
    assert order.index("aten.linear.default") < order.index("aten.index_select.default")


def test_linear_layers_are_lowered_once() -> None:
    flat = flat_of(logits, WEIGHT, HEAD)
    before = flat.module(*arguments(flat))[0]
    assert lower(flat) == 2
    assert targets(flat).count("selective.linear.default") == 2 and "aten.linear.default" not in targets(flat)
    torch.testing.assert_close(flat.module(*arguments(flat))[0], before)
    assert lower(flat) == 0


def test_a_weight_that_is_computed_is_not_lowered() -> None:
    flat = flat_of(lambda x, w: F.linear(x, w * 2), WEIGHT)
    assert lower(flat) == 0


def test_layers_that_read_the_same_rows_become_one_call_and_no_others() -> None:
    def three(x: Tensor, gate: Tensor, bias: Tensor, up: Tensor, head: Tensor) -> Tensor:
        gated, other = F.linear(x, gate, bias), F.linear(x.relu(), head)
        return F.linear(F.layer_norm(gated * F.linear(x, up), (8,)), head) + other

    flat = flat_of(three, WEIGHT, HEAD[:8, 0].clone(), WEIGHT.mT.contiguous(), HEAD)
    before = flat.module(*arguments(flat))[0]
    assert merge(flat) == 0  # of those that are not lowered, nothing is known
    assert lower(flat) == 4
    lowered = flat.module(*arguments(flat))[0]
    torch.testing.assert_close(lowered, before)
    assert merge(flat) == 2
    order = targets(flat)
    assert order.count("selective.linears.default") == 1 and order.count("selective.linear.default") == 2
    assert torch.equal(flat.module(*arguments(flat))[0], lowered)
    assert merge(flat) == 0


def test_tidying_removes_what_changes_nothing() -> None:
    def padded_out(x: Tensor) -> Tensor:
        same = torch.cat([x.detach().to(torch.float32)[:, 0:].contiguous()], dim=1)
        return F.dropout(same, 0.5, False) * 2

    traced = trace(padded_out)
    assert [str(n.target) for n in traced.graph.nodes if n.op == "call_function"] == ["aten.mul.Tensor"]
    assert tidy(traced.module) == 0


def test_tidying_leaves_casts_and_cuts() -> None:
    traced = trace(lambda x: x.to(torch.float64)[..., 1:])
    kept = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert kept == ["aten.to.dtype", "aten.slice.Tensor"]


def test_slices_of_columns_are_taken_off_the_outputs() -> None:
    module = trace(lambda x: (x * 2)[:, 1:][:, -3:]).module
    (tail,) = take_off_tails(module)
    assert tail == Tail(slices=((1, 1, 2**63 - 1, 1), (1, -3, 2**63 - 1, 1)))
    assert tail.keeps_last
    value = torch.arange(16).reshape(2, 8)
    assert torch.equal(tail(value), value[:, 1:][:, -3:])
    assert [str(n.target) for n in module.graph.nodes if n.op == "call_function"] == ["aten.mul.Tensor"]
    assert take_off_tails(module) == (Tail(),)


def test_slices_of_features_are_no_tails() -> None:
    module = trace(lambda x: (x * 2)[..., :5]).module
    assert take_off_tails(module) == (Tail(),)


def test_a_tail_that_ends_early_does_not_keep_the_last_column() -> None:
    (tail,) = take_off_tails(trace(lambda x: (x * 2)[:, :-1]).module)
    assert not tail.keeps_last


def test_flat_graph_takes_any_number_of_tokens_and_requests() -> None:
    flat = flat_of(attend)
    for lengths in ((2,), (1, 1), (7, 1, 30), (3,) * 9):
        requests = [[sample(name, 1, length) for name in "qkv"] for length in lengths]
        (mixed,) = flat.module(*flat_arguments(flat, requests, lengths))
        assert mixed.shape == (1, sum(lengths), 4, 8)


@pytest.mark.parametrize(
    "output",
    [
        lambda x: x.transpose(0, 1).reshape(-1, 8),
        lambda x: x.flatten(1),
        lambda x: x.transpose(1, 2).flatten(0, 1),
        lambda x: (x * 2, torch.arange(x.shape[1])),
        lambda x: (x * 2, torch.ones(x.shape[0])),
    ],
)
def test_outputs_without_a_place_for_each_row_are_refused(output: Any) -> None:
    assert any("tokens in one dimension" in reason for reason in reasons(output))


def test_pipeline_is_in_order() -> None:
    assert PIPELINE == (
        "whole convolutions",
        "whole linear attention",
        "try weight classes",
        "mark token axes",
        "isolate",
        "call once",
        "recognise recurrences",
        "recognise selections",
        "recognise attention",
        "prove masks",
        "recognise latents",
        "flatten",
        "fold constants",
        "keep sampled rows",
        "lower",
        "merge",
    )
