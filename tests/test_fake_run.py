"""Runs without data: what they tell of a model, and that nothing is left of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile.fake_run import operators_of
from tests.decoders import Small
from tests.models import tiny


class WithNumbers(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.embed, self.number = nn.Embedding(11, 8), (number,)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids) * torch.tensor(self.number)


def test_constants_of_the_code_are_told_by_what_they_hold() -> None:
    digests = [operators_of(WithNumbers(number).eval()).digest for number in (1.0, 2.0, 1.0)]
    assert digests[0] == digests[2] != digests[1]


class WithCount(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        count = self.head.weight.nonzero().shape[0]
        return self.head(self.embed(input_ids) + torch.full((count,), 2.0).sum())


def test_what_only_data_could_tell_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes must follow from the number of tokens, got u0"):
        operators_of(WithCount().eval())


def test_the_run_leaves_nothing_in_the_model() -> None:
    own = tiny("llama")
    before = {name: id(tensor) for name, tensor in own.state_dict(keep_vars=True).items()}
    attributes = set(vars(own))
    operators_of(own)
    assert {name: id(tensor) for name, tensor in own.state_dict(keep_vars=True).items()} == before
    assert set(vars(own)) == attributes


class Helper:
    table: Tensor | None = None


class WithLazyTable(Small):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.helper.table is None:
            self.helper.table = torch.arange(8.0)
        return self.head(self.embed(input_ids) * self.helper.table)


def test_the_run_leaves_nothing_in_objects_of_the_model() -> None:
    model = WithLazyTable().eval()
    operators_of(model)
    assert model.helper.table is None
    assert model(torch.ones(1, 3, dtype=torch.int64)).shape == (1, 3, 11)


def test_other_threads_meet_their_own_model_and_no_flag_is_left() -> None:
    """Two runs at once of one model, beside a thread that calls it."""
    model, ids = tiny("llama"), torch.arange(3, 15)[None]
    expected, wrong, done = model(ids).logits, [], threading.Event()

    def call() -> None:
        while not done.is_set():
            if not torch.equal(model(ids).logits, expected):
                wrong.append("logits")

    def run() -> None:
        found.append(operators_of(model))

    found: list[Any] = []
    caller, runs = threading.Thread(target=call), [threading.Thread(target=run) for _ in range(2)]
    for thread in (caller, *runs):
        thread.start()
    for thread in runs:
        thread.join()
    done.set()
    caller.join()
    assert not wrong and len(found) == 2 and found[0] == found[1]
    assert not torch.compiler.is_compiling()
    assert {type(weight) for weight in model.parameters()} == {nn.Parameter}


class NamedAsResults(nn.Module):
    """A parameter of the name "1.0"."""

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.add_module("1", nn.ParameterList([nn.Parameter(torch.randn(8))]))
        self.embed, self.square = nn.Embedding(11, 8), [square]

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        return rows * (rows if self.square[0] else getattr(self, "1")[0])


def test_a_weight_has_no_name_of_a_result() -> None:
    assert operators_of(NamedAsResults(True).eval()).result != operators_of(NamedAsResults(False).eval()).result


class WritesInPlace(Small):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        part = rows[..., :4]
        early = rows * 2
        part.add_(1)
        return self.head(early if self.first else rows * 2)


def test_what_is_computed_before_a_write_in_place_is_told_apart() -> None:
    assert operators_of(WritesInPlace(True).eval()).result != operators_of(WritesInPlace(False).eval()).result
