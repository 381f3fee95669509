"""Copies lie to one another as what they are copies of."""

from __future__ import annotations

import torch

from selective_compile.state_copies import Copies


def test_what_lies_in_one_memory_does_so_again() -> None:
    base = torch.arange(12.0)
    value = {"base": base, "odd": base[1::2], "square": [base.view(3, 4).t(), base[:0]], "again": base}
    copy = Copies(()).of(value)
    assert all(torch.equal(one, other) for one, other in zip(copy["square"], value["square"], strict=True))
    copy["odd"].add_(100)
    assert torch.equal(copy["base"][1::2], copy["odd"]) and copy["square"][0][1, 0] == 101
    assert copy["again"] is copy["base"] and torch.equal(base, torch.arange(12.0))


def test_what_lies_where_a_weight_lies_stays_and_what_lies_beside_it_does_not() -> None:
    base = torch.zeros(8)
    weight, within, beside, over = base[:4], base[1:3], base[4:], base[3:6]
    copies = Copies([weight])
    assert copies.of(weight) is weight and copies.of(within) is within and copies.of(over) is over
    assert copies.of(beside) is not beside


def test_conjugates_of_one_memory_are_what_they_were() -> None:
    base = torch.tensor([1 + 2j, 3 - 1j])
    copy = Copies(()).of([base, base.conj(), base.conj().imag])
    assert [each.tolist() for each in copy] == [base.tolist(), base.conj().tolist(), base.conj().imag.tolist()]
