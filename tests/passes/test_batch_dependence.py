"""What depends on the batch is named, and what a batch-invariant engine lowers does not, on a GPU as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.batch_dependence import batch_dependent, foreign_products
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.lower import lower
from tests.passes.graphs import analysed, flat_arguments, sample

HEAD, WEIGHT = torch.randn(20, 8), torch.randn(8, 8)
LENGTHS = (5, 1, 12, 3)
LINEAR = torch.ops.selective.linear.default


def flat_of(function: Any, *weights: Tensor) -> FlatGraph:
    return flatten(analysed(function, *weights), paged=False)


def results(flat: FlatGraph) -> Tensor:
    return flat.module(*flat_arguments(flat, [[sample("x", 1, length, seed=length)] for length in LENGTHS], LENGTHS))[0]


def targets(flat: FlatGraph) -> list[Any]:
    return [node.target for node in flat.module.graph.nodes]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flat graph says so of itself; its tensors stay where they are."""
    monkeypatch.setattr(FlatGraph, "device", property(lambda flat: torch.device("cuda")))


def two_layers(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).relu(), head)


def test_linear_layers_of_a_gpu_are_lowered_for_batch_invariance_alone(on_a_gpu: None) -> None:
    flat = flat_of(two_layers, WEIGHT, HEAD)
    before = results(flat)
    assert lower(flat) == 0 and len(foreign_products(flat)) == 2
    assert lower(flat, batch_invariant=True) == 2
    assert targets(flat).count(LINEAR) == 2 and foreign_products(flat) == () and len(batch_dependent(flat)) == 2
    torch.testing.assert_close(results(flat), before)
    assert lower(flat, batch_invariant=True) == 0


def test_what_no_kernel_multiplies_stays_and_is_named(on_a_gpu: None) -> None:
    flat = flat_of(lambda x, w: F.linear(x.double(), w), WEIGHT.double())
    assert lower(flat, batch_invariant=True) == 0
    (line,) = foreign_products(flat)
    assert line.startswith("linear: aten.linear.default, ")


def test_a_computed_weight_stays_and_is_named(on_a_gpu: None) -> None:
    flat = flat_of(lambda x, w: F.linear(x, w * 2), WEIGHT)
    assert lower(flat, batch_invariant=True) == 0 and len(foreign_products(flat)) == 1


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm])
def test_outer_products_become_products(product: Any) -> None:
    frequencies = torch.rand(1, 5, 1)
    flat = flat_of(lambda x, w: product(w.expand(x.shape[0], 5, 1), x[:, None, :, 0]).transpose(1, 2), frequencies)
    before = results(flat)
    assert foreign_products(flat) == ()
    assert lower(flat, batch_invariant=True) == 1
    assert torch.ops.aten.mul.Tensor in targets(flat)
    assert torch.equal(results(flat), before) and lower(flat, batch_invariant=True) == 0


def test_products_that_sum_are_no_outer_products() -> None:
    flat = flat_of(lambda x, w: torch.matmul(x, w), WEIGHT)
    assert lower(flat, batch_invariant=True) == 0 and len(foreign_products(flat)) == 1


def test_a_weight_that_its_class_multiplies_is_foreign() -> None:
    """As of a quantised layer: what the class does with many rows, only the class knows."""
    flat = flat_of(two_layers, WEIGHT, HEAD)
    for node in flat.module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            node.target = F.linear  # as `lower` writes it for such a weight
    assert [line.partition(", ")[0] for line in foreign_products(flat)] == ["linear: linear", "linear_1: linear"]


def test_sums_in_any_order_are_named_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(x: Tensor, w: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(-1, torch.zeros_like(x, dtype=torch.int64), x * w)

    flat = flat_of(gathered, torch.randn(8))
    assert foreign_products(flat) == ()
    monkeypatch.setattr(FlatGraph, "device", property(lambda flat: torch.device("cuda")))
    (line,) = foreign_products(flat)
    assert "scatter_add" in line
