"""A buffer that each forward writes before it reads it decides nothing; others are no business of the engine's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import WIDTH, Decoder
from tests.exactness import TOLERANCE, logits_in_chunks, step_program


class Writing(nn.Module):
    """Writes a scale into its buffer, then reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.copy_(self.own * 2)
        return x * self.scale


class InAnotherType(Writing):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.scale.to(torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.copy_(self.own[:1])
        return x * self.scale.float()


@pytest.mark.parametrize("kind", [Writing, InAnotherType])
def test_it_is_neither_read_nor_written(kind: type[Writing]) -> None:
    model = Decoder(layers=1, mix=(mix := kind()))
    model.mix = mix
    before, program = mix.scale.clone(), step_program(model)
    version = mix.scale._version
    prompts = [[5, 7, 9, 11], [13]]
    found = logits_in_chunks(program, prompts, chunk=3)
    assert torch.equal(mix.scale, before) and mix.scale._version == version
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.no_grad():
            assert float((model(torch.tensor([prompt]))[0] - logits).abs().max()) < TOLERANCE
    assert not torch.equal(mix.scale, before)  # the model itself writes it


class ReadsBefore(Writing):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale
        return super().forward(x)


class ReadsBehind(Writing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.scale[:8])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.view.sum()


class Adds(Writing):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(self.own)
        return x * self.scale


class WritesAgain(Writing):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.scale.mul_(2)
        return x * self.scale


class WritesParameters(Writing):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.ones(WIDTH))


@pytest.mark.parametrize("kind", [ReadsBefore, ReadsBehind, Adds, WritesAgain, WritesParameters])
def test_what_is_read_otherwise_is_refused(kind: type[Writing]) -> None:
    model = Decoder(layers=1, mix=(mix := kind()))
    model.mix = mix
    with pytest.raises(sc.RefusedError, match="in place"):
        step_program(model)
