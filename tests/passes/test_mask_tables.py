"""Pass 4: masks that lie in buffers and tables are proved by every row, and bound requests; near misses are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes import mask_probes
from tests.passes.graphs import analysed, ragged_error, reasons
from tests.passes.spellings import below, scores_of, weigh

ROWS = 300
LENGTHS = (5, 1, 29, 3)
SLOPES = torch.tensor([0.5, 0.25, 0.001, 3.0])[:, None, None]
PLACES = torch.arange(ROWS)


def reading(rows: int = 0, columns: int = 0) -> Callable[..., Any]:
    """Hides what the table does not have, read from these constants on."""

    def attend(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
        size = q.shape[1]
        kept = buffer[:, :, rows : rows + size, columns : columns + size]
        return weigh(torch.where(kept, scores_of(q, k), torch.finfo(torch.float32).min).softmax(-1), v)

    return attend


def reading_the_end(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    start = ROWS - q.shape[1]
    return weigh(torch.where(buffer[:, :, start:, start:], scores_of(q, k), -1e30).softmax(-1), v)


def reading_the_last(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    kept = buffer[:, :, -q.shape[1] :, -q.shape[1] :]
    return weigh(torch.where(kept, scores_of(q, k), -1e30).softmax(-1), v)


def reading_the_end_for_keys(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
    kept = buffer[:, :, : q.shape[1], ROWS - q.shape[1] :]
    return weigh(torch.where(kept, scores_of(q, k), -1e30).softmax(-1), v)


def reading_at(
    read: Callable[[Tensor, Tensor], Tensor] = lambda buffer, places: buffer[:, :, places][..., : places.shape[0]],
    places: Callable[[Tensor], Tensor] = lambda places: places,
) -> Callable[..., Any]:
    """As gpt-fast has it: rows at positions, which generation hands the model, of as many keys as there are tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
        kept = read(buffer, places(torch.arange(q.shape[1])))
        return weigh(torch.where(kept, scores_of(q, k), -1e30).softmax(-1), v)

    return attend


