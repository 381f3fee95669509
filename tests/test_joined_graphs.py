"""Graphs of one code with other sides of its branches, joined: what each of them gives, as a condition says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from selective_compile import joined_graphs
from selective_compile.graph_writes import GraphWrites
from selective_compile.joined_graphs import ApartError, JoinedGraphs
from selective_compile.passes.normalise import SOURCE, keep_sources

LAST = 4
Side = Callable[[Tensor, bool], Tensor]  # ids [3] of a request, and whether it is long
HALVES, SQUARES = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([1.0, 4.0, 9.0])


def traced(side: Side, *, long: bool) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph, in front of which it is asked whether the ids are large; and its inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(module: fx.GraphModule, examples: list[Any]) -> Any:
        keep_sources(module)
        found.append((module, list(examples)))
        return module.forward

    def asking(ids: Tensor) -> tuple[Tensor, Tensor]:
        large = ids.sum() > LAST
        return side(ids, long), large

    torch.compile(asking, backend=keep, fullgraph=True)(torch.arange(3))
    return found[0]


def joint_of(side: Side) -> JoinedGraphs:
    return JoinedGraphs(side_of(side, long=False), side_of(side, long=True), "large", holds=False)


def side_of(side: Side, *, long: bool) -> joined_graphs.Side:
    module, inputs = traced(side, long=long)
    return joined_graphs.Side(module=module, writes=GraphWrites(module, [torch.arange(3), *inputs[1:]]))


def constants(ids: Tensor, long: bool) -> Tensor:
    return (ids * (2.5 if long else 0.5)).sin() + 1


def more_of_one(ids: Tensor, long: bool) -> Tensor:
    found = ids * 0.5
    if long:
        found = (found + 1).cos().square()
    return found.exp() - found


def read_twice(ids: Tensor, long: bool) -> Tensor:
    factor = ids.float() if long else ids + 0.25
    return factor.sin() * factor.cos()


def inputs_of_one(ids: Tensor, long: bool) -> Tensor:
    return ids * (SQUARES if long else HALVES)


def nothing_else(ids: Tensor, long: bool) -> Tensor:
    return ids * HALVES


def at_the_end(ids: Tensor, long: bool) -> Tensor:
    return ids.cos() if long else ids.sin()


def written_by_both(ids: Tensor, long: bool) -> Tensor:
    total = torch.zeros(3)
    total.add_(ids * (2.0 if long else 3.0))
    return total + 1


SIDES = [constants, more_of_one, read_twice, inputs_of_one, nothing_else, at_the_end, written_by_both]


@pytest.mark.parametrize("side", SIDES)
def test_it_gives_what_the_side_of_its_condition_gives(side: Side) -> None:
    joint, inputs = joint_of(side), [traced(side, long=long)[1] for long in (False, True)]
    module, weights = joint.module(), [*inputs[0][1:], *(inputs[1][place] for place in joint.added)]
    module.graph.lint()
    for ids in (torch.tensor([0, 1, 1]), torch.tensor([3, 2, 4])):
        found, _ = module(ids, *weights)
        assert torch.equal(found, side(ids, bool(ids.sum() > LAST))), ids


def test_what_both_have_is_there_once() -> None:
    """And is chosen once, however often it is read."""
    calls = [str(getattr(node.target, "__name__", node.target)) for node in joint_of(read_twice).graph.nodes]
    assert [calls.count(name) for name in ("sin", "cos", "where", "float", "add")] == [1, 1, 1, 1, 1]
    assert joint_of(inputs_of_one).added == [1]
    assert "where" not in {getattr(n.target, "__name__", "") for n in joint_of(nothing_else).graph.nodes}


def written_by_one(ids: Tensor, long: bool) -> Tensor:
    total = torch.ones(3)
    if long:
        total.add_(ids)
    return total * 2


def written_to_what_is_chosen(ids: Tensor, long: bool) -> Tensor:
    """Of one of which the other is a view."""
    whole = torch.ones(2, 3)
    part = whole[1] if long else whole[0]
    part[:2].add_(ids[:2])
    return whole.sum(0)


def of_other_sizes(ids: Tensor, long: bool) -> Tensor:
    return (ids[:, None] if long else torch.stack((ids, ids), 1)).sum(1)


def of_other_types(ids: Tensor, long: bool) -> Tensor:
    return (ids * 2 if long else ids * 2.0) + 1


@pytest.mark.parametrize("side", [written_by_one, written_to_what_is_chosen, of_other_sizes, of_other_types])
def test_what_cannot_be_joined_is_apart(side: Side) -> None:
    with pytest.raises(ApartError):
        joint_of(side)


def test_tokens_that_only_long_requests_have_are_none() -> None:
    short, long = (side_of(inputs_of_one, long=long) for long in (False, True))
    other = next(node for node in reversed(long.module.graph.nodes) if node.op == "placeholder")
    other.meta |= {"example_value": torch.zeros(1, 3, dtype=torch.int64), SOURCE: "L['more_ids']"}
    with pytest.raises(ApartError, match="an input for long requests alone"):
        JoinedGraphs(short, long, "large", holds=False)
