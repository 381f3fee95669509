"""What layers by columns, and products of rows in groups, become on a CPU, and which stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.testing._internal.two_tensor import TwoTensor

from selective_compile.grouped_ops import grouped_linear, take_rows
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.lower import lower
from selective_compile.passes.lower_grouped import is_of_a_class
from tests.passes.test_host_reads import flat_with

aten = torch.ops.aten
ROWS, EXPERTS, ENDS = torch.randn(4, 8), torch.randn(2, 6, 8), torch.tensor([1, 4], dtype=torch.int32)


def grouped_of(flat: Any) -> list[Any]:
    return [node for node in flat.module.graph.nodes if node.target is grouped_linear]


@pytest.mark.parametrize("ends", [ENDS, ENDS.long()], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lies", ["by rows", "by columns"])
def test_experts_are_multiplied_by_our_kernel_where_they_lie(lies: str, dtype: torch.dtype, ends: Tensor) -> None:
    experts = EXPERTS.to(dtype).mT
    flat = flat_with(
        aten._grouped_mm.default, ROWS.to(dtype), experts if lies == "by rows" else experts.contiguous(), ends
    )
    assert lower(flat) == 1
    (node,) = grouped_of(flat)
    value = node.args[1].meta["val"]
    assert value.shape == EXPERTS.shape and (value if lies == "by rows" else value.mT).is_contiguous()
    assert lower(flat) == 0


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1)], ids=str)
def test_what_is_turned_otherwise_is_no_view_of_what_it_seems(order: tuple[int, ...]) -> None:
    cube = torch.randn(4, 4, 4)
    flat = flat_with(aten._grouped_mm.default, ROWS[:, :4], cube.permute(order), torch.tensor([1, 2, 4, 4]))
    (node,) = (node for node in flat.module.graph.nodes if node.target is aten._grouped_mm.default)
    with flat.module.graph.inserting_before(node):
        base = flat.module.graph.create_node("placeholder", "cube", ())
        base.meta["val"] = cube
        turned = flat.module.graph.call_function(aten.permute.default, (base, order))
    turned.meta["val"] = cube.permute(order)
    node.args = (node.args[0], turned, *node.args[2:])
    lower(flat)
    assert [each.args[1] is base for each in grouped_of(flat)] == ([True] if order == (0, 2, 1) else [])


def test_in_a_batch_invariant_step_in_one_order() -> None:
    flat = flat_with(aten._grouped_mm.default, ROWS, EXPERTS.mT, ENDS)
    for _ in range(2):
        lower(flat, batch_invariant=True)
    (node,) = grouped_of(flat)
    assert node.args[3:] == (None, True)


@pytest.mark.parametrize(
    "given",
    [
        (ROWS, EXPERTS.permute(1, 2, 0).contiguous().permute(2, 1, 0), ENDS),
        (ROWS.half(), EXPERTS.half().mT, ENDS),
        (ROWS[None].expand(2, 4, 8), EXPERTS.mT),
        (ROWS.bfloat16(), EXPERTS.bfloat16().mT, ENDS, None, torch.float32),
    ],
    ids=["groups side by side", "float16", "in no groups", "another result"],
)
def test_others_stay(given: Any) -> None:
    flat = flat_with(aten._grouped_mm.default, *given)
    assert lower(flat) == 0 and not grouped_of(flat)


@pytest.mark.parametrize(
    ("dtype", "capability", "lowered"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (8, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), True),
        (torch.float64, (8, 0), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("lies", ["by rows", "by columns"])
def test_on_a_gpu_those_are_lowered_that_libraries_have_no_launch_for(
    dtype: torch.dtype, capability: Any, lowered: bool, lies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = EXPERTS.to(dtype).mT
    given = (ROWS.to(dtype), experts if lies == "by rows" else experts.contiguous(), ENDS)
    flat = flat_with(aten._grouped_mm.default, *given)
    monkeypatch.setattr(FlatGraph, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert bool(lower(flat)) == lowered == bool(grouped_of(flat))
    if dtype is not torch.float64:
        lower(flat, batch_invariant=True)
        (node,) = grouped_of(flat)
        assert node.args[1].meta["val"].shape == EXPERTS.shape and node.args[3:] == (None, True)


def test_weights_of_a_class_of_their_own_are_known_through_views() -> None:
    graph = fx.Graph()
    plain, own = graph.placeholder("plain"), graph.placeholder("own")
    weights: dict[fx.Node, Any] = {plain: EXPERTS, own: TwoTensor(EXPERTS, EXPERTS)}
    for base in (plain, own):
        turned = graph.call_function(aten.transpose.int, (base, -2, -1))
        for node in (base, turned, graph.call_function(aten.mul.Tensor, (turned, 2))):
            assert is_of_a_class(node, weights) == (base is own)
    assert is_of_a_class(graph.call_function(aten.mul.Tensor, (plain, own)), weights)
    assert not is_of_a_class(graph.call_function(aten.zeros.default, ([2, 2],)), weights)


def sum_with(bias: Tensor, weight: Tensor, **scales: float) -> FlatGraph:
    """A flat graph in which rows times a weight of the model are added to a bias."""
    flat = flat_with(aten.addmm.default, bias, ROWS, weight, **scales)
    (node,) = (node for node in flat.module.graph.nodes if node.target is aten.addmm.default)
    with flat.module.graph.inserting_before(next(iter(flat.module.graph.nodes))):
        given = flat.module.graph.placeholder("by_columns")
    given.meta["val"] = weight
    node.args = (*node.args[:2], given)
    flat.weights = (replace(flat.weights[0], example=weight), *flat.weights)
    return flat


BIAS, BY_COLUMNS = torch.randn(6), torch.randn(8, 6)


def test_a_layer_by_columns_becomes_a_linear_one() -> None:
    flat = sum_with(BIAS, BY_COLUMNS, beta=1.0)
    assert lower(flat) == 1
    (node,) = (node for node in flat.module.graph.nodes if node.target is torch.ops.selective.linear.default)
    x, weight, bias = (operand.meta["val"] for operand in node.args)
    assert x is ROWS and bias is BIAS and weight.shape == (6, 8) and weight.mT.is_contiguous() and not node.kwargs
    assert lower(flat) == 0


@pytest.mark.parametrize(
    "flat",
    [
        lambda: sum_with(BIAS, BY_COLUMNS, alpha=0.5),
        lambda: sum_with(BIAS, BY_COLUMNS, beta=2),
        lambda: sum_with(torch.randn(4, 6), BY_COLUMNS),
        lambda: sum_with(torch.randn(1), BY_COLUMNS),
        lambda: sum_with(BIAS, TwoTensor(BY_COLUMNS, BY_COLUMNS)),
        lambda: sum_with(BIAS, torch.randn(8, 7)[:, :6]),
        lambda: flat_with(aten.addmm.default, BIAS, ROWS, BY_COLUMNS),
    ],
    ids=["part of a product", "twice the bias", "a matrix", "one number", "a class of its own", "a part", "computed"],
)
def test_other_sums_stay(flat: Any) -> None:
    made = flat()
    assert lower(made) == 0 and any(node.target is aten.addmm.default for node in made.module.graph.nodes)


def put_back(how: str) -> FlatGraph:
    """A flat graph in which results of groups, or what else ``how`` says, are put in another order."""
    flat = flat_with(aten._grouped_mm.default, ROWS, EXPERTS.mT, ENDS)
    graph = flat.module.graph
    (node,) = (node for node in graph.nodes if node.target is aten._grouped_mm.default)
    places = torch.tensor([True, False, True, True]) if how == "a mask" else torch.tensor([2, 0, 1, 3])
    flat.module.register_buffer("_places", places)
    with graph.inserting_after(node):
        index = graph.get_attr("_places")
    index.meta["val"] = places
    node.meta["val"] = torch.randn(4, 6)
    with graph.inserting_after(index):
        weighted = graph.call_function(aten.mul.Tensor, (node.args[0] if how == "other rows" else node, 0.5))
        if how == "sums":
            weighted.target, weighted.args = aten.cumsum.default, (node, 0)
    weighted.meta["val"] = torch.randn(4, 6)
    with graph.inserting_after(weighted):
        indices = [index, index] if how == "elements" else [None, index] if how == "columns" else [index]
        taken = graph.call_function(aten.index.Tensor, (weighted, indices))
    taken.meta["val"] = torch.randn(4, 6)
    return flat


@pytest.mark.parametrize("how", ["results", "a mask", "other rows", "sums", "elements", "columns"])
def test_results_of_groups_are_put_back_by_themselves(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = put_back(how)
    assert lower(flat) == 1 + (how == "results")
    taken = [node for node in flat.module.graph.nodes if node.target is take_rows]
    assert len(taken) == (how == "results")
    with monkeypatch.context() as patch:
        patch.setattr(FlatGraph, "device", torch.device("cuda"))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        flat = put_back("results")
        assert lower(flat) == 1 == len(grouped_of(flat))


def with_weight(convert: bool, weight: Tensor) -> FlatGraph:
    """A linear layer in float32 whose weight is an input of bfloat16, converted or with 0 added."""
    flat = flat_with(aten.linear.default, torch.randn(4, 8), weight.float())
    (node,) = (node for node in flat.module.graph.nodes if node.target is aten.linear.default)
    given = next(iter(flat.module.graph.nodes))
    given.meta["val"] = weight
    flat.weights = (replace(flat.weights[0], example=weight), *flat.weights[1:])
    with flat.module.graph.inserting_before(node):
        target, by = (aten.to.dtype, torch.float32) if convert else (aten.add.Tensor, 0)
        made = flat.module.graph.call_function(target, (given, by))
    made.meta["val"] = weight.float()
    node.args = (node.args[0], made)
    return flat


@pytest.mark.parametrize("how", ["converted", "computed", "of a class"])
def test_a_weight_that_is_converted_first_is_multiplied_by_our_kernel(how: str) -> None:
    weight = torch.randn(6, 8).bfloat16()
    flat = with_weight(how != "computed", TwoTensor(weight, weight) if how == "of a class" else weight)
    assert lower(flat) == (how == "converted")
    found = [node for node in flat.module.graph.nodes if node.target is torch.ops.selective.linear.default]
    assert len(found) == (how == "converted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_and_biases_are_given_to_the_kernel_as_it_reads_them(dtype: torch.dtype) -> None:
    rows = torch.randn(4, 2, 8).to(dtype)
    metadata = [torch.zeros(2, dtype=torch.int32)] * 2 + [torch.zeros(1, 1, dtype=torch.int32), torch.zeros(4).long()]
    pools = [torch.zeros(1, 2, 16, 8, dtype=dtype)] * 2
    target = torch.ops.selective.ragged_attention.default
    sinks, biases = torch.randn(2).to(dtype), torch.randn(4, 2, 5).to(dtype)
    options = (0.5, 0, 0.0, 0, sinks, None, None, None, None, 0, biases)
    flat = flat_with(target, rows, rows, rows, *pools, *metadata, *options)
    assert lower(flat) == (dtype is not torch.float32)
    (node,) = (node for node in flat.module.graph.nodes if node.target is target)
    assert [node.args[place].meta["val"].dtype for place in (13, 19)] == [torch.float32] * 2
