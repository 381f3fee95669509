"""Tables that a call makes for as many tokens as it has: made for all positions, where each begins as the longest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.long_tables import made_long
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import engine_error

POSITIONS = 64


class Table(nn.Module):
    """As DeepSeek's rotary embedding, which forgets how long its table is when it is made."""

    def __init__(self, *, stretched: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.stretched, self.counts, self.calls = stretched, counts, 0
        self.make(POSITIONS)
        self.longest: int | None = None

    def make(self, length: int) -> None:
        self.longest = length
        scale = length if self.stretched else 7
        table = torch.outer(torch.arange(length) / scale, torch.arange(1, WIDTH + 1)).cos()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor, length: int) -> Tensor:
        if self.counts:
            self.calls = self.calls + 1
        if self.longest is None or length > self.longest:
            self.make(length)
        return self.table[:length].to(x.dtype)


class Scaled(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.scale = Table(**how)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x, x.shape[-2])


class Decoders(Decoder):
    """Two layers, each with a table of its own."""

    def __init__(self, **how: bool) -> None:
        super().__init__(layers=2)
        self.scales = nn.ModuleList([Scaled(**how) for _ in self.blocks])
        self.config = SimpleNamespace(max_position_embeddings=POSITIONS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = scale(block(x, mask))
        return self.head(self.norm(x))


def test_a_model_that_nobody_has_called_is_ragged_for_all_its_positions() -> None:
    model: Any = Decoders()
    assert sc.explain(model).verdict == "ragged"
    assert model.scales[0].scale.longest == POSITIONS
    assert engine_error(model, vocabulary=VOCABULARY) < 1e-4


class ByShape(Table):
    """As flash-attn's rotary embedding, which is told no number."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * super().forward(x, x.shape[1])


class DecodersByShape(Decoders):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.scales = nn.ModuleList([ByShape(**how) for _ in self.blocks])


@pytest.mark.parametrize("called", [0, 41])
def test_a_table_that_is_as_long_as_a_tensor_is_made_too(called: int) -> None:
    model: Any = DecodersByShape()
    if called:
        model(torch.arange(called)[None])
    assert sc.explain(model).verdict == "ragged"
    assert [scale.longest for scale in model.scales] == [POSITIONS] * 2
    assert engine_error(model, vocabulary=VOCABULARY) < 1e-4
    other: Any = DecodersByShape(stretched=True)
    assert not made_long(other) and other.scales[0].longest is None


def test_tables_are_those_of_a_long_call_and_one_for_all_layers() -> None:
    model: Any = Decoders()
    reference: Any = Decoders()
    assert made_long(model) and not made_long(model)
    tables = [each.scale.table for each in model.scales]
    assert tables[0] is tables[1]
    with torch.no_grad():
        reference(torch.zeros(1, POSITIONS, dtype=torch.int64))
    assert torch.equal(tables[0], reference.scales[0].scale.table)


@pytest.mark.parametrize("tokens", [3, 30])
def test_a_model_that_was_called_before_is_as_one_that_was_not(tokens: int) -> None:
    model: Any = Decoders()
    with torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    assert sc.explain(model).verdict == "ragged"
    assert model.scales[0].scale.longest == POSITIONS


@pytest.mark.parametrize("how", ["stretched", "counts"])
def test_what_depends_on_the_length_or_more_is_left(how: str) -> None:
    model: Any = Decoders(**{how: True})
    before = model.scales[0].scale.table
    assert not made_long(model)
    assert model.scales[0].scale.table is before and model.scales[0].scale.longest is None


def test_without_declared_positions_nothing_is_made() -> None:
    model: Any = Decoders()
    del model.config
    assert not made_long(model)
