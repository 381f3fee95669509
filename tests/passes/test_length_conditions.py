"""What tells how long a request is, as a tensor, bounds requests; what else decides is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from tests.decoders import Decoder
from tests.exactness import TOLERANCE, logits_in_chunks, step_program

LAST = 40


def first_ten(ids: Tensor) -> Tensor:
    """Positions that never leave their table."""
    return torch.arange(ids.shape[1]).clamp(max=9)


def length_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).max() + 1


def longer_are_positive(x: Tensor) -> Tensor:
    return torch.where(length_of(x) > LAST, x.abs(), x)


def shorter_are_scaled(x: Tensor) -> Tensor:
    return x * torch.where(length_of(x) <= LAST, torch.linspace(1, 2, x.shape[-1]), torch.ones(x.shape[-1]))


def both_are_asked(x: Tensor) -> Tensor:
    length = length_of(x)
    return torch.where((length > LAST) | (length > 1000), -x, x)


def product_is_asked(x: Tensor) -> Tensor:
    return torch.where(length_of(x) * 3 > 3 * LAST, -x, x)


CONDITIONS = [longer_are_positive, shorter_are_scaled, both_are_asked, product_is_asked]


@pytest.mark.parametrize("mix", CONDITIONS)
def test_requests_are_bounded_and_computed_as_by_the_model(mix: Callable[[Tensor], Tensor]) -> None:
    model = Decoder(layers=1, mix=mix, positions=first_ten)
    program = step_program(model)
    assert program.max_positions == LAST
    prompts = [list(range(LAST)), [5, 7, 9]]
    for prompt, logits in zip(prompts, logits_in_chunks(program, prompts, chunk=7), strict=True):
        with torch.no_grad():
            assert float((model(torch.tensor([prompt]))[0] - logits).abs().max()) < TOLERANCE
    longer = torch.arange(LAST + 1)[None]
    with torch.no_grad():  # the model does compute something else of them
        assert not torch.allclose(model(longer)[0, :LAST], model(longer[:, :LAST])[0], atol=1e-3)


def always(x: Tensor) -> Tensor:
    return torch.where(length_of(x) > 0, x * 2, x)


def test_what_holds_for_all_lengths_bounds_none() -> None:
    assert step_program(Decoder(layers=1, mix=always, positions=first_ten)).max_positions is None


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
