"""Tables that a call makes anew where it has another number of tokens than the one before: ragged, for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.module_state import attributes
from selective_compile.remade_tables import made_anew
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, engine_error

Scale = Callable[["Kept", Tensor], Tensor]  # of [B, S, h]


class Kept(nn.Module):
    """Multiplies by what it may keep from call to call."""

    def __init__(self, scale: Scale, **kept: Any) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("frequencies", torch.arange(1, WIDTH + 1) / 7, persistent=False)
        self.register_buffer("rows", None, persistent=False)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(self, x)

    def made(self, length: int, stretch: float = 1) -> Tensor:
        return torch.outer(torch.arange(length) / stretch, self.frequencies).cos() + 0.5


class Decoders(Decoder):
    """Two layers, each with a table of its own."""

    def __init__(self, scale: Scale, **kept: Any) -> None:
        super().__init__(layers=2)
        self.scales = nn.ModuleList([Kept(scale, **kept) for _ in self.blocks])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = scale(block(x, mask))
        return self.head(self.norm(x))


def of_another_length(module: Any, x: Tensor) -> Tensor:
    if x.shape[1] != module.length:
        module.length = x.shape[1]
        module.table = module.made(module.length)
    table: Tensor = module.table[None]
    return table


def of_more(module: Any, x: Tensor) -> Tensor:
    if module.length is None or x.shape[1] > module.length:
        module.length, module.table = x.shape[1], module.made(x.shape[1])
    table: Tensor = module.table[: x.shape[1]]
    return table


def without_a_number(module: Any, x: Tensor) -> Tensor:
    if module.table is None or module.table.shape[0] < x.shape[1]:
        module.table = module.made(x.shape[1])
    table: Tensor = module.table[: x.shape[1]]
    return table


def with_a_name_of_its_own(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "other") or module.other.shape[0] != x.shape[1]:
        module.other = module.made(x.shape[1])
    other: Tensor = module.other
    return other


def of_two_dimensions(module: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if module.table is None or module.table.shape[-1] != length:
        module.table = torch.tril(torch.ones(length, length))
    return (module.table.sum(-1) * 0 + 1)[None, :, None] * module.made(length)


def in_a_row(module: Any, x: Tensor) -> Tensor:
    if module.table is None or module.table[0].shape[0] < x.shape[1]:
        module.table = module.made(x.shape[1]), module.made(x.shape[1], stretch=3)
    one, other = module.table
    return one[: x.shape[1]] * other[: x.shape[1]]


def registered(module: Any, x: Tensor) -> Tensor:
    if module.rows is None or module.rows.shape[0] < x.shape[1]:
        module.register_buffer("rows", module.made(x.shape[1]), persistent=False)
    rows: Tensor = module.rows[: x.shape[1]]
    return rows


ANEW: dict[str, tuple[Scale, dict[str, Any]]] = {
    "of another length": (of_another_length, {"length": None, "table": None}),
    "of more tokens": (of_more, {"length": None, "table": None}),
    "of more than none": (of_more, {"length": 0, "table": None}),
    "without a number": (without_a_number, {"table": None}),
    "in a row": (in_a_row, {"table": None}),
    "of two dimensions": (of_two_dimensions, {"table": None}),
    "registered": (registered, {}),
}


def test_a_table_that_has_no_name_before_the_first_call() -> None:
    assert engine_error(Decoders(with_a_name_of_its_own), vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize("called", [0, 3, 60])
@pytest.mark.parametrize("name", ANEW)
def test_is_ragged_whatever_call_came_before(name: str, called: int) -> None:
    scale, kept = ANEW[name]
    model = Decoders(scale, **kept)
    if called:
        with torch.no_grad():
            model(torch.ones(1, called, dtype=torch.int64))
    before = attributes(model.modules())
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    if called != 60:  # then its table is a table like others
        model = Decoders(scale, **kept)
        before = attributes(model.modules())
        sc.explain(model)
        after = attributes(model.modules())
        assert list(after) == list(before) and all(after[place] is before[place] for place in before)


def test_an_engine_goes_on_where_somebody_calls_its_model() -> None:
    model = Decoders(of_another_length, length=None, table=None)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    first = list(engine.submit([3, 1, 4], max_new_tokens=4).result().tokens)
    for count in (1, 9):
        with torch.no_grad():
            model(torch.ones(1, count, dtype=torch.int64))
        assert list(engine.submit([3, 1, 4], max_new_tokens=4).result().tokens) == first


def of_tokens(module: Any, x: Tensor) -> Tensor:
    """The first call's are used in the next ones of its length."""
    if x.shape[1] != module.length:
        module.length, module.table = x.shape[1], x[0].tanh()
    table: Tensor = module.table[None]
    return table