def table(kept: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[1, 1, ROWS, ROWS], by the positions of query and key."""
    return kept(PLACES[:, None], PLACES[None])[None, None]


TRIANGLE = table(lambda i, j: j <= i)
PROVED = {
    "triangle": (reading(), TRIANGLE, 0, ROWS),
    "triangle from 7 on": (reading(7, 7), TRIANGLE, 0, ROWS - 7),
    "triangle at its end": (reading_the_end, TRIANGLE, 0, ROWS),
    "triangle, its last rows": (reading_the_last, TRIANGLE, 0, ROWS),
    "triangle at positions": (reading_at(), TRIANGLE, 0, ROWS),
    "triangle, its columns at positions": (
        reading_at(lambda buffer, places: buffer[..., : places.shape[0], :].index_select(3, places)),
        TRIANGLE,
        0,
        ROWS,
    ),
    "triangle at positions twice": (
        reading_at(lambda buffer, places: buffer.index_select(2, places)[..., places]),
        TRIANGLE,
        0,
        ROWS,
    ),
    "window": (reading(), table(lambda i, j: (j <= i) & (i - j < 4)), 4, ROWS),
    "window by shifting": (reading(1, 0), table(lambda i, j: (j < i) & (i - j < 9)), 8, ROWS - 1),
}


@pytest.mark.parametrize("name", PROVED)
def test_table_is_proved_and_bounds_requests(name: str) -> None:
    function, buffer, window, limit = PROVED[name]
    traced = analysed(function, buffer)
    (call,) = traced.calls
    assert not traced.refusals and call.family is not None
    assert (call.family.window, call.family.chunk) == (window, 0)
    assert traced.max_tokens in (limit, limit - 1)  # slicing asks for less than all rows
    assert [given.example is buffer for given in traced.proved_from] == [True]
    assert ragged_error(function, buffer, lengths=LENGTHS) < 1e-5


REFUSED = {
    "no triangle": (reading(), table(lambda i, j: j >= i)),
    "all": (reading(), table(lambda i, j: j >= 0 * i)),
    "widened": (reading(), table(lambda i, j: j <= i + 1)),
    "shifted": (reading(), table(lambda i, j: (j < i) | (i == 0))),
    "shifted by reading": (reading(0, 1), TRIANGLE),
    "widened by reading": (reading(1, 0), TRIANGLE),
    "a row dropped": (reading(), table(lambda i, j: (j <= i) & ((i != 271) | (j == i)))),
    "one future token": (reading(), table(lambda i, j: (j <= i) | ((i == 298) & (j == 299)))),
    "one hidden token": (reading(), table(lambda i, j: (j <= i) & ((i != 299) | (j != 3)))),
    "window that grows": (reading(), table(lambda i, j: (j <= i) & (i - j < 50 + i // 200))),
    "keys at the end": (reading_the_end_for_keys, TRIANGLE),
    "one future token at positions": (reading_at(), table(lambda i, j: (j <= i) | ((i == 298) & (j == 299)))),
    "one hidden token at positions": (reading_at(), table(lambda i, j: (j <= i) & ((i != 299) | (j != 3)))),
    "positions one ahead": (reading_at(places=lambda places: places + 1), TRIANGLE),
    "positions backwards": (reading_at(places=lambda places: places.flip(0)), TRIANGLE),
    "growing in its last rows": (reading_the_last, table(lambda i, j: (j <= i) | ((i == 298) & (j == 299)))),
    "growing at the end": (reading_the_end, table(lambda i, j: (j <= i) | ((i == 298) & (j == 299)))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tables_are_refused(name: str) -> None:
    assert reasons(*REFUSED[name])


def test_what_training_changes_is_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return weigh((scores_of(q, k) + w[: q.shape[1], : q.shape[1]]).softmax(-1), v)

    assert any("table or a weight" in reason for reason in reasons(attend, torch.full((40, 40), -math.inf).triu(1)))


def test_table_that_is_too_large_to_look_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_probes, "ALL_PAIRS", ROWS * ROWS - 1)
    assert any("too large" in reason for reason in reasons(reading(), TRIANGLE))


def test_every_pair_of_a_large_table_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles: wherever the one wrong pair is, and whichever tiles its row and its column are in."""
    monkeypatch.setattr(mask_probes, "TILE", 64)
    monkeypatch.setattr(mask_probes, "STRIPS_END", 0)
    for row, column in ((70, 5), (299, 130), (299, 298), (64, 63), (200, 199)):
        wrong = TRIANGLE.clone()
        wrong[0, 0, row, column] = False
        assert reasons(reading(), wrong), (row, column)
    assert not reasons(reading(), TRIANGLE)


def test_equal_tables_are_looked_at_once_and_each_is_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = mask_probes.tile_probes
    monkeypatch.setattr("selective_compile.passes.mask_proof.tile_probes", lambda *a: looked.append(1) or original(*a))

    def twice(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor, buffer_2: Tensor) -> Tensor:
        return reading()(q, reading()(q, k, v, buffer), v, buffer_2)

    window = table(lambda i, j: (j <= i) & (i - j < 4))
    traced = analysed(twice, TRIANGLE, TRIANGLE.clone())
    assert len(looked) == 1 and len(traced.proved_from) == 2
    calls = analysed(twice, TRIANGLE, window).calls
    assert [call.family.window for call in calls if call.family is not None] == [0, 4]


def biased(values: Callable[[Tensor], Tensor], *, outside: bool = False) -> Callable[..., Any]:
    """``values`` of ``1 - ROWS .. 0`` are a table of biases, read at its end, as MPT does."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = q.shape[1]
        bias = values(torch.arange(1 - ROWS, 1).view(1, 1, ROWS))[:, :, max(0, ROWS - size) :]
        scores = (scores_of(q, k) + bias).masked_fill(~below(size), -1e30)
        found = weigh(scores.softmax(-1), v)
        return found + bias.sum(0).mean(0)[None, :, None, None] if outside else found

    return attend


def test_bias_at_the_end_of_a_table_is_that_of_the_distance() -> None:
    function = biased(lambda places: places * SLOPES)
    traced = analysed(function)
    (call,) = traced.calls
    assert call.family is not None
    assert call.family.slopes == pytest.approx(SLOPES.flatten().tolist(), rel=1e-6)
    assert traced.max_tokens in (ROWS, ROWS - 1)
    assert ragged_error(function, lengths=LENGTHS) < 1e-5


@pytest.mark.parametrize(
    "values",
    [
        lambda places: places * places * SLOPES,
        lambda places: places * SLOPES + 1e-2 * (places == -130),
        lambda places: places.clamp(min=-290) * SLOPES,
    ],
)
def test_other_biases_at_the_end_of_a_table_are_refused(values: Any) -> None:
    assert reasons(biased(values))


def test_end_of_a_table_is_refused_outside_of_masks() -> None:
    assert any("length of the request" in r for r in reasons(biased(lambda places: places * SLOPES, outside=True)))


def times(table: Callable[[Tensor], Tensor], fill: float, before: float = 0.0) -> Callable[..., Any]:
    """``scores * mask + fill * (1 - mask)``, as the first GPT has it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, buffer: Tensor) -> Tensor:
        mask = table(buffer[:, :, : q.shape[1], : q.shape[1]].float())
        scores = scores_of(q, k)
        if before:
            scores = scores.masked_fill(~below(q.shape[1]), before)
        return weigh((scores * mask + fill * (1 - mask)).softmax(-1), v)

    return attend


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_scores_replaced_by_multiplying_are_hidden(fill: float) -> None:
    assert ragged_error(times(lambda mask: mask, fill), TRIANGLE, lengths=LENGTHS) < 1e-5


@pytest.mark.parametrize(
    "function",
    [
        times(lambda mask: mask, -100.0),
        times(lambda mask: mask, 1e4),
        times(lambda mask: mask * 0.5 + 0.5, -1e4),
        times(lambda mask: mask * 2, -1e4),
        times(lambda mask: mask, -1e4, before=-1e30),
    ],
)
def test_other_factors_are_refused(function: Any) -> None:
    assert reasons(function, TRIANGLE)


def lifted(fill: float, by: float) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1])
        scores = scores_of(q, k).masked_fill(~below(q.shape[1]), fill) + by * (places[None] > places[:, None])
        return weigh(scores.softmax(-1), v)

    return attend


def test_what_uncovers_hidden_scores_is_refused() -> None:
    assert not reasons(lifted(-1e4, -5.0))
    assert any("uncovers" in reason for reason in reasons(lifted(-1e4, 9990.0)))
