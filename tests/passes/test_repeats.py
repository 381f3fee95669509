"""Pieces of a graph that come again are found, and only where each reads what the one before it read."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from selective_compile.passes.repeats import KEPT, LEAST_SAVED, Repeat, repeats

LENGTH = 10  # nodes in a layer of `stack`
ENOUGH = KEPT + -(-LEAST_SAVED // LENGTH)
Layer = Callable[[fx.Graph, fx.Node, int], fx.Node]


def chain(graph: fx.Graph, value: fx.Node, *constants: float) -> fx.Node:
    for constant in constants:
        value = graph.call_function(operator.mul, (value, constant))
    return value


def plain(graph: fx.Graph, value: fx.Node, number: int, constant: float = 3.0) -> fx.Node:
    """`LENGTH` nodes, two of them reading a weight of the layer's own."""
    weight = next(node for node in graph.nodes if node.name == f"w{number}")
    scaled = graph.call_function(operator.mul, (value, weight))
    inner = chain(graph, scaled, 2.0, constant, 4.0, 5.0, 6.0, 7.0, 8.0)
    return graph.call_function(operator.add, (graph.call_function(operator.sub, (inner, value)), weight))


def stack(count: int, layer: Layer = plain) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for number in range(count):
        graph.placeholder(f"w{number}")
    value = chain(graph, value, 0.5)
    for number in range(count):
        value = layer(graph, value, number)
    graph.output((graph.call_function(operator.neg, (value,)),))
    return graph


def found_in(graph: fx.Graph, other_kind: str = "") -> list[Repeat]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return repeats(graph, {node: "other" if node.name == other_kind else "weight" for node in placeholders})


def test_layers_and_their_own_weights_are_found() -> None:
    (found,) = found_in(stack(12))
    # Where the first piece begins is open: behind it, each ends where the next begins.
    assert len(found.pieces) in (11, 12) and {len(piece) for piece in found.pieces} == {LENGTH}
    nodes = [node for piece in found.pieces for node in piece]
    assert all(node.next is behind for node, behind in zip(nodes, nodes[1:], strict=False))
    first = int(found.inputs[0][0].name[1:])
    for number, inputs in enumerate(found.inputs, first):
        assert {node.name for node in inputs} <= {f"w{number}", f"w{number + 1}"}
    assert found.input_map(0, 3)[found.inputs[0][0]] is found.inputs[3][0]


def test_too_few_are_left_alone() -> None:
    assert found_in(stack(ENOUGH - 1)) == []
    assert len(found_in(stack(ENOUGH + 1))) == 1


def test_a_layer_with_another_constant_ends_them() -> None:
    def odd(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return plain(graph, value, number, 9.0 if number == 4 else 3.0)

    (found,) = found_in(stack(18, odd))
    changed = {node for node in found.pieces[0][0].graph.nodes if 9.0 in node.args}
    assert len(changed) == 1 and not any(changed & set(piece) for piece in found.pieces)
    assert len(found.pieces) in (12, 13)


@pytest.mark.parametrize(("written", "others"), [(1, 1.0), (True, 1.0), (-0.0, 0.0)])
def test_equal_constants_of_another_type_or_sign_are_others(written: float, others: float) -> None:
    def odd(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return plain(graph, value, number, written if number == 6 else others)

    assert found_in(stack(13, odd)) == []


def test_a_layer_that_reads_two_layers_back_is_not_like_the_others() -> None:
    values: list[fx.Node] = []

    def reaching(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        values.append(value)
        return plain(graph, values[max(0, number - 3)] if number == 9 else value, number)

    (found,) = found_in(stack(24, reaching))
    assert len(found.pieces) == 15  # it can be the first of them: what that one reads stands before them all


def test_layers_that_take_turns_are_one_piece() -> None:
    def turns(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        shared = [node for node in graph.nodes if node.op == "call_function"][:2]
        return graph.call_function(operator.add, (plain(graph, value, number), shared[number % 3 == 2]))

    def masks(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return turns(graph, graph.call_function(operator.neg, (value,)) if number == 0 else value, number)

    (found,) = found_in(stack(24, masks))
    assert len(found.pieces[0]) == 3 * (LENGTH + 1) and len(found.pieces) in (7, 8)


def test_values_that_are_read_behind_the_layers_are_kept() -> None:
    graph = stack(16)
    output = next(iter(reversed(graph.nodes)))
    middle = [node for node in graph.nodes if node.op == "call_function"][7 * LENGTH]
    output.args = ((*output.args[0], middle),)
    assert all(middle not in piece for repeat in found_in(graph) for piece in repeat.pieces)


def test_inputs_of_another_kind_end_them() -> None:
    (found,) = found_in(stack(16), other_kind="w3")
    assert "w3" not in {node.name for inputs in found.inputs for node in inputs}
    assert len(found.pieces) >= 11


def test_inputs_are_what_each_piece_reads_where_some_share_a_weight() -> None:
    def shared(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return plain(graph, value, 0 if number < 12 else number)

    for repeat in found_in(stack(24, shared)):
        for piece, inputs in zip(repeat.pieces, repeat.inputs, strict=True):
            assert {given.name for node in piece for given in node.all_input_nodes if given.op == "placeholder"} == {
                given.name for given in inputs
            }


def test_layers_of_two_kinds_are_two_runs() -> None:
    def kinds(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return plain(graph, value, number, 3.0 if number < 13 else 9.0)

    first, second = found_in(stack(26, kinds))
    assert not {n for piece in first.pieces for n in piece} & {n for piece in second.pieces for n in piece}


def test_constants_of_the_graph_are_told_apart_by_their_values() -> None:
    module = torch.nn.Module()
    for number in range(14):
        module.register_buffer(f"c{number}", torch.tensor([1.0, 2.0 if number < 13 else 3.0]))

    def reading(graph: fx.Graph, value: fx.Node, number: int) -> fx.Node:
        return plain(graph, graph.call_function(operator.mul, (value, graph.get_attr(f"c{number}"))), number)

    graph = fx.GraphModule(module, stack(14, reading)).graph
    (found,) = found_in(graph)
    read = {str(node.target) for piece in found.pieces for node in piece if node.op == "get_attr"}
    assert "c13" not in read and "c11" in read
