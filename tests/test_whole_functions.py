"""A decoder whose recurrence is a Python loop of its own is ragged; the live model sees nothing of how."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.model_recurrences import recurrences_of
from selective_compile.whole_functions import left_whole
from tests.decoders import Residual
from tests.exactness import TOLERANCE, engine_error, greatest, step_program

VOCABULARY, WIDTH = 31, 8


def forgetful(keep: Tensor, fresh: Tensor, **ignored: Any) -> Tensor:
    """A linear recurrence, in a loop over the tokens."""
    state, states = torch.zeros_like(fresh[:, 0]), []
    for t in range(fresh.shape[1]):
        state = keep[:, t] * state + fresh[:, t]
        states.append(state)
    return torch.stack(states, 1)


def peeking(keep: Tensor, fresh: Tensor, **ignored: Any) -> Tensor:
    return forgetful(keep, fresh) + fresh.mean(1, keepdim=True)


SHIFT = nn.ZeroPad2d((0, 0, 1, -1))


class Forgetting(nn.Module):
    """The same loop, as a module's own `forward`; with ``weighted``, its result times a weight."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5)) if weighted else None

    def forward(self, keep: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        state, states = torch.zeros_like(fresh[:, 0]), []
        for t in range(fresh.shape[1]):
            state = keep[:, t] * state + fresh[:, t]
            states.append(state)
        return torch.stack(states, 1) * (1 if self.weight is None else self.weight), state


class Mixer(nn.Module):
    """Convolution, a shift by one token, and the loop."""

    def __init__(
        self, peeks: bool = False, shift: Callable[[Tensor], Tensor] = SHIFT, loop: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.loop = loop
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.shift = shift
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.peeks = peeks

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = F.silu(self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2))
        gate = torch.sigmoid(self.gate(mixed + self.shift(hidden)))
        if self.loop is not None:
            return self.loop(gate, mixed)[0]
        return peeking(gate, mixed) if self.peeks else forgetful(gate, mixed, width=(hidden,))


class Recurrent(Residual):
    def __init__(self, peeks: bool = False, **mixer: Any) -> None:
        super().__init__(lambda: Mixer(peeks, **mixer), VOCABULARY, WIDTH)


def test_recurrences_of_a_model_of_ones_own_are_ragged() -> None:
    model = Recurrent().eval()
    report = sc.explain(model)
    assert report.verdict == "ragged", str(report)
    assert [call.family for call in report.recurrences].count("linear recurrence") == 2
    assert [call.family for call in report.recurrences].count("causal convolution") == 4  # two convolutions, two shifts
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_under_autocast_they_are_ragged_too() -> None:
    model, ids = Recurrent().eval(), torch.arange(30)[None]
    plain = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounding = greatest(model(ids) - plain)
        assert 0 < engine_error(model, vocabulary=VOCABULARY) < 2 * rounding
        with pytest.raises(sc.RefusedError):
            step_program(Recurrent(peeks=True).eval())


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded first and cut then": lambda x: F.pad(x, (0, 0, 2, 0))[:, :-2],
    "behind zeros like a token": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1),
    "behind zeros of a size": lambda x: torch.cat([torch.zeros(1, 1, WIDTH), x[:, :-1]], dim=-2),
    "behind new zeros": lambda x: torch.cat((x.new_zeros(x.shape[0], 1, WIDTH), x[:, :-1]), dim=1),
    "behind a number": lambda x: torch.cat((x.new_full((x.shape[0], 1, WIDTH), 0.0), x[:, :-1]), dim=1),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_by_some_tokens_are_convolutions(name: str) -> None:
    model = Recurrent(shift=SHIFTS[name]).eval()
    assert [call.family for call in sc.explain(model).recurrences].count("causal convolution") == 4
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize(
    "shift",
    [
        lambda x: torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], dim=1),
        lambda x: torch.cat([x[:, :1], x[:, :-1]], dim=1),
        lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1),
        lambda x: torch.cat([torch.zeros(1, 3, WIDTH), x[:, :-3]], dim=1),  # of two tokens it makes three
    ],
    ids=["behind ones", "the first one twice", "ahead", "of some lengths alone"],
)
def test_what_is_no_shift_is_none(shift: Callable[[Tensor], Tensor]) -> None:
    report = sc.explain(Recurrent(shift=shift).eval())
    assert report.verdict != "ragged"


