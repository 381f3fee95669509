"""Copies lie to one another as what they are copies of."""

from __future__ import annotations

from collections import deque

import torch

from selective_compile.state_copies import Copies


def test_what_lies_in_one_memory_does_so_again() -> None:
    base = torch.arange(12.0)
    value = {"base": base, "odd": base[1::2], "square": [base.view(3, 4).t(), base[:0]], "again": base}
    copy = Copies([value], ()).of(value)
    assert all(torch.equal(one, other) for one, other in zip(copy["square"], value["square"], strict=True))
    copy["odd"].add_(100)
    assert torch.equal(copy["base"][1::2], copy["odd"]) and copy["square"][0][1, 0] == 101
    assert copy["again"] is copy["base"] and torch.equal(base, torch.arange(12.0))


def test_numbers_of_several_sizes_in_one_memory() -> None:
    flat = torch.arange(64, dtype=torch.uint8)
    value = [flat[3:], flat[40:48].view(torch.float64), flat[20:24].view(torch.int32), flat[8:16].view(torch.complex64)]
    copy = Copies(value, ()).of(value)
    assert all(torch.equal(one, other) for one, other in zip(copy, value, strict=True))
    copy[0][20 - 3] = 99
    assert copy[2].view(torch.uint8)[0] == 99 != value[2].view(torch.uint8)[0]


def test_what_lies_where_a_weight_lies_stays_and_what_lies_beside_it_does_not() -> None:
    base = torch.zeros(8)
    weight, within, beside, over = base[:4], base[1:3], base[6:], base[3:6]
    copies = Copies([weight, within, beside, over], [weight])
    assert copies.of(weight) is weight and copies.of(within) is within and copies.of(over) is over
    assert copies.of(beside) is not beside


def test_what_lies_over_something_that_stays_does_so_too() -> None:
    base = torch.zeros(8)
    value = {"base": base, "beside": base[4:]}
    copy = Copies([value], [base[:4]]).of(value)
    copy["beside"].add_(1)
    assert copy["base"][4:].tolist() == [1] * 4


def test_what_is_copied_is_no_more_than_what_lies_together() -> None:
    flat = torch.zeros(1_000_000)
    copies = Copies([[flat[-8:-2], flat[-4:]]], [flat[:-8]]).of([flat[-8:-2], flat[-4:]])
    assert all(each.untyped_storage().nbytes() < 100 for each in copies)


def test_conjugates_of_one_memory_are_what_they_were() -> None:
    base = torch.tensor([1 + 2j, 3 - 1j])
    value = [base, base.conj(), base.conj().imag]
    copy = Copies(value, ()).of(value)
    assert [each.tolist() for each in copy] == [base.tolist(), base.conj().tolist(), base.conj().imag.tolist()]
    copy[0].add_(1 + 1j)
    assert copy[1].tolist() == copy[0].conj().tolist() and copy[2].tolist() == [-3, 0]


def test_what_is_of_several_classes_and_containers() -> None:
    weight, ties = torch.zeros(2), torch.ones(3)
    value = {"list": [ties, (ties, weight)], "set": {1}, "deque": deque([ties]), "sparse": torch.eye(2).to_sparse()}
    copy = Copies([value], [weight]).of(value)
    assert copy["list"][0] is copy["deque"][0] is copy["list"][1][0] is not ties and copy["list"][1][1] is weight
    assert copy["set"] is not value["set"] and copy["sparse"] is not value["sparse"]
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(2))
