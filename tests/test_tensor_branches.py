"""A model's own `if` on a tensor that tells how long a request is: both sides are computed, each token's its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable

from selective_compile.capture import capture
from selective_compile.passes import RefusedError
from selective_compile.rewriting import proved
from selective_compile.step import LongForm
from selective_compile.tensor_branches import Branches
from tests.exactness import TOLERANCE, step_program
from tests.lengths import LAST, Asking, errors, length_of, tells_lengths_apart

Ask = Callable[[Tensor, Tensor], Tensor]
PROMPTS = [list(range(LAST)), [5, 7, 9], list(range(LAST + 1)), list(range(97))]


def longer_are_turned(x: Tensor, length: Tensor) -> Tensor:
    if length > LAST:
        x = -x
    return x


def shorter_are_scaled(x: Tensor, length: Tensor) -> Tensor:
    factors = torch.linspace(1, 2, x.shape[-1])
    return x * factors if length <= LAST else x.sin() * (1 + factors)


def asked_again_where_it_is_long(x: Tensor, length: Tensor) -> Tensor:
    """And of a number, which is never 0, in front."""
    if length and length > LAST:
        factor = 2.0 if not length <= LAST else 3.0
    else:
        factor = 0.5
    return (x * factor).sin()


def left_by_or(x: Tensor, length: Tensor) -> Tensor:
    """Of requests that are long it gives what it asked for itself."""
    return (x * (2 + ((length > LAST) or torch.zeros((), dtype=torch.bool)))).sin()


def other_constants(x: Tensor, length: Tensor) -> Tensor:
    return (x * (1.7 if length > LAST else 1.1)).cos() + x


def computed_with(x: Tensor, length: Tensor) -> Tensor:
    return -x if (2 * length.float() - 5) * 3 > 3 * (2 * LAST - 5) else x


def written_in_place(x: Tensor, length: Tensor) -> Tensor:
    """By what both sides do."""
    x = x.cos() if length > LAST else x.sin()
    total = torch.zeros(x.shape[-1])
    total += torch.linspace(0, 1, x.shape[-1])
    return x + total


def kept_in_turn(x: Tensor, length: Tensor) -> Tensor:
    """Each of which asks."""
    for _ in range(3):
        x = x.flip(-1) * 1.1 if length > LAST else x
    return x


BRANCHES = [
    longer_are_turned,
    shorter_are_scaled,
    asked_again_where_it_is_long,
    left_by_or,
    other_constants,
    computed_with,
    written_in_place,
    kept_in_turn,
]


@pytest.mark.parametrize("ask", BRANCHES)
def test_requests_of_each_length_are_computed_as_by_the_model(ask: Ask) -> None:
    model = Asking(ask)
    program = step_program(model)
    assert program.long_form == LongForm(beyond=LAST, anew=True)
    assert program.max_positions is None
    assert errors(model, program, PROMPTS) < TOLERANCE
    assert tells_lengths_apart(model)


def always(x: Tensor, length: Tensor) -> Tensor:
    return x * 2 if length > 0 else x


def test_what_is_so_for_all_lengths_bounds_none() -> None:
    model = Asking(always)
    program = step_program(model)
    assert program.long_form is None and program.max_positions is None
    assert errors(model, program, PROMPTS) < TOLERANCE


def test_where_it_turns_is_found_wherever_that_is() -> None:
    def ask(x: Tensor, length: Tensor) -> Tensor:
        return -x if length * 3 > 15000 else x

    assert step_program(Asking(ask)).long_form == LongForm(beyond=5000, anew=True)


def of_the_first(x: Tensor, positions: Tensor) -> Tensor:
    """Which a step of `generate` has another of."""
    return -x if positions[0, 0] > LAST else x


def of_the_mean(x: Tensor, positions: Tensor) -> Tensor:
    return -x if positions.float().mean() > LAST else x


def of_their_number(x: Tensor, positions: Tensor) -> Tensor:
    return -x if positions.max() - positions.min() >= LAST else x


def of_rows(x: Tensor, positions: Tensor) -> Tensor:
    return -x if torch.arange(x.shape[1]).max() >= LAST else x


def of_a_remainder(x: Tensor, positions: Tensor) -> Tensor:
    return -x if positions.max() % 50 == 49 else x


def of_a_difference(x: Tensor, positions: Tensor) -> Tensor:
    return -x if positions.max() - 5000 else x


def of_few_bits(x: Tensor, positions: Tensor) -> Tensor:
    """Which begin anew at 256."""
    return -x if positions.max().to(torch.uint8) > LAST else x


def of_values(x: Tensor, positions: Tensor) -> Tensor:
    return -x if x.sum() > 0 else x


def of_what_is_written(x: Tensor, positions: Tensor) -> Tensor:
    number = positions.max().clone()
    number.fill_((x[0, :, 0] > 0).sum())
    return -x if number > LAST else x


def of_what_is_written_to_a_view(x: Tensor, positions: Tensor) -> Tensor:
    whole = positions.clone()
    whole[0, -1:] = 50
    return -x if whole.max() > LAST else x


def of_two_lengths(x: Tensor, positions: Tensor) -> Tensor:
    x = -x if positions.max() >= LAST else x
    return x.sin() if positions.max() > 80 else x.cos()


def written_by_one_side(x: Tensor, positions: Tensor) -> Tensor:
    total = torch.ones(x.shape[-1])
    if positions.max() >= LAST:
        torch.ops.aten.add_.Tensor(total, torch.linspace(0, 1, x.shape[-1]))
    return x * total


def relu_of_one_side(x: Tensor, positions: Tensor) -> Tensor:
    total = torch.linspace(-1, 1, x.shape[-1])
    if positions.max() >= LAST:
        torch.nn.functional.relu(total, True)
    return x * total


def written_later(x: Tensor, positions: Tensor) -> Tensor:
    one, other = torch.linspace(0, 1, x.shape[-1]), torch.linspace(1, 2, x.shape[-1])
    chosen = one if positions.max() >= LAST else other
    first = (x * chosen).sin()
    one.mul_(2.0)
    other.mul_(-3.0)
    return first + (x * chosen).cos()


def written_by_way_of_a_view(x: Tensor, positions: Tensor) -> Tensor:
    whole = torch.ones(2, x.shape[-1])
    part = whole[1] if positions.max() >= LAST else whole[0]
    torch.einsum("i->i", part).add_(1.0)
    return x * whole[0]


def of_other_strides(x: Tensor, positions: Tensor) -> Tensor:
    whole = torch.arange(x.shape[-1] ** 2.0).reshape(x.shape[-1], -1).sin()
    table = whole.t().contiguous().t() if positions.max() >= LAST else whole + 1
    return x * torch.as_strided(table, (x.shape[-1],), (1,))


def of_another_shape(x: Tensor, positions: Tensor) -> Tensor:
    """Which one of two can be chosen only where both are alike."""
    return (x[..., None] if positions.max() >= LAST else x[..., None].expand(*x.shape, 2)).sum(-1)


def masked_otherwise(x: Tensor, positions: Tensor) -> Tensor:
    """By what reads other tokens."""
    return x.cumsum(1) if positions.max() >= LAST else x


NOT_KNOWN = [
    *(of_the_first, of_the_mean, of_their_number, of_rows, of_a_remainder, of_a_difference, of_few_bits, of_values),
    *(of_what_is_written, of_what_is_written_to_a_view, of_two_lengths, written_by_one_side, relu_of_one_side),
    *(written_later, written_by_way_of_a_view, of_other_strides, of_another_shape, masked_otherwise),
]


@pytest.mark.parametrize("ask", NOT_KNOWN)
def test_what_cannot_be_told_ends_the_trace_as_ever(ask: Ask) -> None:
    with pytest.raises(RefusedError, match="Data-dependent branching"):
        proved(Asking(ask, of_positions=True))


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
    tables, number = list(InstructionTranslator.dispatch_table), TensorVariable.method_item
    begun, end = threading.Event(), threading.Event()

    def longer() -> None:
        with Branches(2).answered():
            begun.set()
            end.wait(30)

    thread = threading.Thread(target=longer)
    with Branches(2).answered():
        thread.start()
        assert begun.wait(30)
    assert list(InstructionTranslator.dispatch_table) != tables and TensorVariable.method_item is not number
    end.set()
    thread.join()
    assert list(InstructionTranslator.dispatch_table) == tables and TensorVariable.method_item is number


def test_why_longer_requests_cannot_be_traced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "selective_compile.capture"), pytest.raises(RefusedError):
        capture(Asking(written_by_one_side, of_positions=True))
    assert "what is asked of the number of tokens cannot be answered: add__tensor writes" in caplog.text
