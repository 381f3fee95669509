"""That a loop over blocks goes on as a recurrence is tried: one that does is ragged at any length, others are not."""

from __future__ import annotations

import pytest
import torch

import selective_compile as sc
from selective_compile.rewriting import proved
from tests.exactness import TOLERANCE, engine_error
from tests.lightning import BLOCK, VOCABULARY, WIDTH, Lightning, Mixer, geometric

EAGER = sc.EngineConfig(compile=False)


class Mixture(Mixer):
    """With a loop behind it over the experts that were hit, which cannot be captured."""

    def __init__(self, kept: float = 1.0) -> None:
        super().__init__(geometric, kept, BLOCK)
        self.experts = Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(super().forward(hidden))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        chosen, out = rows[:, :2].argmax(-1), torch.zeros_like(rows)
        for expert in range(2):
            if not (chosen == expert).any():
                continue
            (found,) = torch.where(chosen == expert)
            out[found] += rows[found] @ self.weights[expert]
        return out.view(x.shape)


def test_requests_of_many_blocks_are_exact() -> None:
    model = Lightning().eval()
    assert sc.explain(model).verdict == "ragged"
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    prompt = torch.randint(VOCABULARY, (5 * BLOCK + 3,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens = list(prompt)
    for _ in range(BLOCK + 2):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    found = sc.Engine(model, EAGER).submit(prompt, max_new_tokens=BLOCK + 2).result()
    assert list(found.tokens) == tokens[len(prompt) :]


@pytest.mark.parametrize("kept", [0.0, 0.9, 1.1])
def test_a_loop_that_goes_on_otherwise_is_not_taken_for_the_recurrence(kept: float) -> None:
    captured, rewritten = proved(Lightning(kept=kept).eval())
    assert rewritten.flat is None and not rewritten.traced.recurrences
    assert captured.ends


@pytest.mark.parametrize(("kept", "verdict"), [(1.0, "ragged"), (0.9, "isolated")])
def test_blocks_are_tried_where_other_modules_cannot_be_captured(kept: float, verdict: str) -> None:
    model = Lightning().eval()
    model.layers = torch.nn.ModuleList(Mixture(kept) for _ in range(2))
    assert sc.explain(model).verdict == verdict
    if verdict == "ragged":
        assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_what_else_ends_a_graph_ends_it_still() -> None:
    model = Lightning().eval()
    model.places = torch.nn.Embedding(4 * BLOCK, 16)
    forward = model.forward

    def with_places(input_ids: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[1] <= 4 * BLOCK
        return forward(input_ids)

    model.forward = with_places
    captured, rewritten = proved(model)
    assert rewritten.flat is not None and captured.max_tokens == 4 * BLOCK


def test_layers_may_have_blocks_of_several_sizes() -> None:
    model = Lightning().eval()
    model.layers[1] = Mixer(geometric, 1.0, 2 * BLOCK + 5)
    captured, rewritten = proved(model)
    assert rewritten.flat is not None and captured.max_tokens is None and rewritten.traced.max_tokens is None


def test_a_second_size_that_goes_on_otherwise_is_seen() -> None:
    model = Lightning().eval()
    model.layers[1] = Mixer(geometric, 0.5, 3 * BLOCK)
    assert proved(model)[1].flat is None
