"""The oracle: Hugging Face's own model on one request alone, eager attention where it has it, float32."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selective_compile.coverage.random_model import random_model

# Of the logits' spread.  Where the two largest logits are closer than this, either token is right.
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model gives alone: its greedy tokens, and the logits ``[tokens, V]`` it chose them from."""

    tokens: list[int]
    logits: Tensor


class Oracle:
    """A model of the same weights that nothing of ours has touched."""

    def __init__(self, model_type: str, *, seed: int = 0) -> None:
        try:
            self.model: Any = random_model(model_type, seed=seed, attention="eager")
            self.attention = "eager"
        except ValueError:  # the class has another implementation alone
            self.model = random_model(model_type, seed=seed)
            self.attention = str(self.model.config._attn_implementation)

    @torch.no_grad()
    def generated(self, prompt: Sequence[int], count: int) -> Answer:
        """By `model.generate`, greedily."""
        ids = torch.tensor([list(prompt)], device="cpu")
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return Answer(tokens=result.sequences[0, len(prompt) :].tolist(), logits=torch.cat(result.logits).float())

    @torch.no_grad()
    def logits_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """``[len(tokens), V]``: from one forward call, the logits at each place where one of ``tokens`` was chosen."""
        ids = torch.tensor([[*prompt, *tokens]], device="cpu")
        mask = torch.ones_like(ids) if takes_mask(self.model) else None
        return forward(self.model, ids, mask)[0, len(prompt) - 1 : -1].float()


def takes_mask(model: Any) -> bool:
    return "attention_mask" in inspect.signature(model.forward).parameters


def forward(call: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Logits ``[B, S, V]`` of a model or of what was compiled from it."""
    result = call(ids) if mask is None else call(ids, attention_mask=mask)
    return result.logits if hasattr(result, "logits") else result[0]


def spread(logits: Tensor) -> float:
    return float(logits.std())


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in units of the spread of ``theirs``; infinite where only one side is a number."""
    if ours.shape != theirs.shape or bool((ours.isnan() != theirs.isnan()).any()):
        return float("inf")
    return float((ours - theirs).nan_to_num().abs().max()) / spread(theirs)
