"""What a module sets in each call before it reads it may be left nowhere; what it may read of another call may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile.own_stores import ReadsEarlierError
from selective_compile.skeleton import structure_of
from selective_compile.whole_modules import ModulesOf

ROWS = torch.ones(3, 2)
KEEPS = "keeps something of its call in its attributes"


class Balanced(nn.Linear):
    """Leaves how rows are spread for who trains it, and reads what it has left there itself."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loads: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.loads, self.loss = x.mean(0), 0.0
        if self.loads is not None:
            self.loss = self.loads.square().sum()
        return super().forward(x)


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Balanced()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.part.loss


def run(modules: ModulesOf) -> list[Tensor]:
    return modules.run("0", structure_of([(ROWS,), {}], []), [ROWS])


@torch.no_grad()
@pytest.mark.parametrize(("kind", "names"), [(Balanced, "0.loads 0.loss"), (Within, "0.part.loads 0.part.loss")])
def test_what_is_set_before_it_is_read_may_be_set(kind: type[nn.Module], names: str) -> None:
    model = nn.Sequential(kind())
    kinds, modules = [*map(type, model.modules())], ModulesOf(model)
    for _ in ("not called yet", "called"):
        assert not modules.let_store("0")
        with pytest.raises(RuntimeError, match=KEEPS):
            run(modules)
        assert modules.let_store("0") and modules.stored("0") == names.split()
        (found,) = run(modules)
        assert torch.equal(found, model(ROWS)) and [*map(type, model.modules())] == kinds
        modules = ModulesOf(model)


class ByDefault(Balanced):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + getattr(self, "loss", 0))


class Before(Balanced):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.loads is None else -x)


class Asking(Balanced):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if hasattr(self, "loss") else -x)


class Counting(Balanced):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [ByDefault, Before, Asking, Counting])
def test_what_is_read_before_may_be_of_another_call(kind: type[nn.Module]) -> None:
    modules = ModulesOf(nn.Sequential(kind()))
    with pytest.raises(RuntimeError, match=KEEPS):
        run(modules)
    assert modules.let_store("0")
    with pytest.raises(ReadsEarlierError, match="of what an earlier call has left is read"):
        run(modules)


class Appending(Balanced):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.history.append(self.loads)
        return result


class Replacing(Balanced):
    def forward(self, x: Tensor) -> Tensor:
        self.inner = nn.Linear(2, 2)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Appending, Replacing])
def test_what_is_changed_in_any_other_way_may_not_be(kind: type[nn.Module]) -> None:
    modules = ModulesOf(nn.Sequential(kind()))
    with pytest.raises(RuntimeError, match=KEEPS):
        run(modules)
    assert not modules.let_store("0")
