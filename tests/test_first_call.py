"""A model that sets a flag, or makes a table, when first called is traced with it; nothing else is left in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import selective_compile as sc
from selective_compile.first_call import set_for_good
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, engine_error
from tests.longrope import longrope
from tests.oracle import assert_same_tokens

FAST = sc.EngineConfig(compile=False, block_size=8, token_budget=16, max_kv_tokens=512)


class Made(nn.Module):
    """Makes its scale in the first call."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.5, WIDTH, device=x.device)
        return x * self.scale


class MadeInARow(nn.Module):
    """As TinyLlama's own code has its cosines and sines, which no module but the model has."""

    tables: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tables is None:
            angles = torch.outer(torch.arange(64), torch.linspace(0.1, 0.5, WIDTH))
            self.tables = angles.cos(), angles.sin()
        cosines, sines = self.tables
        return x * cosines[: x.shape[1]] + x.flip(-1) * sines[: x.shape[1]]


class Counted(Made):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Flagged(nn.Module):
    """As RWKV, whose weights its first call divides, by one where it has few layers."""

    called = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.called:
            self.called = True
        return x


class Alternating(nn.Module):
    odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        return x


class Last(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x[:, -1]
        return x


def decoder(kind: type[nn.Module]) -> Any:
    model: Any = Decoder(layers=1, mix=(mix := kind()))
    model.mix = mix
    return model


def test_what_a_second_call_leaves_is_made_for_good() -> None:
    model = decoder(Made)
    assert set_for_good(model, Tensor) and torch.equal(model.mix.scale, torch.linspace(0.5, 1.5, WIDTH))
    assert not set_for_good(model, Tensor)


def test_tables_in_a_row_are_made_for_good() -> None:
    model = decoder(MadeInARow)
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    assert len(model.mix.tables) == 2


def test_what_a_call_only_counts_stays() -> None:
    model = decoder(Counted)
    assert set_for_good(model, Tensor)
    assert model.mix.calls == 0 and model.mix.scale is not None


def test_what_depends_on_the_tokens_is_not_left() -> None:
    model = decoder(Last)
    assert not set_for_good(model, Tensor)
    assert model.mix.last is None and "last" not in vars(model.mix)


def test_flags_that_stay_are_set_for_good() -> None:
    model, other = decoder(Flagged), decoder(Alternating)
    assert set_for_good(model, bool) and model.mix.called
    assert not set_for_good(other, bool) and "odd" not in vars(other.mix)


class Table(nn.Module):
    """Scales by a table that its first call makes, and says in a flag that it is there."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.ready, self.setting = how, False, SimpleNamespace(ready=False)
        self.table: Any = None
        self.numbers = [1.0]
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not (self.setting.ready if self.how == "flag in an object" else self.ready):
            self.make(torch.linspace(0.5, 1.5, WIDTH, device=x.device))
        return x * self.scale * (1.0 if self.table is None else self.table) * self.numbers[0]

    def make(self, table: Tensor) -> None:
        if self.how == "attribute":  # as MPT's biases
            self.table = table
        elif self.how == "list":
            self.numbers = [2.0]
        elif self.how == "buffer":
            self.scale = table
        else:
            self.scale.copy_(table)
        if self.how == "flag in an object":
            self.setting.ready = True
        else:
            self.ready = True


@pytest.mark.parametrize("how", ["attribute", "list", "buffer", "written buffer", "flag in an object"])
def test_what_is_made_beside_a_flag_stays_with_it(how: str) -> None:
    """Or neither does: a flag that stays alone says that there is what was taken back."""
    model, reference = decoder(Table), decoder(Table)
    model.mix.how = reference.mix.how = how
    reference.load_state_dict(model.state_dict())
    sc.explain(model)
    with torch.no_grad():
        ids = torch.tensor([[5, 7, 9]])
        expected = reference(ids)
        assert torch.equal(model(ids), expected) and torch.equal(model(ids), expected)


class NormalisedHead(nn.Module):
    """As Baichuan's, whose first call normalises its weight."""

    first = True

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().clone() * 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            self.weight.data = F.normalize(self.weight.data)
        return F.linear(x, self.weight)


def test_what_is_made_beside_a_flag_stays_when_weights_change() -> None:
    model, reference = decoder(Table), decoder(Table)
    model.mix.how = reference.mix.how = "attribute"
    reference.load_state_dict(model.state_dict())
    model.head, reference.head = NormalisedHead(model.head), NormalisedHead(reference.head)
    reference.head.load_state_dict(model.head.state_dict())
    assert sc.explain(model).verdict == "ragged"
    with torch.no_grad():
        ids = torch.tensor([[5, 7, 9]])
        assert torch.equal(model(ids), reference(ids))
    assert model.mix.table is not None and model.mix.ready


def rwkv(layers: int, rescale_every: int) -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": layers, "context_length": 64}
    config = AutoConfig.for_model("rwkv", rescale_every=rescale_every, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(("layers", "rescale_every"), [(2, 6), (2, 0), (4, 2)])
def test_rwkv_that_nobody_has_called_is_ragged_and_stays_so(layers: int, rescale_every: int) -> None:
    model, reference = rwkv(layers, rescale_every), rwkv(layers, rescale_every)
    assert sc.explain(model).verdict == "ragged"
    engine = sc.Engine(model, FAST)
    with torch.no_grad():
        model(torch.tensor([[5, 7, 9]]))
    engine._runner.look_closely()
    assert_same_tokens(reference, [5, 7, 9], engine.submit([5, 7, 9], max_new_tokens=9).result().tokens)


def test_a_live_engine_goes_on_when_the_user_has_called_the_model() -> None:
    model = longrope(400)
    engine = sc.Engine(model, FAST)
    with torch.no_grad():
        model(torch.arange(401)[None] % 50)  # leaves the frequencies of long requests in the model
    request = engine.submit([5, 7, 9], max_new_tokens=20)
    assert_same_tokens(longrope(400), [5, 7, 9], request.result().tokens)
