"""What a trial of isolated modules has to see: steps of `generate` behind long prompts, and the model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import selective_compile as sc
from tests.models import tiny

CONFIG = sc.EngineConfig(compile=False)
EXPERTS, CAPACITY = 4, 60


class Capacity(nn.Module):
    """Experts that take so many tokens of a call and no more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(size, EXPERTS),
            nn.ModuleList(nn.Linear(size, size) for _ in range(EXPERTS)),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        taken = F.one_hot(chosen, EXPERTS).sum(1).cumsum(0) <= CAPACITY
        each = torch.zeros(rows.shape[0], EXPERTS).scatter(1, chosen, weights) * taken
        results = torch.stack([expert(rows) for expert in self.experts], 1)
        return (each[..., None] * results).sum(1).view(hidden.shape)


def test_what_counts_the_tokens_of_a_call_runs_whole_however_many_it_takes() -> None:
    """A step of `generate` has one token, and a module without a cache would be given all of them."""
    model: Any = tiny("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = Capacity(model.config.hidden_size)
    model.eval()
    engine = sc.Engine(model, CONFIG)
    assert engine.report.verdict == "sequential"
    prompt = torch.randint(1, model.config.vocab_size, (150,), generator=torch.Generator().manual_seed(1))
    found = engine.submit(prompt.tolist(), max_new_tokens=6).result().tokens
    wanted = model.generate(prompt[None], max_new_tokens=6, do_sample=False)[0, len(prompt) :]
    assert list(found) == wanted.tolist()


def without_small_weights(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention that nobody can read."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.mT * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (torch.where(weights < 0.02, 0.0, weights) @ value).transpose(1, 2), None


class Handing(nn.Module):
    """Leaves its result in itself, which the next layer's reads; that has it in a list, where it is no module of it."""

    def __init__(self, linear: nn.Module, before: list[nn.Module]) -> None:
        super().__init__()
        self.linear, self.before = linear, before

    def forward(self, hidden: Tensor) -> Tensor:
        self.left = self.linear(hidden)
        return self.left if not self.before else self.left + self.before[0].left  # type: ignore[operator]


@pytest.mark.parametrize("called_before", [False, True])
def test_what_modules_hand_each_other_is_not_taken_from_an_earlier_call(called_before: bool) -> None:
    AttentionInterface.register("odd", without_small_weights)
    AttentionMaskInterface.register("odd", eager_mask)
    model: Any = tiny("llama", attention="odd")
    before: list[nn.Module] = []
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.v_proj = Handing(attention.v_proj, before)
        before = [attention.v_proj]
    prompts = [torch.tensor([4, 5, 6, 7, 1, 9]), torch.tensor([2, 3, 8])]
    if called_before:
        model.generate(torch.tensor([[1]]), max_new_tokens=2)
    found = sc.generate(model, prompts, max_new_tokens=5, do_sample=False, engine_config=CONFIG)
    for prompt, row in zip(prompts, found, strict=True):
        assert row.tolist() == model.generate(prompt[None], max_new_tokens=5, do_sample=False)[0].tolist()