class Telling(Forgetting):
    """Its caller looks whether there is something beside what it gives."""

    def forward(self, keep: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(keep, fresh)


class Looking(Mixer):
    def forward(self, hidden: Tensor) -> Tensor:
        found, state = self.loop(torch.sigmoid(self.gate(hidden)), hidden)
        return found if state is None else found + state.mean(1, keepdim=True)[:, None]


def test_other_results_that_a_model_looks_at_are_not_taken_for_none() -> None:
    model = Recurrent(loop=Telling(False)).eval()
    for layer in model.layers:
        layer.__class__ = Looking
    assert sc.explain(model).verdict != "ragged"


class Scaled(Forgetting):
    """With something beside its arguments, which may be another later."""

    def __init__(self, buffer: bool) -> None:
        super().__init__(False)
        if buffer:
            self.register_buffer("factor", torch.ones(1), persistent=False)
        else:
            self.factor = 1.0

    def forward(self, keep: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        found, state = super().forward(keep, fresh)
        return found * self.factor, state


def test_a_module_with_a_buffer_is_no_formula() -> None:
    report = sc.explain(Recurrent(loop=Scaled(True)).eval())
    assert not any(call.family == "linear recurrence" for call in report.recurrences)


def test_an_attribute_of_a_module_that_is_left_whole_is_watched() -> None:
    model = Recurrent(loop=Scaled(False)).eval()
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    engine.submit([1, 2, 3], max_new_tokens=2).result()
    for layer in model.layers:
        layer.loop.factor = 2.0
    assert "factor" in str(engine.submit([1, 2, 3], max_new_tokens=2).result().error)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_module_whose_forward_is_the_loop_is_known_where_it_has_no_weights(weighted: bool) -> None:
    model = Recurrent(loop=Forgetting(weighted)).eval()
    report = sc.explain(model)
    assert report.verdict == ("isolated" if weighted else "ragged"), str(report)
    assert [call.family for call in report.recurrences].count("linear recurrence") == (0 if weighted else 2)
    if not weighted:
        assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_a_loop_that_looks_at_all_tokens_is_refused() -> None:
    with pytest.raises(sc.RefusedError):
        sc.Engine(Recurrent(peeks=True).eval(), sc.EngineConfig(compile=False))


def test_the_function_is_the_models_own_again_and_for_other_threads_always_was() -> None:
    model = Recurrent().eval()
    before, ids = globals()["forgetful"], torch.arange(9)[None]
    expected, seen = model(ids), []
    functions = recurrences_of(model)
    assert globals()["forgetful"] is before
    with left_whole(functions):
        thread = threading.Thread(target=lambda: seen.append(model(ids)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], expected)
    capture(model, functions)
    assert globals()["forgetful"] is before


@pytest.mark.parametrize("change", ["offset", "dilation", "look ahead"])
def test_other_convolutions_are_left_alone(change: str) -> None:
    model = Recurrent().eval()
    conv = {
        "offset": nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=3),
        "dilation": nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2, dilation=2),
        "look ahead": nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=1),
    }[change]
    model.layers[0].conv = conv
    report = sc.explain(model)
    assert report.verdict != "ragged"
    assert report.refusals


def scaled(keep: Tensor, fresh: Tensor, factors: list[float]) -> Tensor:
    state, states = torch.zeros_like(fresh[:, 0]), []
    for t in range(fresh.shape[1]):
        state = keep[:, t] * state + fresh[:, t] * factors[0]
        states.append(state)
    return torch.stack(states, 1)


def noting(keep: Tensor, fresh: Tensor, factors: list[float]) -> Tensor:
    factors.append(1.0)
    return forgetful(keep, fresh)


class Listing(nn.Module):
    """The loop is given a list, of the module's own or a new one, which is read behind it."""

    def __init__(self, own: bool, notes: bool) -> None:
        super().__init__()
        self.factors, self.own, self.notes = [1.0], own, notes
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        factors = self.factors if self.own else [1.0]
        mixed = (noting if self.notes else scaled)(torch.sigmoid(self.gate(hidden)), hidden, factors)
        return mixed * len(factors)


def listing(own: bool, notes: bool = False) -> Recurrent:
    model = Recurrent()
    model.layers = nn.ModuleList([Listing(own, notes)])
    return model.eval()


@pytest.mark.parametrize("own", [False, True])
def test_a_loop_may_take_a_list(own: bool) -> None:
    model = listing(own)
    report = sc.explain(model)
    assert report.verdict == "ragged", str(report)
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_a_loop_that_writes_into_its_list_is_not_left_whole() -> None:
    model = listing(own=False, notes=True)
    assert [place.name for place in recurrences_of(model)] == ["forgetful"]  # which it calls
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


def test_a_list_that_is_another_one_later_is_told_by_name() -> None:
    model = listing(own=True)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    engine.submit([1, 2, 3], max_new_tokens=4, do_sample=False)
    engine.step()
    model.layers[0].factors[0] = 2.0  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"layers\.0\.factors.*must stay \[1\.0\]"):
        engine.step()
