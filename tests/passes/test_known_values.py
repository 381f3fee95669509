"""Values of calls that are alike are asked for once, and of others each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from selective_compile import passes
from selective_compile.backend import compile_step_program
from selective_compile.options import EngineConfig
from selective_compile.passes import known_values
from selective_compile.passes.known_values import KnownValues
from tests.models import tiny

aten = torch.ops.aten


def call(mode: FakeTensorMode, shape: tuple[int, ...], target: Any, *options: Any, turned: bool = False) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with mode:
        x.meta["val"] = torch.empty(shape).mT if turned else torch.empty(shape)
    return graph.call_function(target, (x, *options))


def test_calls_that_are_alike_have_one_value() -> None:
    mode = FakeTensorMode()
    values = KnownValues(mode)
    one = values.of(call(mode, (4, 6), aten.split_with_sizes.default, [2, 4], -1))
    assert [tuple(part.shape) for part in one] == [(4, 2), (4, 4)]
    assert values.of(call(mode, (4, 6), aten.split_with_sizes.default, [2, 4], -1)) is one


@pytest.mark.parametrize(
    ("shape", "options", "turned"),
    [((4, 8), (0, 1), False), ((4, 4), (0, 1), True), ((4, 4), (0, -2), False)],
    ids=["another size", "other strides", "another constant"],
)
def test_others_have_their_own(shape: tuple[int, ...], options: tuple[int, ...], turned: bool) -> None:
    mode = FakeTensorMode()
    values = KnownValues(mode)
    known = values.of(call(mode, (4, 4), aten.transpose.int, 0, 1))
    other = values.of(call(mode, shape, aten.transpose.int, *options, turned=turned))
    assert other is not known


def asked(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    nodes: list[fx.Node] = []
    trace = known_values.traced_value
    with monkeypatch.context() as within:
        within.setattr(passes, "REWRITES", passes.REWRITES[:2])  # as on a GPU, layers go to the library
        within.setattr(known_values, "traced_value", lambda node, *given: (nodes.append(node), trace(node, *given))[1])
        compile_step_program(model, EngineConfig(compile=False, implementation="reference"))
    return len(nodes)


def test_joining_asks_no_more_of_many_layers_than_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (asked(tiny("llama", num_hidden_layers=layers), monkeypatch) for layers in (2, 6))
    assert 0 < many == few
