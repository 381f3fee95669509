"""What a forward sets in its modules and never reads stays as it is, and the report says so; the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, engine_error, step_program

Store = Callable[[Any, Tensor], Tensor]


class Keeping(nn.Module):
    """Leaves what it is told to of ``x`` [B, S, h], and gives what is to be given."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.linear = store, nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None
        self.calls, self.listed = 0, []

    def forward(self, x: Tensor) -> Tensor:
        return self.store(self, self.linear(x))


def weights(own: Any, x: Tensor) -> Tensor:
    own.kept = x.softmax(-1)
    return x * own.kept


def detached(own: Any, x: Tensor) -> Tensor:
    own.kept = x.detach()
    own.lengths = x.shape[1]
    return x


def twice(own: Any, x: Tensor) -> Tensor:
    own.kept = x
    own.kept = own.kept * 2  # of this call
    return own.kept


UNREAD: dict[str, Store] = {"weights": weights, "detached": detached, "twice": twice}


def decoder(store: Store) -> Any:
    model: Any = Decoder(layers=1, mix=(mix := Keeping(store)))
    model.mixing = mix
    return model


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_never_read_is_left_out_and_named(name: str) -> None:
    model = decoder(UNREAD[name])
    report = sc.explain(model)
    assert report.verdict == "ragged" and "blocks.0.mix.kept" in report.left_out
    assert "attributes that the forward sets and never reads stay as they are" in str(report)
    assert model.mixing.kept is None
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_it_is_the_same_where_somebody_has_called_the_model() -> None:
    model = decoder(weights)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    first = list(engine.submit([3, 1, 4], max_new_tokens=4).result().tokens)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.int64))
    kept = model.mixing.kept
    assert list(engine.submit([3, 1, 4], max_new_tokens=4).result().tokens) == first and model.mixing.kept is kept
    assert sc.explain(model).verdict == "ragged"


def read_first(own: Any, x: Tensor) -> Tensor:
    last = 0 if own.kept is None else own.kept
    own.kept = x.mean()
    return x + last


def read_by_another_name(own: Any, x: Tensor) -> Tensor:
    last = 0 if vars(own)["kept"] is None else 1
    own.kept = x.mean()
    return x + last


def counted(own: Any, x: Tensor) -> Tensor:
    own.calls += 1
    return x.roll(own.calls, -1)


def listed(own: Any, x: Tensor) -> Tensor:
    own.listed.append(x.mean())
    return x * len(own.listed)


@pytest.mark.parametrize("store", [read_first, read_by_another_name, counted, listed])
def test_what_a_later_call_reads_is_refused(store: Store) -> None:
    with pytest.raises(sc.RefusedError):
        step_program(decoder(store))
