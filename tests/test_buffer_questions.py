"""A model's own `if` on its buffers: answered by the values that they have, which are to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.passes import RefusedError
from selective_compile.rewriting import proved
from tests.decoders import Decoder
from tests.exactness import TOLERANCE, step_program
from tests.lengths import errors, first_ten

Ask = Callable[[nn.Module, Tensor], Tensor]
PROMPTS = [[5, 7, 9], list(range(41)), [3]]


class AskingItself(Decoder):
    """Whose rows ``ask`` is given, with the model itself, which has ``table`` and ``flag`` in buffers."""

    table: Tensor
    flag: Tensor

    def __init__(self, ask: Ask) -> None:
        super().__init__(layers=1, positions=first_ten)
        self.ask = ask
        self.register_buffer("table", torch.linspace(1, 2, 32).repeat(64, 1))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        x = self.ask(self, x) * self.table[: x.shape[1]]
        for block in self.blocks:
            x = block(x, self.mask(input_ids, None))
        return self.head(self.norm(x))


def one_element(model: Any, x: Tensor) -> Tensor:
    """As code that makes tables again which were lost where a model was made without memory."""
    return x.cumsum(1) if model.table[0, 0] == 0 else x


def makes_it_again(model: Any, x: Tensor) -> Tensor:
    if model.table[0, 0] == 0:
        model.table = torch.linspace(1, 2, 32).repeat(64, 1)
    return x


def a_flag(model: Any, x: Tensor) -> Tensor:
    return x if model.flag else x.cumsum(1)


def a_flag_s_number(model: Any, x: Tensor) -> Tensor:
    return x.cumsum(1) if not model.flag.item() else x


def all_of_it(model: Any, x: Tensor) -> Tensor:
    return x.cumsum(1) if torch.isnan(model.table).any() or (model.table.abs() < 1).all() else x


@pytest.mark.parametrize("ask", [one_element, makes_it_again, a_flag, a_flag_s_number, all_of_it])
def test_what_is_asked_of_buffers_alone_is_known(ask: Ask) -> None:
    model = AskingItself(ask)
    assert errors(model, step_program(model), PROMPTS) < TOLERANCE


def test_a_buffer_that_was_asked_is_to_keep_its_values() -> None:
    model = AskingItself(a_flag)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    assert engine.submit([3, 1, 4], max_new_tokens=2).result().error is None
    model.flag.fill_(False)
    error = str(engine.submit([3, 1, 4], max_new_tokens=2).result().error)
    assert "a proof has read must keep their values, got others in flag" in error
    other = AskingItself(a_flag)
    other.flag.fill_(False)  # and rows are summed up, which no token does by itself
    with pytest.raises(RefusedError, match="cumsum"):
        step_program(other)


@torch.no_grad()
def test_tables_that_are_made_in_the_first_call_are_made() -> None:
    model = AskingItself(makes_it_again)
    model.table.zero_()
    program = step_program(model)
    assert errors(model, program, PROMPTS) < TOLERANCE
    assert model.table[0, 0] == 1


def written_before(model: Any, x: Tensor) -> Tensor:
    model.flag.logical_not_()
    return x if model.flag else -x


def written_later(model: Any, x: Tensor) -> Tensor:
    x = x if model.flag else -x
    model.flag.logical_not_()
    return x


def beside_tokens(model: Any, x: Tensor) -> Tensor:
    return x if (model.table[0, 0] > x.sum()) else -x


def of_a_weight(model: Any, x: Tensor) -> Tensor:
    """Which training changes in each step."""
    return x if model.norm.weight[0] > 0 else -x


@pytest.mark.parametrize("ask", [written_before, written_later, beside_tokens, of_a_weight])
def test_what_may_get_another_answer_is_not(ask: Ask) -> None:
    with pytest.raises(RefusedError):
        proved(AskingItself(ask))
