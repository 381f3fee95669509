"""Pass 4: masks that are causal, or causal within a window, are proved; every other one is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import analysed, ragged_error, reasons
from tests.passes.spellings import below, scores_of, weigh

Mask = Callable[[Tensor, Tensor, int], Tensor]  # query positions [S, 1], key positions [1, S], S -> True to keep


def keeping(kept: Mask) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1])
        hidden = ~kept(places[:, None], places[None], q.shape[1])
        return weigh(scores_of(q, k).masked_fill(hidden, -1e30).softmax(-1), v)

    return attend


def hiding(hole: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A hole in a causal mask, where no number in the graph says."""
    return keeping(lambda i, j, s: (j <= i) & ~hole(i, j))


def adding_both(first: Mask, second: Mask) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places, size = torch.arange(q.shape[1]), q.shape[1]
        scores = scores_of(q, k) + first(places[:, None], places[None], size)
        return weigh((scores + second(places[:, None], places[None], size)).softmax(-1), v)

    return attend


def adding(added: Mask) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1])
        return weigh((scores_of(q, k) + added(places[:, None], places[None], q.shape[1])).softmax(-1), v)

    return attend


def with_inputs(kept: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """``kept`` gets the token ids and the attention mask, [B, S] each, and gives [B, 1, S or 1, S] booleans."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        keep = below(q.shape[1]) & kept(ids, mask)
        return weigh(scores_of(q, k).masked_fill(~keep, -1e30).softmax(-1), v) + 0.0 * ids[..., None, None]

    return attend


PROVED: dict[str, tuple[Callable[..., Any], int]] = {
    "triangle": (keeping(lambda i, j, s: below(s)), 0),
    "comparison": (keeping(lambda i, j, s: j <= i), 0),
    "not above": (keeping(lambda i, j, s: ~(j > i)), 0),
    "the same for each head": (keeping(lambda i, j, s: (j <= i) & (torch.arange(4)[:, None, None] >= 0)), 0),
    "added -inf": (adding(lambda i, j, s: torch.zeros(s, s).masked_fill(j > i, -math.inf)), 0),
    "added as BERT does": (adding(lambda i, j, s: (j > i) * -10_000.0), 0),
    "added lowest number of float16": (adding(lambda i, j, s: (j > i) * -65_504.0), 0),
    "added far from it": (adding(lambda i, j, s: (j > i) * -1e30 + (i - j >= 50) * -10_000.0), 50),
    "added triangle": (adding(lambda i, j, s: torch.full((s, s), -math.inf).triu(1)), 0),
    "window": (keeping(lambda i, j, s: (j <= i) & (i - j < 5)), 5),
    "window and its own key": (keeping(lambda i, j, s: (j <= i) & (j > i - 1)), 1),
    "window by two triangles": (keeping(lambda i, j, s: below(s) & ~torch.ones(s, s, dtype=torch.bool).tril(-9)), 9),
    "window beyond the dense probes": (keeping(lambda i, j, s: (j <= i) & (i - j < 700)), 700),
    "window by division": (keeping(lambda i, j, s: (j <= i) & ((i - j) // 7 < 100)), 700),
    "window by a float": (keeping(lambda i, j, s: (j <= i) & ((i - j).float() < 600.5)), 601),
    "window by a square": (keeping(lambda i, j, s: (j <= i) & ((i - j) * (i - j) < 250_000)), 500),
    "window by a root": (keeping(lambda i, j, s: (j <= i) & ((i - j).float().sqrt() < 27)), 729),
    "window of 4096": (keeping(lambda i, j, s: (j <= i) & (i - j < 4096)), 4096),
}


@pytest.mark.parametrize("name", PROVED)
def test_family_is_proved(name: str) -> None:
    function, window = PROVED[name]
    (call,) = analysed(function).calls
    assert call.family is not None
    assert (call.family.window, call.family.padding) == (window, None)


CHUNKS = {
    "chunks": (keeping(lambda i, j, s: (j <= i) & (i // 777 == j // 777)), 777, 0),
    "chunks of 3": (keeping(lambda i, j, s: (j <= i) & (i // 3 == j // 3)), 3, 0),
    "chunks of 8192": (keeping(lambda i, j, s: (j <= i) & (i // 8192 == j // 8192)), 8192, 0),
    "chunks by remainder": (keeping(lambda i, j, s: (j <= i) & (i - i % 5 <= j)), 5, 0),
    "chunks and a window": (keeping(lambda i, j, s: (j <= i) & (i // 12 == j // 12) & (i - j < 5)), 12, 5),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_are_proved(name: str) -> None:
    function, chunk, window = CHUNKS[name]
    (call,) = analysed(function).calls
    assert call.family is not None
    assert (call.family.chunk, call.family.window) == (chunk, window)
    assert ragged_error(function, lengths=(5, 1, 29, 3)) < 1e-5


PREFIXES = {
    "prefix": (keeping(lambda i, j, s: (j <= i) | (j < 4)), 4),
    "prefix of 2": (keeping(lambda i, j, s: (j <= i) | (j == 1)), 2),
    "prefix beyond the dense probes": (keeping(lambda i, j, s: (j <= i) | (j < 700)), 700),
    "prefix by division": (keeping(lambda i, j, s: (j <= i) | (j // 7 < 100)), 700),
    "prefix by a root": (keeping(lambda i, j, s: (j <= i) | (j.float().sqrt() < 27)), 729),
    "prefix beyond the triangle": (keeping(lambda i, j, s: (j <= i) | (j * j < 25_000_000)), 5000),
    "prefix of both": (keeping(lambda i, j, s: (j <= i) | ((j < 6) & (i < 6))), 6),
    "prefix with slopes": (
        adding(lambda i, j, s: torch.zeros(s, s).masked_fill((j > i) & (j >= 9), -math.inf) + (j - i) * 0.25),
        9,
    ),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_are_proved(name: str) -> None:
    function, prefix = PREFIXES[name]
    (call,) = analysed(function).calls
    assert call.family is not None
    assert (call.family.prefix, call.family.window, call.family.chunk) == (prefix, 0, 0)
    assert str(call.family).startswith(f"causal, prefix {prefix}")
    assert ragged_error(function, lengths=(5, 1, 29, 3)) < 1e-5


def test_slopes_beside_a_mask_that_they_never_uncover_are_proved() -> None:
    def slopes(i: Tensor, j: Tensor, s: int) -> Tensor:
        return (j - i) * torch.tensor([0.5, 0.25, 0.001, 3.0])[:, None, None]

    function = adding_both(lambda i, j, s: (j > i) * torch.finfo(torch.float32).min, slopes)
    (call,) = analysed(function).calls
    assert call.family is not None
    assert call.family.slopes == pytest.approx((0.5, 0.25, 0.001, 3.0), rel=1e-6)


def test_slopes_are_those_of_the_heads() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.001, 3.0])
    function = adding(lambda i, j, s: torch.full((s, s), -math.inf).triu(1) + (j - i) * slopes[:, None, None])
    (call,) = analysed(function).calls
    assert call.family is not None
    assert call.family.slopes == pytest.approx(slopes.tolist(), rel=1e-6)
    assert ragged_error(function) < 1e-5


@pytest.mark.parametrize("name", ["triangle", "window", "window by two triangles", "added -inf"])
def test_proved_mask_is_exact(name: str) -> None:
    assert ragged_error(PROVED[name][0], lengths=(5, 1, 23, 3)) < 1e-5


REFUSED: dict[str, Callable[..., Any]] = {
    "one future token": keeping(lambda i, j, s: (j <= i) | ((i == 3) & (j == 9))),
    "one future token far away": keeping(lambda i, j, s: (j <= i) | ((i == 5000) & (j == i + 1))),
    "one future token at a float": keeping(lambda i, j, s: (j <= i) | ((i * 1.0 > 70_000.5) & (i * 1.0 < 70_001.5))),
    "one future token at no constant of its own": keeping(lambda i, j, s: (j <= i) | ((i - 13) * (i - 13) == 8410_000)),
    "widened by one": keeping(lambda i, j, s: j <= i + 1),
    "shifted": keeping(lambda i, j, s: (j < i) | (i == 0)),
    "upper triangle": keeping(lambda i, j, s: j >= i),
    "a row dropped": keeping(lambda i, j, s: (j <= i) & ((i != 7) | (j == i))),
    "a row dropped far away": keeping(lambda i, j, s: (j <= i) & ((i != 3333) | (j == i))),
    "prefix of half the length": keeping(lambda i, j, s: (j <= i) | (j < s // 2)),
    "prefix but for the last": keeping(lambda i, j, s: (j <= i) | ((j < 30) & (j < s - 1))),
    "prefix for even tokens": keeping(lambda i, j, s: (j <= i) | ((j < 8) & (i % 2 == 0))),
    "prefix for one token less": keeping(lambda i, j, s: (j <= i) | ((j < 900) & (i != 313))),
    "prefix for one token less far away": keeping(lambda i, j, s: (j <= i) | ((j < 90_000) & (i != 3333))),
    "prefix with a hole": keeping(lambda i, j, s: (j <= i) | ((j < 900) & (j != 313))),
    "prefix from 3": keeping(lambda i, j, s: (j <= i) | ((j < 9) & (i >= 3))),
    "prefix and a window": keeping(lambda i, j, s: ((j <= i) & (i - j < 50)) | (j < 4)),
    "prefix and chunks": keeping(lambda i, j, s: ((j <= i) & (i // 50 == j // 50)) | (j < 4)),
    "prefix without distances": adding(
        lambda i, j, s: torch.zeros(s, s).masked_fill((j > i) & (j >= 9), -math.inf) - (i - j).abs() * 0.25
    ),
    "everything": keeping(lambda i, j, s: (j <= i) | (i < j)),
    "last row sees all": keeping(lambda i, j, s: (j <= i) | (i == s - 1)),
    "chunks that grow": keeping(lambda i, j, s: (j <= i) & ((i // 777 == j // 777) | (i > 5000))),
    "chunks from 3": keeping(lambda i, j, s: (j <= i) & ((i + 3) // 777 == (j + 3) // 777)),
    "chunks that see one back": keeping(lambda i, j, s: (j <= i) & ((i // 777 == j // 777) | (i - j == 2))),
    "every second": keeping(lambda i, j, s: (j <= i) & ((j % 2 == 0) | (i == j))),
    "every thousandth hidden": keeping(lambda i, j, s: (j <= i) & ((j % 1009 != 1008) | (i == j))),
    "a band of distances hidden": hiding(lambda i, j: (((i - j) * 0.02).floor() == 6) & (j >= 8)),
    "one distance hidden": hiding(lambda i, j: (((i - j) * 0.01 - 15.31).abs() < 1e-3) & (j >= 8)),
    "one far distance hidden": hiding(lambda i, j: (((i - j) * 0.01 - 351.31).abs() < 1e-3) & (j >= 8)),
    "a band hidden from far keys": hiding(lambda i, j: (((i - j) * 0.01).floor() == 333) & (j * 1e-3 > 50.5)),
    "one far key hidden": hiding(lambda i, j: ((j * 1e-3 - 77.777).abs() < 1e-4) & (j < i)),
    "one far query": hiding(lambda i, j: ((i * 1e-3 - 77.777).abs() < 1e-4) & (j < i)),
    "window with sinks": keeping(lambda i, j, s: (j <= i) & ((i - j < 5) | (j < 2))),
    "window that grows": keeping(lambda i, j, s: (j <= i) & (i - j < 50 + i // 2000)),
    "window per head": keeping(lambda i, j, s: (j <= i) & (i - j < torch.arange(4)[:, None, None] + 3)),
    "bias by the square": adding(lambda i, j, s: torch.full((s, s), -math.inf).triu(1) - (i - j) ** 2 * 0.1),
    "small bias": adding(lambda i, j, s: torch.full((s, s), -math.inf).triu(1) + 1e-3 * (j == 3)),
    "small bias far away": adding(lambda i, j, s: torch.full((s, s), -math.inf).triu(1) + 1e-3 * (j == 3000)),
    "small bias at a distance": adding(
        lambda i, j, s: (
            torch.full((s, s), -math.inf).triu(1)
            + 1e-3 * ((((i - j) * 0.02).floor() == 6) & (j >= 8)) * (torch.arange(4) > 2)[:, None, None]
        )
    ),
    "hidden a little": adding(lambda i, j, s: torch.zeros(s, s).masked_fill(j > i, -5.0)),
    "hidden, and uncovered": adding_both(lambda i, j, s: (j > i) * -10_000.0, lambda i, j, s: (j == i + 1) * 10_000.0),
    "hidden, and uncovered in part": adding_both(
        lambda i, j, s: torch.full((s, s), -1e30).triu(1), lambda i, j, s: (j > i) * 1e30
    ),
    "a window, and keys before it uncovered": adding_both(
        lambda i, j, s: (j > i) * -1e30 + (i - j >= 3) * -10_000.0,
        lambda i, j, s: ((i - j >= 3) & (j < 2)) * 10_000.0,
    ),
    "hidden, but for what slopes uncover far away": adding_both(
        lambda i, j, s: (j > i) * -10_000.0, lambda i, j, s: (j - i) * torch.full((4, 1, 1), 0.5)
    ),
    "hidden by less than enough": adding(lambda i, j, s: (j > i) * -9_000.0),
    "hidden, but for some": adding(lambda i, j, s: (j > i) * -10_000.0 - (j > i + 20) * -9_000.0),
    "hidden beside a bias of far ones": adding(lambda i, j, s: (j > i) * -10_000.0 - (i - j - 300).clamp(min=0) * 10.0),
    "literal table": keeping(lambda i, j, s: torch.tensor([True, False])[(j > i).long()]),
    "table that is too short": keeping(lambda i, j, s: torch.ones(20, 20, dtype=torch.bool).tril()[i, j]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(name: str) -> None:
    assert reasons(REFUSED[name])


def test_refusal_says_which_token_sees_which() -> None:
    (reason,) = reasons(REFUSED["one future token"])
    assert "the token at position 3 sees the one at 9" in reason
    (reason,) = reasons(REFUSED["a row dropped"])
    assert "the token at position 7 does not see the one at 0" in reason
    (reason,) = reasons(REFUSED["hidden by less than enough"])
    assert reason.endswith("at 1, to whose score -9000 is added, where at most -9984 hides it")


def test_refusal_of_a_prefix_beside_a_window_says_so() -> None:
    (reason,) = reasons(REFUSED["prefix and a window"])
    assert "no kernel has a prefix beside windows or chunks: causal, window 50, prefix 4" in reason


def padding(keep: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return weigh(scores_of(q, k).masked_fill(~(below(q.shape[1]) & keep(mask)), -1e30).softmax(-1), v)

    return attend


PADDINGS = {
    "not zero": padding(lambda m: (m != 0)[:, None, None, :]),
    "boolean": padding(lambda m: m.bool()[:, None, None, :]),
    "one": padding(lambda m: (m == 1)[:, None, None, :]),
    "keys and queries": padding(lambda m: (m[:, None, :, None] * m[:, None, None, :]) > 0),
    "the same segment": padding(lambda m: m[:, None, :, None] == m[:, None, None, :]),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_input_that_hides_keys_is_found(name: str) -> None:
    traced = analysed(PADDINGS[name])
    (call,) = traced.calls
    assert call.family is not None and call.family.padding is traced.tokens()[-1].node


def prefix_of_four(first: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        kept = (below(q.shape[1]) | first(mask)) & (mask != 0)[:, None, None, :]
        return weigh(scores_of(q, k).masked_fill(~kept, -1e30).softmax(-1), v)

    return attend


def test_a_prefix_that_counts_padding_is_proved_and_one_that_does_not_is_refused() -> None:
    (call,) = analysed(prefix_of_four(lambda mask: torch.arange(mask.shape[1]) < 4)).calls
    assert str(call.family) == "causal, prefix 4, keys hidden by the attention mask"
    assert reasons(prefix_of_four(lambda mask: (mask.cumsum(1) <= 4)[:, None, None, :]))


def added_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    hidden = torch.zeros(q.shape[1], q.shape[1]).masked_fill(~below(q.shape[1]), -math.inf)
    return weigh((scores_of(q, k) + hidden + (1.0 - mask[:, None, None, :]) * -1e10).softmax(-1), v)


def test_two_added_masks_are_one_family() -> None:
    (call,) = analysed(added_padding).calls
    assert len(call.masks) == 2
    assert str(call.family) == "causal, keys hidden by the attention mask"


INPUTS: dict[str, tuple[Callable[..., Any], str]] = {
    "padding by token id": (with_inputs(lambda ids, mask: (ids != 0)[:, None, None, :]), "outside of masks as well"),
    "another token id": (with_inputs(lambda ids, mask: (ids != 7)[:, None, None, :]), ""),
    "two inputs": (with_inputs(lambda ids, mask: (ids * mask > 0)[:, None, None, :]), "several inputs"),
    "queries alone": (padding(lambda m: (m != 0)[:, None, :, None]), "sees the one at"),
    "zeros are real": (padding(lambda m: (m == 0)[:, None, None, :]), "does not see"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_masks_that_read_inputs_in_other_ways_are_refused(name: str) -> None:
    function, reason = INPUTS[name]
    given = reasons(function)
    assert given and any(reason in text for text in given), given


def test_one_attention_with_padding_and_one_without_is_refused() -> None:
    """Removing padded tokens would take them away from the second attention as well."""

    def two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        first = PADDINGS["boolean"](q, k, v, mask)
        return weigh(scores_of(first, k).masked_fill(~below(q.shape[1]), -1e30).softmax(-1), v)

    assert any("another input than those of other attentions" in reason for reason in reasons(two))


@pytest.mark.parametrize("size", [torch.tensor(5), torch.tensor([5.0])])
def test_a_window_kept_in_a_buffer_is_refused(size: Tensor) -> None:
    """It may change, and the proof would not."""

    def attend(q: Tensor, k: Tensor, v: Tensor, window: Tensor) -> Tensor:
        places = torch.arange(q.shape[1])
        kept = below(q.shape[1]) & (places[:, None] - places[None] < window)
        return weigh(scores_of(q, k).masked_fill(~kept, -1e30).softmax(-1), v)

    assert any("reads a table or a weight" in reason for reason in reasons(attend, size))


def test_a_mask_changed_in_place_is_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.full((q.shape[1], q.shape[1]), -math.inf).triu(1)
        hidden[0, 1] = 0
        return weigh((scores_of(q, k) + hidden).softmax(-1), v)

    assert any("enumerates tokens" in reason for reason in reasons(attend))


def test_masks_of_grouped_scores_have_two_dimensions_of_heads() -> None:
    def attend(q: Tensor, kv: Tensor) -> Tensor:
        scores = torch.einsum("bqkgd,btkd->bkgqt", q.unflatten(2, (2, 2)), kv)
        weights = scores.masked_fill(~below(q.shape[1])[None, None, None], -math.inf).softmax(-1)
        return torch.einsum("bkgqt,btkd->bqkgd", weights, kv).flatten(2, 3)

    assert ragged_error(attend) < 1e-5


def test_masks_that_differ_in_what_hidden_scores_become_are_proved_apart() -> None:
    """Behind the second one a key is uncovered again, by what is added."""

    def twice(fill: float) -> Callable[..., Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = torch.arange(q.shape[1])
            hidden, ahead = ~below(q.shape[1]), (places[None] > places[:, None]).float() * 9990.0
            first = weigh((scores_of(q, k).masked_fill(hidden, -1e30) + ahead).softmax(-1), v)
            return first + weigh((scores_of(q, k).masked_fill(hidden, fill) + ahead).softmax(-1), v)

        return attend

    assert len(analysed(twice(-1e30)).calls) == 2 and not reasons(twice(-1e30))
    assert any("uncovers them" in reason for reason in reasons(twice(-1e4)))
