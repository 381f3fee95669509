"""Part of pass 1: writes in place become values where nothing else sees them, and are left where something does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
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


def a_view_read_later(x: Tensor) -> Tensor:
    whole = x * 1
    part = whole[..., :4]
    whole.add_(1)
    return part + whole[..., 4:]


def a_base_read_later(x: Tensor) -> Tensor:
    whole = x * 1
    whole.transpose(1, 2).add_(1)
    return whole


def twice_through_a_part(x: Tensor) -> Tensor:
    whole = x * 1
    part = whole[..., :4]
    part.add_(1)
    part.mul_(2)
    return whole * part[..., :1]


def a_part_and_then_the_whole(x: Tensor) -> Tensor:
    whole = x * 1
    part = whole.transpose(1, 2)[:, 2:6]
    part.relu_()
    whole.sub_(0.5)
    return part.sum(1) + whole.amax(-1)


def parts_of_a_split(x: Tensor) -> Tensor:
    whole = x.new_full((x.shape[0], 8), 1.5)
    left, right = whole.chunk(2, -1)
    left.mul_(right)
    right.add_(left)
    return torch.cat([right, whole, left], -1) * x.sum()


def through_a_view(x: Tensor) -> Tensor:
    whole = x * 1
    heads = whole.view(*x.shape[:2], 2, 4)
    heads[:, :, 1].mul_(3)
    whole += 1
    return heads.flatten(2) + whole


def copied_as_it_is(x: Tensor) -> Tensor:
    whole, other = x * 1, x * 2
    whole.copy_(other)
    other.add_(1)
    return whole + other


def as_the_type_of_an_input(x: Tensor) -> Tensor:
    """As gemma3n adds."""
    whole = (x @ x.mT).permute(2, 0, 1)
    whole += x[:, :, 0]
    return whole.contiguous().type_as(x)


def beside_an_input(x: Tensor) -> Tensor:
    """As gpt_oss puts its sinks behind scores."""
    return torch.cat([(x * 1).add_(1), x[:1].expand(x.shape)], -1)


def raised(x: Tensor) -> Tensor:
    whole = x * 1
    whole **= 2
    return whole.pow_(x)


def summed_through_a_transposition(x: Tensor) -> Tensor:
    whole = (x * 1).flatten(0, 1)
    flat = whole.view(-1)
    whole.t().cumsum_(0)
    return flat + 1


REWRITTEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "operators on what was made": (added, 2),
    "a type that adding would promote": (narrower, 1),
    "parts assigned": (assigned, 2),
    "through a permutation": (through_a_permutation, 1),
    "a part of a part": (part_of_a_part, 2),
    "a part of every row": (part_of_every_row, 3),
    "scattered": (scattered, 1),
    "one of several results": (of_several_results, 1),
    "a view read later": (a_view_read_later, 1),
    "a base read later": (a_base_read_later, 1),
    "twice through a part": (twice_through_a_part, 2),
    "a part and then the whole": (a_part_and_then_the_whole, 2),
    "parts of a split": (parts_of_a_split, 2),
    "through a view": (through_a_view, 2),
    "copied as it is": (copied_as_it_is, 2),
    "as the type of an input": (as_the_type_of_an_input, 1),
    "beside an input": (beside_an_input, 1),
    "raised": (raised, 2),
    "summed through a transposition": (summed_through_a_transposition, 1),
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


def what_may_be_the_input(x: Tensor) -> Tensor:
    return x.contiguous().add_(1)


def what_dropout_returns(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, False).add_(1)


def an_expanded_row(x: Tensor) -> Tensor:
    return (x[:1] * 1).expand(x.shape).masked_fill_(x > 0, 1.0)


def what_is_split_unsafely(x: Tensor) -> Tensor:
    whole = x * 1
    whole.unsafe_chunk(2, -1)[0].add_(1)
    return whole


def a_shape(x: Tensor) -> Tensor:
    whole = x * 1
    whole[:, :, :1].squeeze_(-1)
    return whole


@pytest.mark.parametrize(
    "function",
    [an_input, what_may_be_the_input, what_dropout_returns, an_expanded_row, what_is_split_unsafely, a_shape],
)
def test_writes_that_something_else_sees_are_left(function: Callable[[Tensor], Tensor]) -> None:
    module = graph_of(function)
    before = writes(module)
    assert before == 1
    assert make_functional(module) == 0
    assert writes(module) == before
    torch.testing.assert_close(module(X.clone()), function(X.clone()))


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[..., 1:],
    lambda x: x[:, :2],
    lambda x: x[..., 0],
    lambda x: x.transpose(0, -1),
    lambda x: x.permute(*range(1, x.dim()), 0),
    lambda x: x.unsqueeze(1),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.chunk(2, -1)[-1],
    lambda x: x.split(1, 0)[0],
    lambda x: x.unflatten(0, (1, -1)),
    lambda x: x.reshape(-1),
    lambda x: x.contiguous(),
    lambda x: x[0:],
    lambda x: x * 1,
]
WRITES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.add_(1),
    lambda x: x.mul_(-2),
    lambda x: x.copy_(x.flip(0) * 2),
    lambda x: x.masked_fill_(x > 0, 0.5),
    lambda x: x.copy_(x.sum()),
]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9))
def test_programs_of_views_and_writes_keep_their_results(steps: list[tuple[bool, int, int]]) -> None:
    """Of those in which all writes become values; one that is left has pass 2 refuse the graph."""

    def run(x: Tensor) -> Tensor:
        values = [x * 1]
        for writes_now, value, which in steps:
            chosen = values[value % len(values)]
            if writes_now:
                values.append(WRITES[which % len(WRITES)](chosen))
            elif chosen.dim() > 1 and min(chosen.shape) > 1:
                values.append(VIEWS[which % len(VIEWS)](chosen))
        return torch.cat([value.reshape(-1) for value in values])

    x = torch.arange(24.0).reshape(2, 3, 4) - 11
    module = make_fx(run, tracing_mode="fake", pre_dispatch=True)(x.clone())
    make_functional(module)
    assume(writes(module) == 0)
    torch.testing.assert_close(module(x.clone()), run(x.clone()))
