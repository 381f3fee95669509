"""Parts of a graph are run on the CPU, whatever device the graph is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.position_limit import position_limit
from tests.decoders import MAX_POSITIONS, Decoder, counted
from tests.exactness import step_program
from tests.passes.graphs import analyse, as_on_a_gpu, trace
from tests.passes.spellings import scores_of, weigh


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Makes positions, numbers and a triangle of its own, each on the device that it names."""
    places = torch.arange(q.shape[1], device=q.device)
    near = (places[:, None] - places[None]).float() < torch.full((), 6.5, device=q.device)
    keep = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril() & near
    return weigh(scores_of(q, k).masked_fill(~keep, -1e30).softmax(-1), v)


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with a bias that is linear in the distance."""
    places = torch.arange(q.shape[1], device=q.device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=q.device)
    bias = (places[None] - places[:, None]) * slopes[:, None, None]
    hidden = torch.zeros_like(bias).masked_fill(places[None] > places[:, None], -torch.inf)
    return weigh((scores_of(q, k) + bias + hidden).softmax(-1), v)


@pytest.mark.parametrize("attend", [windowed, sloped])
def test_masks_of_a_model_on_a_gpu_are_proved(attend: Callable[..., Any]) -> None:
    traced = trace(attend)
    as_on_a_gpu(traced.graph)
    (call,), (same,) = analyse(traced).calls, analyse(trace(attend)).calls
    assert not traced.refusals and call.family is not None and same.family is not None
    for part in ("window", "chunk", "prefix", "slopes"):
        assert getattr(call.family, part) == getattr(same.family, part)
    assert (call.family.window, len(call.family.slopes)) == ((7, 0) if attend is windowed else (0, 4))


def test_a_value_is_on_the_cpu() -> None:
    traced = trace(lambda x: x + torch.arange(x.shape[1], device=x.device)[:, None])
    as_on_a_gpu(traced.graph)
    (places,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default)
    assert "cuda" in str(places.kwargs)
    found = evaluate(traced, places, batch=2, tokens=5, given={})
    assert found.device.type == "cpu" and found.tolist() == list(range(5))


def test_the_end_of_a_table_is_found_of_a_model_on_a_gpu() -> None:
    program = step_program(Decoder(layers=1, positions=lambda ids: counted(ids) + torch.full((1,), 2)))
    flat = program.rewritten.flat
    assert flat is not None
    as_on_a_gpu(flat.module.graph)
    assert position_limit(flat) == MAX_POSITIONS - 2 == program.max_positions
