"""What a forward computes of constants alone is computed once, bit for bit as it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from selective_compile.passes.fold_constants import MOST, constants_of, may_fold, send_indices
from selective_compile.passes.host_reads import host_read
from selective_compile.step_program import StepProgram
from tests.decoders import WIDTH, Decoder
from tests.exactness import TOLERANCE, step_program
from tests.lengths import errors
from tests.longrope import longrope
from tests.passes.test_host_reads import flat_with

aten = torch.ops.aten
PROMPTS = [list(range(9)), [5, 7, 9]]
FREQUENCIES = 1 / 100.0 ** (torch.arange(0, WIDTH, dtype=torch.float32) / WIDTH)


def frequencies(x: Tensor) -> Tensor:
    return (x * (1 / 100.0 ** (torch.arange(0, WIDTH, dtype=torch.float32) / WIDTH))).sin()


def of_a_table(x: Tensor) -> Tensor:
    return x + torch.tensor([0.5, -0.5]).repeat(WIDTH // 2).to(x.device)


def only_created(x: Tensor) -> Tensor:
    return x + torch.full((WIDTH,), 0.25)


def of_weights(x: Tensor, weight: Tensor = FREQUENCIES) -> Tensor:
    return (x * weight.sqrt()).sin()


def too_large(x: Tensor) -> Tensor:
    return x + torch.arange(WIDTH * (MOST // WIDTH + 1)).sin().reshape(-1, WIDTH).sum(0) * 1e-3


@pytest.mark.parametrize(
    ("mix", "folded"),
    [
        (frequencies, [FREQUENCIES]),
        (of_a_table, [torch.tensor([0.5, -0.5]).repeat(WIDTH // 2)]),
        (only_created, []),
        (of_weights, []),
        (too_large, []),
    ],
)
def test_what_is_made_of_constants_is_one(mix: Callable[[Tensor], Tensor], folded: list[Tensor]) -> None:
    model = Decoder(layers=1, mix=mix)
    program = step_program(model)
    module = module_of(program)
    found = [getattr(module, str(node.target)) for node in module.graph.nodes if "folded" in str(node.target)]
    assert len(found) == len(folded)
    assert all(map(torch.equal, found, folded))
    assert errors(model, program, PROMPTS) < TOLERANCE


def module_of(program: StepProgram) -> fx.GraphModule:
    flat = program.rewritten.flat
    assert flat is not None
    return flat.module


def test_no_step_of_phimoe_makes_its_frequencies() -> None:
    called = {node.target for node in module_of(step_program(longrope(40, "phimoe"))).graph.nodes}
    assert called.isdisjoint({aten.arange.start_step, aten.pow.Scalar, aten.reciprocal.default})


@pytest.mark.parametrize(
    "target",
    [aten.rand.default, aten.empty.memory_format, aten.fill_.Scalar, torch.ops.selective.linear.default, min],
    ids=str,
)
def test_what_may_give_something_else_each_time_is_none(target: Any) -> None:
    node = fx.Graph().call_function(target)
    node.meta["val"] = torch.zeros(3)
    assert not may_fold(node)


@pytest.mark.parametrize("target", [aten.index.Tensor, aten.index_put.default])
def test_constant_indices_of_the_host_lie_on_the_device(target: Any) -> None:
    """Of a device that has no numbers, in the place of a GPU."""
    rows, indices = torch.randn(6, 8).to("meta"), torch.tensor([3, 1])
    flat = flat_with(target, rows, [None, indices], *([rows] if target is aten.index_put.default else []))
    (node,) = flat.module.graph.find_nodes(op="call_function", target=target)
    node.meta["val"] = rows
    (output,) = flat.module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], node),)  # type: ignore[arg-type, misc]
    copies, before = host_read(flat), node.args[1][1]  # type: ignore[index]
    assert copies is not None and "copies between the host's memory and the device" in copies
    assert send_indices(flat, dict(constants_of(flat.module))) == 1
    assert host_read(flat) is None and node.args[1][1] is not before  # type: ignore[index]
    sent = getattr(flat.module, str(node.args[1][1].target))  # type: ignore[index, union-attr]
    assert (sent.device.type, sent.dtype, sent.shape) == ("meta", torch.int64, (2,))
    assert send_indices(flat, dict(constants_of(flat.module))) == 0


def test_indices_stay_where_rows_are_the_hosts_too() -> None:
    flat = flat_with(aten.index.Tensor, torch.randn(6, 8), [torch.tensor([3, 1])])
    assert send_indices(flat, dict(constants_of(flat.module))) == 0
