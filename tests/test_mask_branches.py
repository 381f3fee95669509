"""A model's own `if` on its attention mask, of which an engine hands it ones alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes import RefusedError
from selective_compile.rewriting import proved
from tests.decoders import Decoder
from tests.exactness import TOLERANCE, step_program
from tests.lengths import errors, first_ten

Ask = Callable[[Tensor, Tensor], Tensor]
PROMPTS = [[5, 7, 9], list(range(41)), list(range(20)), [3]]


class AskingTheMask(Decoder):
    """Whose rows ``ask`` is given, with the mask: all of it, or None where the model is called without one."""

    def __init__(self, ask: Ask, **others: Any) -> None:
        super().__init__(layers=1, positions=first_ten, **others)
        self.ask = ask

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        x = x if attention_mask is None else self.ask(x, attention_mask)
        for block in self.blocks:
            x = block(x, self.mask(input_ids, attention_mask))
        return self.head(self.norm(x))


def not_all(x: Tensor, mask: Tensor) -> Tensor:
    """As ChatGLM."""
    if not mask.all():
        x = -x.cumsum(1)
    return x


def all_are_one(x: Tensor, mask: Tensor) -> Tensor:
    """As transformers' masks for SDPA before 4.48."""
    return x if torch.all(mask == 1) else -x.cumsum(1)


def any_is_zero(x: Tensor, mask: Tensor) -> Tensor:
    """As code that unpads for flash attention."""
    return x.cumsum(1) if 0.0 in mask else x


def asked_for_a_number(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if (mask == 0).any().item() else x


def inverted(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if torch.any(~mask.bool()) else x


def by_the_least(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if mask[:, -1].min() < 1 else x


def by_their_count(x: Tensor, mask: Tensor) -> Tensor:
    """As transformers' masks for flex attention."""
    mask = mask.to(torch.bool)
    return x.cumsum(1) if not mask.sum() == mask.numel() else x


def by_the_count_of_doubled_ones(x: Tensor, mask: Tensor) -> Tensor:
    return x if torch.sum(mask * 2).ne(mask.shape[1]) else x.cumsum(1)


ASKED = [
    *(not_all, all_are_one, any_is_zero, asked_for_a_number, inverted, by_the_least, by_their_count),
    by_the_count_of_doubled_ones,
]


@pytest.mark.parametrize("ask", ASKED)
def test_requests_are_computed_as_without_padding(ask: Ask) -> None:
    model = AskingTheMask(ask)
    program = step_program(model)
    assert program.long_form is None and program.max_positions is None
    assert errors(model, program, PROMPTS) < TOLERANCE
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(model(ids), model(ids, torch.ones_like(ids)))
    assert ask is by_the_count_of_doubled_ones or not torch.allclose(model(ids), model(ids, torch.tensor([[0, 1, 1]])))


def how_many(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if mask.sum() > 7 else x


def of_a_remainder(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if mask.sum() % 2 == 1 else x


def of_one_count(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if mask.sum() == 5 else x


def of_another_count(x: Tensor, mask: Tensor) -> Tensor:
    """Of six tokens alone there are as many."""
    return x.cumsum(1) if (mask[:, 3:] * 2).sum() == mask.numel() else x


def of_a_part_s_count(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if mask[:, 5:].sum() != (mask[:, 5:] * 2).numel() - 1 else x


def of_what_is_written(x: Tensor, mask: Tensor) -> Tensor:
    whole = mask.clone()
    whole[:, -1:] = 0
    return x if whole.all() else x.cumsum(1)


def of_what_is_written_later(x: Tensor, mask: Tensor) -> Tensor:
    whole = mask.clone()
    x = x if whole.all() else x.cumsum(1)
    whole.fill_(0)
    return x * (1 - whole[:, :, None]).cumsum(1)


def of_what_is_read_too(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) if (x[..., 0] > mask).all() else x


@pytest.mark.parametrize(
    "ask",
    [
        how_many,
        of_a_remainder,
        of_one_count,
        of_another_count,
        of_a_part_s_count,
        of_what_is_written,
        of_what_is_read_too,
    ],
)
def test_what_more_than_ones_tell_ends_the_trace_as_ever(ask: Ask) -> None:
    with pytest.raises(RefusedError, match="Data-dependent branching"):
        proved(AskingTheMask(ask))


def test_a_mask_that_is_written_is_no_longer_one() -> None:
    with pytest.raises(RefusedError):
        proved(AskingTheMask(of_what_is_written_later))
