"""What tests of models have in common whose code asks how long a request is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile.step_program import StepProgram
from tests.decoders import Decoder
from tests.exactness import logits_in_chunks

LAST = 40  # the longest of short requests


def first_ten(ids: Tensor) -> Tensor:
    """Positions that never leave their table."""
    return torch.arange(ids.shape[1]).clamp(max=9)


def length_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).max() + 1


class Asking(Decoder):
    """Whose rows ``ask`` is given, with how many tokens the request has; or with its positions."""

    def __init__(self, ask: Callable[[Tensor, Tensor], Tensor], *, of_positions: bool = False, **others: Any) -> None:
        super().__init__(layers=1, positions=first_ten, **others)
        self.ask, self.of_positions = ask, of_positions

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        x = self.ask(x, position_ids if self.of_positions else torch.max(position_ids) + 1)
        for block in self.blocks:
            x = block(x, self.mask(input_ids, attention_mask))
        return self.head(self.norm(x))


@torch.no_grad()
def errors(model: Decoder, program: StepProgram, prompts: list[list[int]]) -> float:
    """The largest in the logits of any of these."""
    found = zip(prompts, logits_in_chunks(program, prompts, chunk=7), strict=True)
    return max(float((model(torch.tensor([prompt]))[0] - logits).abs().max()) for prompt, logits in found)


@torch.no_grad()
def tells_lengths_apart(model: Decoder) -> bool:
    """Whether the model does compute something else of longer requests."""
    longer = torch.arange(LAST + 1)[None]
    return not torch.allclose(model(longer)[0, :LAST], model(longer[:, :LAST])[0], atol=1e-3)
