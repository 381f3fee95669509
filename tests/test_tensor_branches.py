"""A model's own `if` on a tensor that tells how long a request is: both sides are computed, each token's its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator

from selective_compile.capture import capture
from selective_compile.passes import RefusedError
from selective_compile.step import LongForm
from selective_compile.tensor_branches import Branches
from tests.decoders import Decoder, tril_mask
from tests.exactness import TOLERANCE, step_program
from tests.lengths import LAST, errors, first_ten, length_of, tells_lengths_apart

PROMPTS = [list(range(LAST)), [5, 7, 9], list(range(LAST + 1)), list(range(97))]


def longer_are_turned(x: Tensor) -> Tensor:
    if length_of(x) > LAST:
        x = -x
    return x


def shorter_are_scaled(x: Tensor) -> Tensor:
    factors = torch.linspace(1, 2, x.shape[-1])
    return x * factors if length_of(x) <= LAST else x.sin() * (1 + factors)


def asked_again_where_it_is_long(x: Tensor) -> Tensor:
    """And of a number, which is never 0, in front."""
    length = length_of(x)
    if length and length > LAST:
        factor = 2.0 if not length <= LAST else 3.0
    else:
        factor = 0.5
    return (x * factor).sin()


def left_by_or(x: Tensor) -> Tensor:
    """Of requests that are long it gives what it asked for itself."""
    return (x * (2 + ((length_of(x) > LAST) or torch.zeros((), dtype=torch.bool)))).sin()


def other_constants(x: Tensor) -> Tensor:
    return (x * (1.7 if length_of(x) > LAST else 1.1)).cos() + x


def written_in_place(x: Tensor) -> Tensor:
    """By what both sides do."""
    x = x.cos() if length_of(x) > LAST else x.sin()
    total = torch.zeros(x.shape[-1])
    total += torch.linspace(0, 1, x.shape[-1])
    return x + total


BRANCHES = [
    longer_are_turned,
    shorter_are_scaled,
    asked_again_where_it_is_long,
    left_by_or,
    other_constants,
    written_in_place,
]


@pytest.mark.parametrize(("mix", "layers"), [*((mix, 1) for mix in BRANCHES), (longer_are_turned, 3)])
def test_requests_of_each_length_are_computed_as_by_the_model(mix: Callable[[Tensor], Tensor], layers: int) -> None:
    model = Decoder(layers=layers, mix=mix, positions=first_ten)
    program = step_program(model)
    assert program.long_form == LongForm(beyond=LAST, anew=True)
    assert program.max_positions is None
    assert errors(model, program, PROMPTS) < TOLERANCE
    assert tells_lengths_apart(model)


def of_two_lengths(x: Tensor) -> Tensor:
    x = -x if length_of(x) > LAST else x
    return x.sin() if length_of(x) > 80 else x.cos()


def test_a_longer_one_that_is_asked_for_as_well_bounds_requests() -> None:
    model = Decoder(layers=1, mix=of_two_lengths, positions=first_ten)
    program = step_program(model)
    assert program.long_form == LongForm(beyond=LAST, anew=True)
    assert program.max_positions == 80
    assert errors(model, program, [*PROMPTS[:3], list(range(80))]) < TOLERANCE


def always(x: Tensor) -> Tensor:
    return x * 2 if length_of(x) > 0 else x


def test_what_is_so_for_all_lengths_bounds_none() -> None:
    model = Decoder(layers=1, mix=always, positions=first_ten)
    program = step_program(model)
    assert program.long_form is None and program.max_positions is None
    assert errors(model, program, PROMPTS) < TOLERANCE


def test_a_mask_that_is_another_for_long_requests_bounds_them() -> None:
    def mask(ids: Tensor, attention_mask: Any) -> Tensor:
        places = torch.arange(ids.shape[1])
        near = places[:, None] - places < (7 if length_of(ids) > LAST else 10**6)
        return tril_mask(ids, attention_mask) & near

    model = Decoder(layers=1, mask=mask, positions=first_ten)
    program = step_program(model)
    assert program.long_form is None and program.max_positions == LAST
    assert errors(model, program, PROMPTS[:2]) < TOLERANCE


def by_values(x: Tensor) -> Tensor:
    return -x if x.sum() > 0 else x


def by_even_lengths(x: Tensor) -> Tensor:
    return -x if length_of(x) % 2 == 0 else x


def written_by_one_side(x: Tensor) -> Tensor:
    total = torch.ones(x.shape[-1])
    if length_of(x) > LAST:
        total += torch.linspace(0, 1, x.shape[-1])
    return x * total


def of_another_shape(x: Tensor) -> Tensor:
    """Which one of two can be chosen only where both are alike."""
    return (x[..., None] if length_of(x) > LAST else x[..., None].expand(*x.shape, 2)).sum(-1)


@pytest.mark.parametrize("mix", [by_values, by_even_lengths, written_by_one_side, of_another_shape])
def test_what_cannot_be_told_ends_the_trace_as_ever(mix: Callable[[Tensor], Tensor]) -> None:
    model = Decoder(layers=1, mix=mix, positions=first_ten)
    with pytest.raises(RefusedError, match="Data-dependent branching"):
        capture(model)


def test_others_trace_as_ever_meanwhile() -> None:
    """Whatever they trace, in other threads."""
    found: list[Unsupported] = []

    def other() -> None:
        try:
            torch.compile(lambda x: x * 2 if length_of(x) > 4 else x, backend="eager", fullgraph=True)(torch.ones(1, 6))
        except Unsupported as error:
            found.append(error)

    with Branches(2).answered():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "Data-dependent branching" in str(found[0])


def test_of_traces_beside_one_another_nothing_is_left() -> None:
    """Whichever ends first."""
    tables = list(InstructionTranslator.dispatch_table)
    begun, end = threading.Event(), threading.Event()

    def longer() -> None:
        with Branches(2).answered():
            begun.set()
            end.wait(30)

    thread = threading.Thread(target=longer)
    with Branches(2).answered():
        thread.start()
        assert begun.wait(30)
    assert list(InstructionTranslator.dispatch_table) != tables
    end.set()
    thread.join()
    assert list(InstructionTranslator.dispatch_table) == tables


def test_why_longer_requests_cannot_be_traced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "selective_compile.capture"), pytest.raises(RefusedError):
        capture(Decoder(layers=1, mix=written_by_one_side, positions=first_ten))
    assert f"requests of more than {LAST} tokens cannot be traced" in caplog.text
