"""What is done to a looked-up bias row by row goes in front of the lookup, and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.functional import make_functional
from selective_compile.passes.late_lookups import look_up_late
from selective_compile.passes.normalise import tidy
from selective_compile.passes.spellings import SPELT_OUT

aten = torch.ops.aten
LENGTH = 7
NUMBERS = torch.randn(2, 3, LENGTH, 4, generator=torch.Generator().manual_seed(0))
FACTOR = torch.rand(LENGTH, 1, generator=torch.Generator().manual_seed(1)) + 0.5
Function = Callable[[Tensor, Tensor], Tensor]


def looked_up(numbers: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    distance = places[:, None] - places[None, :]
    found = numbers.gather(-1, distance.clamp(0, 3).expand(2, 3, -1, -1))
    return found.masked_fill((distance < 0) | (distance > 3), 0.0)


MOVED: dict[str, tuple[Function, int]] = {
    "a factor of rows": (lambda x, factor: looked_up(x) * factor, 1),
    "on the left": (lambda x, factor: factor * looked_up(x), 1),
    "a number": (lambda x, factor: looked_up(x) * 0.3, 1),
    "in more bits": (lambda x, factor: (looked_up(x.bfloat16()).float() * factor).bfloat16(), 3),
    "filled otherwise": (lambda x, factor: torch.where(factor > 1, looked_up(x), 0.0) * factor, 1),
}
LEFT: dict[str, Function] = {
    "a factor of pairs": lambda x, factor: looked_up(x) * factor.T,
    "of more requests": lambda x, factor: looked_up(x)[:1] * x[..., :1],
    "filled with ones": lambda x, factor: looked_up(x).masked_fill(factor > 1, 1.0) * factor,
    "read elsewhere": lambda x, factor: (found := looked_up(x)) * factor + found,
    "no lookup": lambda x, factor: x * factor,
    "a lookup by rows": lambda x, factor: x.gather(2, torch.zeros(2, 3, 5, 4, dtype=torch.int64)) * 2.0,
    "a table of words": lambda x, factor: F.embedding(torch.zeros(2, 5, dtype=torch.int64), x[0, 0]) * 2.0,
}


def rewritten(function: Function) -> tuple[torch.fx.GraphModule, int]:
    module = make_fx(function, SPELT_OUT, tracing_mode="fake", pre_dispatch=True)(NUMBERS, FACTOR)
    make_functional(module)
    tidy(module)
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if node.op == "placeholder")
    assert isinstance(mode, FakeTensorMode)
    return module, look_up_late(module, mode)


@pytest.mark.parametrize("name", MOVED)
def test_the_lookup_is_the_last_but_for_what_fills(name: str) -> None:
    function, count = MOVED[name]
    module, found = rewritten(function)
    assert found == count
    assert torch.equal(module(NUMBERS, FACTOR), function(NUMBERS, FACTOR))
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    gather = targets.index(aten.gather.default)
    assert not {aten.mul.Tensor, aten.to.dtype, aten._to_copy.default} & set(targets[gather:])


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    module, found = rewritten(LEFT[name])
    assert found == 0
    assert torch.equal(module(NUMBERS, FACTOR), LEFT[name](NUMBERS, FACTOR))
