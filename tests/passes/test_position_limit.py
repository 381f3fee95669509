"""How far a decoder reaches is read off the tables that it reads by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decoders import MAX_POSITIONS, Decoder, counted
from tests.exactness import step_program
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
