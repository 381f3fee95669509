"""Linear attention is a recurrence where its factors fall by a rate for each token, and is none where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.passes import Rewrite
from selective_compile.rewriting import proved
from tests.exactness import TOLERANCE, engine_error
from tests.lightning import HEADS, SLOPES, VOCABULARY, Decay, Lightning, geometric


def families(rewritten: Rewrite) -> list[str]:
    return [call.family for call in rewritten.traced.recurrences]


def test_factors_that_are_computed_bound_no_request() -> None:
    model = Lightning(block=None).eval()
    rewritten = proved(model)[1]
    assert rewritten.flat is not None and families(rewritten) == ["linear attention"] * 2
    assert rewritten.traced.max_tokens is None
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_slopes_are_told_by_the_factors() -> None:
    slopes = proved(Lightning().eval())[1].traced.recurrences[0].tensors["slopes"].node
    found: Tensor = getattr(slopes.graph.owning_module, str(slopes.target))
    assert found.shape == (HEADS,) and torch.allclose(found, torch.tensor(SLOPES), rtol=1e-6, atol=0)


def test_a_buffer_that_the_slopes_are_from_is_watched() -> None:
    model = Lightning().eval()
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    engine.submit([1, 2, 3], max_new_tokens=2).result()
    with torch.no_grad():
        model.layers[0].table.mul_(0.5)
    assert "a proof has read must keep their values, got others in table" in str(
        engine.submit([1, 2, 3], max_new_tokens=2).result().error
    )


OTHERS: dict[str, Decay] = {
    "a square of the distance": lambda d: torch.exp(-0.01 * d * d).expand(HEADS, -1, -1),
    "growing": lambda d: torch.exp(0.01 * d).expand(HEADS, -1, -1),
    "half of it from the start": lambda d: 0.5 * geometric(d),
    "a window": lambda d: geometric(d) * (d < 9),
    "rounded": lambda d: geometric(d).bfloat16().float(),
    "one pair of tokens": lambda d: geometric(d) * (1 + 0.1 * ((d == 3) & (torch.arange(len(d)) == 5))),
}


FAR: dict[str, Decay] = {
    "a window of 700": lambda d: geometric(d) * (d < 700),
    "no less behind 600": lambda d: geometric(d.clamp(max=600)),
    "a window of 5000": lambda d: geometric(d) * (d < 5000),
}


@pytest.mark.parametrize("name", FAR)
def test_what_happens_to_a_distance_far_away_is_seen(name: str) -> None:
    assert families(proved(Lightning(decay=FAR[name], block=None).eval())[1]) == []


def test_slopes_that_are_trained_are_not_taken_for_constants() -> None:
    model = Lightning(block=None).eval()
    for layer in model.layers:
        layer.rates = torch.nn.Parameter(torch.tensor(SLOPES))
        layer.decay = lambda d, layer=layer: torch.exp(-layer.rates[:, None, None] * d)
    assert families(proved(model)[1]) == []


@pytest.mark.parametrize("heads", [(1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 1)], ids=str)
def test_heads_of_unequal_number_are_left(heads: tuple[int, int, int]) -> None:
    model = Lightning(block=None).eval()
    for layer in model.layers:
        layer.heads = heads
    assert families(proved(model)[1]) == []
    assert sc.explain(model).verdict == "isolated"


@pytest.mark.parametrize("length", [10, 40])
def test_a_padded_call_of_any_number_of_blocks_is_right(length: int) -> None:
    torch._dynamo.reset()
    model = Lightning().eval()
    compiled = torch.compile(model, backend="selective", options={"inductor": False})
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        assert torch.allclose(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("name", OTHERS)
def test_other_factors_are_no_recurrence(name: str, block: int | None) -> None:
    assert families(proved(Lightning(decay=OTHERS[name], block=block).eval())[1]) == []


def test_whole_slices_are_no_cut_where_a_graph_is_for_no_more() -> None:
    captured, rewritten = proved(Lightning(block=16).eval())
    assert captured.max_tokens is None and rewritten.traced.max_tokens is None