def of_weights(module: Any, x: Tensor) -> Tensor:
    if x.shape[1] != module.length:
        module.length, module.table = x.shape[1], module.made(x.shape[1]) * module.weight
    table: Tensor = module.table[None]
    return table


def registered_of_tokens(module: Any, x: Tensor) -> Tensor:
    """As `of_tokens`."""
    if module.rows is None or module.rows.shape[0] != x.shape[1]:
        module.register_buffer("rows", x[0].tanh(), persistent=False)
    rows: Tensor = module.rows[None]
    return rows


def stretched(module: Any, x: Tensor) -> Tensor:
    """By the longest request so far."""
    if module.length is None or x.shape[1] > module.length:
        module.length, module.table = x.shape[1], module.made(x.shape[1], stretch=x.shape[1])
    table: Tensor = module.table[: x.shape[1]]
    return table


def counted(module: Any, x: Tensor) -> Tensor:
    module.calls = module.calls + 1
    return of_another_length(module, x)


def read_first(module: Any, x: Tensor) -> Tensor:
    """What the call before has left."""
    last = module.last
    module.last = torch.ones(WIDTH)
    return of_another_length(module, x) * last


def scaled_too(module: Any, x: Tensor) -> Tensor:
    """By what it reads, and leaves as it is."""
    if x.shape[1] != module.length:
        module.length, module.table = x.shape[1], module.made(x.shape[1])
        module.factor = float(module.factor)
    table: Tensor = module.table[None]
    return table * module.factor


def stretched_from_some_length_on(module: Any, x: Tensor) -> Tensor:
    """And so for shorter requests behind a longer one."""
    if module.length is None or x.shape[1] > module.length:
        module.length, module.table = x.shape[1], module.made(x.shape[1], stretch=1 if x.shape[1] <= 50 else 2)
    table: Tensor = module.table[: x.shape[1]]
    return table


LEFT: dict[str, tuple[Scale, dict[str, Any]]] = {
    "of tokens": (of_tokens, {}),
    "of weights": (of_weights, {}),
    "registered, of tokens": (registered_of_tokens, {}),
    "stretched": (stretched, {}),
    "scaled too": (scaled_too, {"factor": 2.0}),
    "stretched from some length on": (stretched_from_some_length_on, {}),
    "counted": (counted, {"calls": torch.zeros(())}),
    "read first": (read_first, {"last": torch.full((WIDTH,), 2.0)}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_more_than_a_table_is_left(name: str) -> None:
    scale, kept = LEFT[name]
    model = Decoders(scale, length=None, table=None, **kept)
    before = attributes(model.modules())
    assert made_anew(model, lambda: capture(model)) is None
    after = attributes(model.modules())
    assert list(after) == list(before) and all(after[place] is before[place] for place in before)


def test_a_name_that_another_module_has_too_is_left() -> None:
    model = Decoders(of_another_length, length=None, table=None)
    setattr(model, "length", 3)  # noqa: B010
    assert made_anew(model, lambda: capture(model)) is None


def test_a_part_may_have_the_name_of_a_table() -> None:
    model = Decoders(of_another_length, length=None, table=None)
    model.table = model.norm
    assert made_anew(model, lambda: capture(model)) is not None


def test_a_model_without_tables_is_left() -> None:
    assert made_anew(model := Decoder(), lambda: capture(model)) is None
