"""What tells how long a request is, as a tensor, is known of each, or bounds requests; what else decides is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.step import LongForm
from tests.decoders import MAX_POSITIONS, Decoder, tril_mask
from tests.exactness import TOLERANCE, step_program
from tests.lengths import LAST, errors, first_ten, length_of, tells_lengths_apart


def longer_are_positive(x: Tensor) -> Tensor:
    return torch.where(length_of(x) > LAST, x.abs(), x)


def shorter_are_scaled(x: Tensor) -> Tensor:
    return x * torch.where(length_of(x) <= LAST, torch.linspace(1, 2, x.shape[-1]), torch.ones(x.shape[-1]))


def both_are_asked(x: Tensor) -> Tensor:
    length = length_of(x)
    return torch.where((length > LAST) | (length > 1000), -x, x)


def product_is_asked(x: Tensor) -> Tensor:
    return torch.where(length_of(x) * 3 > 3 * LAST, -x, x)


def product_is_far(x: Tensor) -> Tensor:
    return torch.where(length_of(x) * 3 > 15000, -x, x)


def chosen_twice(x: Tensor) -> Tensor:
    """Where one form is made of both branches of another choice by the same condition."""
    longer = length_of(x) > LAST
    factor = torch.where(longer, torch.linspace(1, 2, x.shape[-1]), torch.ones(x.shape[-1]))
    return x * torch.where(longer, factor.sin(), factor)


CONDITIONS = [longer_are_positive, shorter_are_scaled, both_are_asked, product_is_asked, chosen_twice]


@pytest.mark.parametrize("mix", CONDITIONS)
def test_requests_of_each_length_are_computed_as_by_the_model(mix: Callable[[Tensor], Tensor]) -> None:
    model = Decoder(layers=1, mix=mix, positions=first_ten)
    program = step_program(model)
    assert program.long_form == LongForm(beyond=LAST, anew=True)
    assert program.max_positions is None
    prompts = [list(range(LAST)), [5, 7, 9], list(range(LAST + 1)), list(range(97))]
    assert errors(model, program, prompts) < TOLERANCE
    assert tells_lengths_apart(model)


def test_where_it_turns_is_found_between_lengths_that_are_tried() -> None:
    """5,000, which no number in it tells."""
    program = step_program(Decoder(layers=1, mix=product_is_far, positions=first_ten))
    assert program.long_form == LongForm(beyond=5000, anew=True)


def of_some_lengths(x: Tensor) -> Tensor:
    length = length_of(x)
    return torch.where((length > LAST) & (length <= 1000), -x, x)


def test_requests_are_bounded_where_longer_ones_are_not_all_alike() -> None:
    model = Decoder(layers=1, mix=of_some_lengths, positions=first_ten)
    program = step_program(model)
    assert program.long_form is None
    assert program.max_positions == LAST
    assert errors(model, program, [list(range(LAST)), [5, 7, 9]]) < TOLERANCE


def of_lengths_between(x: Tensor) -> Tensor:
    """From 1,101 to 1,900 tokens, which are neither numbers in it nor powers of two."""
    length = length_of(x) * 0.01
    return torch.where((length > 11) & (length <= 19), -x, x)


def test_lengths_between_powers_of_two_are_tried_as_well() -> None:
    program = step_program(Decoder(layers=1, mix=of_lengths_between, positions=first_ten))
    assert program.long_form is None
    assert program.max_positions == 1100


def test_of_two_lengths_the_shorter_has_two_forms_and_the_other_bounds_requests() -> None:
    def mix(x: Tensor) -> Tensor:
        return torch.where(length_of(x) > LAST, -x, x) * torch.where(length_of(x) > 80, 2.0, 1.0)

    model = Decoder(layers=1, mix=mix, positions=first_ten)
    program = step_program(model)
    assert program.long_form == LongForm(beyond=LAST, anew=True)
    assert program.max_positions == 80
    assert errors(model, program, [list(range(LAST)), list(range(LAST + 1)), list(range(80))]) < TOLERANCE


def test_a_mask_that_is_another_for_long_requests_bounds_them() -> None:
    """It is proved on values, which are those of short ones."""

    def mask(ids: Tensor, attention_mask: Any) -> Tensor:
        places = torch.arange(ids.shape[1])
        near = places[:, None] - places < torch.where(length_of(ids) > LAST, 7, 10**6)
        return tril_mask(ids, attention_mask) & near

    model = Decoder(layers=1, mask=mask, positions=first_ten)
    program = step_program(model)
    assert program.long_form is None
    assert program.max_positions == LAST
    assert errors(model, program, [list(range(LAST)), [5, 7, 9]]) < TOLERANCE


def always(x: Tensor) -> Tensor:
    return torch.where(length_of(x) > 0, x * 2, x)


def test_what_holds_for_all_lengths_bounds_none() -> None:
    program = step_program(Decoder(layers=1, mix=always, positions=first_ten))
    assert program.max_positions is None
    assert program.long_form is None


def odd_are_doubled(x: Tensor) -> Tensor:
    return torch.where(length_of(x) % 2 == 1, x * 2, x)


def few_are_doubled(x: Tensor) -> Tensor:
    return torch.where(length_of(x) < 5, x * 2, x)


def small_are_doubled(x: Tensor) -> Tensor:
    return torch.where(x.abs().max() < length_of(x), x * 2, x)


def scaled_by_length(x: Tensor) -> Tensor:
    return x / length_of(x)


@pytest.mark.parametrize("mix", [odd_are_doubled, few_are_doubled, small_are_doubled, scaled_by_length])
def test_what_changes_as_a_request_grows_or_with_values_is_refused(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(sc.RefusedError):
        step_program(Decoder(layers=1, mix=mix, positions=first_ten))


def test_what_pairs_of_all_tokens_tell_is_tried_as_far_as_they_fit() -> None:
    """As `torch.nn.TransformerEncoder` asks whether the mask that it is given is the causal one."""

    def asks(x: Tensor) -> Tensor:
        size = x.shape[1]
        mask = torch.full((size, size), -torch.inf).triu(1)
        causal = torch.triu(torch.full((size, size), -torch.inf), diagonal=1)
        return torch.where((mask == causal).all(), x, -x)

    model = Decoder(layers=1, mix=asks)
    program = step_program(model)
    assert program.max_positions == min(4096, MAX_POSITIONS)
    assert errors(model, program, [[5, 7, 9], list(range(40))]) < TOLERANCE
