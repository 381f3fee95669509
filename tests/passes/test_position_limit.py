"""How far a decoder reaches is read off the tables that it reads by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decoders import MAX_POSITIONS, WIDTH, Decoder, counted
from tests.exactness import engine_error, step_program
from tests.models import tiny


def from_the_third(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]) + 2


def clamped(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).clamp(max=9)


@pytest.mark.parametrize(
    ("positions", "limit"), [(counted, MAX_POSITIONS), (from_the_third, MAX_POSITIONS - 2), (clamped, None)]
)
def test_learned_positions_end_with_their_table(positions: Any, limit: int | None) -> None:
    assert step_program(Decoder(layers=1, positions=positions)).max_positions == limit


def test_configuration_and_table_the_smaller_counts() -> None:
    model = tiny("gpt2", n_layer=1)
    assert step_program(model).max_positions == model.config.n_positions
    model.config.n_positions = 2 * model.config.n_positions
    assert step_program(model).max_positions == model.config.n_positions // 2


def test_rotary_positions_end_where_the_configuration_says() -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.config.max_position_embeddings = 10**9
    assert step_program(model).max_positions == 10**9


def gathered(ids: Tensor) -> Tensor:
    """Positions repeated along features, as GPT-J gathers its table by them."""
    return torch.arange(ids.shape[1])[None, :, None].repeat(1, 1, WIDTH)


class Gathering(Decoder):
    def __init__(self, places: Any = gathered) -> None:
        super().__init__(layers=1)
        self.numbered, self.table = places, torch.nn.Parameter(torch.randn(90, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        rows = self.table[None].gather(1, self.numbered(input_ids))
        return super().forward(input_ids, attention_mask) + rows[..., :1]


def test_table_that_is_gathered_from_ends_too() -> None:
    model = Gathering().eval()
    assert engine_error(model, vocabulary=97) < 1e-4
    assert step_program(model).max_positions == 90
