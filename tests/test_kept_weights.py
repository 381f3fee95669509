"""A run that changes weights is noticed, also where PyTorch counts no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import kept_weights
from selective_compile.kept_weights import CHUNK, Weights, summed_weights
from selective_compile.module_state import unchanged


def holding(*weights: Tensor) -> nn.Module:
    module = nn.Module()
    for number, weight in enumerate(weights):
        module.register_parameter(f"weight{number}", nn.Parameter(weight, requires_grad=False))
    return module


def last(weight: Tensor) -> Tensor:
    return weight.data.view(-1)[-1:]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda module: module.weight0.add_(1),
    "other memory": lambda module: setattr(module.weight0, "data", module.weight0.data + 1),
    "another one": lambda module: setattr(module, "weight0", nn.Parameter(module.weight0.data + 1)),
    "one more": lambda module: module.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "one number, not counted": lambda module: last(module.weight0).neg_(),
    "all signs, not counted": lambda module: module.weight0.data.neg_(),
    "rows in another order, not counted": lambda module: module.weight0.data.copy_(module.weight0.flip(0)),
    "four times as much, not counted": lambda module: module.weight0.data.mul_(4),
    "two numbers in each other's place": lambda module: swapped(module.weight0.view(-1), 1),
    "two rows in each other's place": lambda module: swapped(rows_of(module.weight0), 1),
    "far rows in each other's place": lambda module: swapped(rows_of(module.weight0), 60),
    "signs of two rows": lambda module: rows_of(module.weight0)[:2].neg_(),
    "signs of two numbers": lambda module: module.weight0.view(-1)[:2].neg_(),
    "every other sign, not counted": lambda module: module.weight0.data.view(-1)[1::2].neg_(),
}


def rows_of(weight: Tensor) -> Tensor:
    return weight.view(-1)[: 64 * 100].view(-1, 64)


def swapped(rows: Any, other: int) -> None:
    rows[[3, 3 + other]] = rows[[3 + other, 3]]


# That PyTorch counts, or that tells by where weights lie.
NOTHING: dict[str, Callable[[Any], Any]] = {
    "in place": lambda module: module.weight0.mul_(1),
    "other memory": lambda module: setattr(module.weight0, "data", module.weight0.data.clone()),
    "another one": lambda module: setattr(module, "weight0", nn.Parameter(module.weight0.data.clone())),
}


@pytest.mark.parametrize("change", NOTHING)
def test_what_holds_the_same_numbers_has_not_changed(change: str) -> None:
    """As where a table of embeddings is to renormalise its rows, and none is too large."""
    module = holding(torch.arange(4.0 * CHUNK).view(2, -1), torch.zeros(3))
    with summed_weights([module]):
        before = Weights([module])
        NOTHING[change](module)
        assert not before.are_others() and not Weights([module]).are_others()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str, dtype: torch.dtype) -> None:
    module = holding(torch.arange(1.0, 1 + 4.0 * CHUNK).view(2, -1).to(dtype), torch.zeros(3))
    with summed_weights([module]):
        before = Weights([module])
        assert not before.are_others()
        CHANGES[change](module)
        assert before.are_others() and before.are_others(), "also where it is asked for again"
        assert not Weights([module]).are_others()


SHAPES = [
    torch.zeros(0),
    torch.zeros(()),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(7, dtype=torch.int8)[2:5],
    torch.zeros(40)[3:],
    torch.zeros(2 * CHUNK + 5, dtype=torch.float64),
    torch.zeros(6, 5)[:, 1:].t(),
]


@pytest.mark.parametrize("own", SHAPES, ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}")
def test_of_any_size_and_place(own: Tensor) -> None:
    module = holding(own)
    with summed_weights([module]):
        before = Weights([module])
        assert not before.are_others()
        for place in range(min(own.numel(), 40)):
            number = own.data[tuple(torch.unravel_index(torch.tensor(place), own.shape))]
            number.fill_(1)
            assert before.are_others()
            number.fill_(0)
        assert not before.are_others()


def test_without_sums_it_goes_by_what_is_counted() -> None:
    module = holding(torch.zeros(3))
    before = Weights([module])
    module.weight0.data.add_(1)
    assert not before.are_others()
    module.weight0.add_(1)
    assert before.are_others()


def test_weights_are_read_once_as_long_as_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, read, total = holding(torch.zeros(2 * CHUNK)), [], Tensor.sum

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        read.append(tensor)
        return total(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "sum", counted)
    with unchanged(module):
        for _ in range(4):
            with unchanged(module):
                pass
    assert sum(map(len, read)) == 2, "of one row, and of its columns; what is behind it is kept as it is"


class SetsUp(nn.Module):
    def __init__(self, flag: str, weight: str) -> None:
        super().__init__()
        self.how, self.weight = (flag, weight), nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(1))
        self.attribute = False

    def forward(self) -> Tensor:
        flag, weight = self.how
        if not (self.attribute if flag == "attribute" else self.buffer.item()):
            if weight == "memory":
                self.weight.data = self.weight.data * 3
            else:
                (self.weight if weight == "counted" else self.weight.data).mul_(3)
            if flag == "attribute":
                self.attribute = True
            else:
                (self.buffer if flag == "counted" else self.buffer.data).fill_(1)
        return self.weight * 2


@pytest.mark.parametrize("weight", ["counted", "not counted", "memory"])
@pytest.mark.parametrize("flag", ["counted", "not counted", "attribute"])
def test_a_model_sets_itself_up_once(flag: str, weight: str) -> None:
    model = SetsUp(flag, weight)
    with unchanged(model):
        for _ in range(2):
            with unchanged(model):
                assert model().item() == 6
    assert model().item() == 6 and model.weight.item() == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_where_weights_cannot_be_looked_at_what_a_run_left_is_gone(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SetsUp("not counted", "not counted")

    def stopped(weight: Tensor) -> Any:
        raise error

    with pytest.raises(error), unchanged(model):
        model.attribute = True
        model.buffer.add_(1)
        monkeypatch.setattr(kept_weights, "sums_of", stopped)
    assert model.attribute is False and model.buffer.item() == 0
