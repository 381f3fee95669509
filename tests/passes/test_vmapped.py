"""Masks of functions of indices under `vmap` are what they are when called with all indices at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from selective_compile.passes.vmapped import Broadcasting, Nesting, interpreter_of


def captured(function: Callable[..., Tensor], *arguments: Any) -> fx.GraphModule:
    """Dynamo's graph."""
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        graphs.append(module)
        return module

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return graphs[0]


def masks(kept: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers makes them: over keys first, then over queries and the batch."""
    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        kept = torch.vmap(kept, in_dims=dims, out_dims=0)
    return kept


PADDING = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]) != 0
NUMBERS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, i, j: j <= i,
    "prefix": lambda b, i, j: i.new_ones((), dtype=torch.bool) & ((j <= i) | (j < 3)),
    "keys alone": lambda b, i, j: j < 3,
    "windows and chunks": lambda b, i, j: (j <= i) & (i - j < 3) & (i // 4 == j // 4),
    "another type": lambda b, i, j: (i.to(torch.int8) * 100 // 7) > j.to(torch.int32),
    "a number that is no index": lambda b, i, j: j + i.new_ones((), dtype=torch.int64) <= i,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_functions_of_numbers_are_broadcast(name: str) -> None:
    def of(batch: Tensor, length: Tensor) -> Tensor:
        places = torch.arange(length.shape[0])
        return masks(NUMBERS[name])(torch.arange(batch.shape[0]), places, places)

    given = torch.zeros(3), torch.zeros(5)
    module = captured(of, *given)
    runner = interpreter_of(module)
    assert isinstance(runner, Broadcasting)
    (found,) = runner.run()
    wanted = of(*given)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_numbers_are_looked_up_in_tensors_from_outside() -> None:
    def of(padding: Tensor) -> Tensor:
        batch, places = torch.arange(padding.shape[0]), torch.arange(padding.shape[1])
        looked_up = masks(lambda b, i, j: (j <= i) & torch.ops.aten.index(padding, [b, j]))
        return looked_up(batch, places, places)

    runner = interpreter_of(captured(of, PADDING))
    assert isinstance(runner, Broadcasting)
    assert torch.equal(runner.run(PADDING)[0], of(PADDING))


OTHERS: dict[str, Callable[..., Any]] = {
    "a sum over another dimension": lambda x: torch.vmap(lambda row: row.sum(0))(x),
    "rows": lambda x: torch.vmap(lambda row: row + row.flip(0))(x),
    "the other dimension": lambda x: torch.vmap(lambda row: row * 2, in_dims=1)(x),
    "rows times two": lambda x: torch.vmap(lambda row: row * 2)(x),
    "numbers and a row": lambda x: torch.vmap(lambda number: number + x[0])(x[:, 0]),
    "vmap of another depth": lambda x: (
        torch.vmap(torch.vmap(lambda a, b: a < b, (0, None)), (None, 0))(x[0], x[:, 0])
        & torch.vmap(lambda a: a < 3)(x[0])
    ),
    "another place": lambda x: torch.vmap(torch.vmap(lambda each: each < 2), out_dims=1)(x),
    "an operator that is not known": lambda x: torch.vmap(torch.vmap(torch.special.i0))(x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_run_as_they_are(name: str) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    runner = interpreter_of(captured(OTHERS[name], x))
    assert type(runner) is Nesting
    assert torch.equal(runner.run(x)[0], OTHERS[name](x))


def test_a_graph_without_vmap_is_run_as_it_is() -> None:
    assert type(interpreter_of(fx.symbolic_trace(nn.ReLU()))) is Nesting


def test_what_fails_under_vmap_leaves_no_level_of_it() -> None:
    """Else whatever the process does next with tensors would be under it."""

    def of(length: Tensor) -> Tensor:
        places = torch.arange(length.shape[0])
        return torch.vmap(lambda i: torch.where(torch.fmod(i, 2) == 0, i, 0))(places)

    module = captured(of, torch.zeros(5))
    runner = interpreter_of(module)
    assert type(runner) is Nesting
    assert torch.equal(runner.run()[0], of(torch.zeros(5)))
    for node in module.graph.nodes:
        if node.target in ("fmod", torch.fmod):
            node.target = lambda *_: [].pop()
            node.op = "call_function"
    with pytest.raises(IndexError):
        interpreter_of(module).run()
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
