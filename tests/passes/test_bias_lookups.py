"""Biases that are looked up by how far back a key is, and sinks of each query's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.attention_calls import Operand
from tests.passes.graphs import analysed, ragged_error, reasons
from tests.passes.spellings import below, hide_future, scores_of, weigh

HEADS = 4
TABLE = torch.randn(9, HEADS, generator=torch.Generator().manual_seed(1))
PROFILES = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))  # [D, distances]
Bias = Callable[[Tensor, Tensor], Tensor]


def distances(length: int) -> Tensor:
    places = torch.arange(length)
    return places[:, None] - places[None, :]


def bucket(distance: Tensor) -> Tensor:
    """As T5 has them: each its own up to 4, then by their logarithm, up to 32."""
    far = 4 + (distance.float().clamp(min=1) / 4).log() / math.log(32 / 4) * 4
    return torch.where(distance < 4, distance.clamp(min=0), far.long().clamp(max=8))


def of_all(bias: Bias) -> Callable[..., Tensor]:
    """``bias``: of distances [S, S] and a table [9, H], as [H, S, S]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        scores = scores_of(q, k) + bias(distances(q.shape[1]), table)
        return weigh(hide_future(scores).softmax(-1), v)

    return attend


def scaled_with_scores(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = F.embedding(bucket(distances(q.shape[1])), table).permute(2, 0, 1)
    return weigh(hide_future((scores_of(q, k) + bias) * 0.5).softmax(-1), v)


def within_a_window(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    distance = distances(q.shape[1])
    scores = scores_of(q, k) + table[distance.clamp(0, 8)].permute(2, 0, 1)
    return weigh(scores.masked_fill((distance < 0) | (distance > 5), -math.inf).softmax(-1), v)


def behind_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, table: Tensor) -> Tensor:
    length = q.shape[1]
    seen = below(length) & (mask != 0)[:, None, None, :]
    bias = table[bucket(distances(length))].permute(2, 0, 1)[None]
    added = torch.where(seen, bias, torch.finfo(torch.float32).min)
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=added).transpose(1, 2)


OF_ALL: dict[str, Callable[..., Tensor]] = {
    "clamped": of_all(lambda d, table: F.embedding(d.clamp(0, 8), table).permute(2, 0, 1)),
    "buckets": of_all(lambda d, table: F.embedding(bucket(d), table).permute(2, 0, 1)[None]),
    "by index of 32 bits": of_all(lambda d, table: table[bucket(d).int()].permute(2, 0, 1)),
    "by index": of_all(lambda d, table: table[bucket(d)].permute(2, 0, 1)),
    "heads in front": of_all(lambda d, table: table.T[:, bucket(d)]),
    "one for all heads": of_all(lambda d, table: table[:, 0][bucket(d)]),
    "a table with the farthest first": of_all(lambda d, table: table[(8 - d).clamp(0, 8)].permute(2, 0, 1)),
    "its magnitude": of_all(lambda d, table: table[d.clamp(0, 8)].permute(2, 0, 1).abs()),
    "bounds": of_all(lambda d, table: table[d.clamp(0, 8)].clamp(-0.4, 5).permute(2, 0, 1).square()),
    "as of Swin V2": of_all(lambda d, table: 16 * F.embedding(bucket(d), table).permute(2, 0, 1)[None].sigmoid()),
    "in fewer bits": of_all(lambda d, table: table.T[:, bucket(d)].bfloat16().float() / 2 - 1),
    "none beyond, scaled": of_all(lambda d, table: -0.3 * table.T[:, bucket(d)].masked_fill(d > 6, 0.0)),
    "none beyond": of_all(lambda d, table: table[d.clamp(0, 8)].permute(2, 0, 1).masked_fill(d > 6, 0.0)),
    "scaled with scores": scaled_with_scores,
    "within a window": within_a_window,
    "behind padding": behind_padding,
}


@pytest.mark.parametrize("name", OF_ALL)
def test_a_bias_of_all_queries(name: str) -> None:
    (call,) = analysed(OF_ALL[name], TABLE).calls
    assert call.family is not None and call.family.distances and call.lookup is not None
    assert not call.lookup.per_query
    assert ragged_error(OF_ALL[name], TABLE, lengths=(5, 1, 40, 3)) < 1e-5


def own_bias(
    q: Tensor, k: Tensor, profiles: Tensor, *, index: Callable[[Tensor], Tensor] = lambda d: d.clamp(0, 5)
) -> Tensor:
    """[B, H, S, S]: of each query, numbers of its own for the nearest six keys."""
    distance = distances(q.shape[1])
    numbers = (q @ profiles).transpose(1, 2)
    found = numbers.gather(-1, index(distance).expand(*numbers.shape[:2], -1, -1))
    return found.masked_fill((distance < 0) | (distance >= 6), 0.0)


def of_each(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
    return weigh(hide_future(scores_of(q, k) + own_bias(q, k, profiles)).softmax(-1), v)


def groups_of_heads(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
    """Scores [B, key heads, heads of a group, S, S]."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k[:, :, ::2], v[:, :, ::2]))
    scores = torch.einsum("bkgqd,bkjd->bkgqj", queries.unflatten(1, (2, 2)), keys)
    scores = scores + own_bias(q, k, profiles).unflatten(1, (2, 2))
    return torch.einsum("bkgqj,bkjd->bqkgd", hide_future(scores).softmax(-1), values).flatten(2, 3)


@pytest.mark.parametrize("function", [of_each, groups_of_heads])
def test_a_bias_of_each_query(function: Callable[..., Tensor]) -> None:
    (call,) = analysed(function, PROFILES).calls
    assert call.family is not None and call.lookup is not None and call.lookup.per_query
    assert call.family.distances == (0, 1, 2, 3, 4, 5, -1)
    assert "a bias for each of 7 distances" in str(call.family)
    assert ragged_error(function, PROFILES, lengths=(5, 1, 40, 3)) < 1e-5


def of_keys(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
    """Each key has numbers of its own, as DeBERTa's have."""
    distance = distances(q.shape[1])
    numbers = (k @ profiles).transpose(1, 2)
    index = distance.T.clamp(0, 5).expand(*numbers.shape[:2], -1, -1)
    return weigh(hide_future(scores_of(q, k) + numbers.gather(-1, index).transpose(-1, -2)).softmax(-1), v)


def with_a_prefix(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    distance = distances(q.shape[1])
    scores = scores_of(q, k) + table[distance.abs().clamp(0, 8)].permute(2, 0, 1)
    hidden = (distance < 0) & (torch.arange(q.shape[1]) >= 4)
    return weigh(scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def capped(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    scores = scores_of(q, k) + table[distances(q.shape[1]).clamp(0, 8)].permute(2, 0, 1)
    return weigh(hide_future(3 * torch.tanh(scores / 3)).softmax(-1), v)


MORE = "does more with a bias that is looked up"
# What a proof on numbers of its own does not see: it depends on which numbers they are.
BY_THE_NUMBERS: dict[str, Bias] = {
    "the lesser of it and 0": lambda d, table: torch.minimum(table[d.clamp(0, 8)], torch.zeros(())).permute(2, 0, 1),
    "a condition on it": lambda d, table: (b := table[d.clamp(0, 8)].permute(2, 0, 1)).masked_fill(b < -0.3, 0.0),
    "hidden by it": lambda d, table: (b := table[d.clamp(0, 8)].permute(2, 0, 1)).masked_fill(b < -0.3, -math.inf),
    "a condition on its table": lambda d, table: torch.where(table[0, 0] < 0, table[d.clamp(0, 8)], 0.0).permute(
        2, 0, 1
    ),
    "an index of its table": lambda d, table: table[(d + table[:, 0].argmax()).clamp(0, 8)].permute(2, 0, 1),
    "its table beside it": lambda d, table: table[d.clamp(0, 8)].permute(2, 0, 1) + 0 * table.sum(),
}


@pytest.mark.parametrize("name", BY_THE_NUMBERS)
def test_what_goes_by_the_numbers_is_refused(name: str) -> None:
    assert any(MORE in reason for reason in reasons(of_all(BY_THE_NUMBERS[name]), TABLE))


def test_so_are_conditions_on_numbers_of_each_query() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
        bias = own_bias(q, k, profiles)
        return weigh(hide_future(scores_of(q, k) + bias.masked_fill(bias < 0, 0.0)).softmax(-1), v)

    assert any(MORE in reason for reason in reasons(function, PROFILES))


def test_so_is_what_asks_which_of_them_are_0() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, buffer_kept: Tensor) -> Tensor:
        kept = buffer_kept[distances(q.shape[1]).clamp(0, 8)].bool()
        return weigh(hide_future(torch.where(kept, scores_of(q, k), -math.inf)).softmax(-1), v)

    assert any(MORE in reason for reason in reasons(function, (TABLE[:, 0] > 0).float()))


@pytest.mark.parametrize("kept", [lambda x: x > 0, lambda x: x.round().long()])
def test_so_are_numbers_of_each_query_that_are_no_floats(kept: Callable[[Tensor], Tensor]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
        index = distances(q.shape[1]).clamp(0, 5).expand(q.shape[0], HEADS, -1, -1)
        bias = kept((q @ profiles).transpose(1, 2)).gather(-1, index)
        return weigh(hide_future(scores_of(q, k) + bias.float()).softmax(-1), v)

    assert any(MORE in reason for reason in reasons(function, PROFILES))


REFUSED: dict[str, tuple[Callable[..., Tensor], Tensor, str]] = {
    "by the key's position": (
        of_all(lambda d, table: table[(torch.arange(d.shape[0])[None, :] + 0 * d).clamp(0, 8)].permute(2, 0, 1)),
        TABLE,
        "differs between pairs of the same distance",
    ),
    "a number with the same": (
        of_all(lambda d, table: (bias := table[d.clamp(0, 8)].permute(2, 0, 1)) * bias),
        TABLE,
        MORE,
    ),
    "heads in another order": (
        of_all(lambda d, table: table[d.clamp(0, 8)].permute(2, 0, 1)[[1, 0, 2, 3]]),
        TABLE,
        MORE,
    ),
    "beside a linear bias": (
        of_all(lambda d, table: table[d.clamp(0, 8)].permute(2, 0, 1) - 0.1 * d),
        TABLE,
        "adds more to scores than what it looks up",
    ),
    "two of them": (
        of_all(lambda d, table: (table[d.clamp(0, 8)] + table[bucket(d)]).permute(2, 0, 1)),
        TABLE,
        "look biases up in several places",
    ),
    "of keys": (of_keys, PROFILES, "adds more to scores than what it looks up"),
    "with a prefix": (with_a_prefix, TABLE, "behind their query"),
    "capped": (capped, TABLE, "before the scores are capped"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    function, weight, reason = REFUSED[name]
    assert any(reason in found for found in reasons(function, weight)), reasons(function, weight)


# With a row for each distance that a model was trained with: of how many rows, and for requests of how many tokens.
ENDING: dict[str, tuple[Bias, int, int]] = {
    "a row for each distance": (lambda d, table: table[d.clamp(min=0)].permute(2, 0, 1), 41, 41),
    "also for later keys": (lambda d, table: F.embedding(d + 40, table).permute(2, 0, 1), 81, 41),
    "the nearest last": (lambda d, table: table.T[:, -1 - d], 41, 41),
    "a row for two distances": (lambda d, table: table[d.abs() // 2].permute(2, 0, 1), 41, 82),
    "more rows than a triangle of pairs": (lambda d, table: table[d.clamp(min=0)].permute(2, 0, 1), 4096, 4096),
}


@pytest.mark.parametrize("name", ENDING)
def test_a_table_that_ends_bounds_requests(name: str) -> None:
    bias, rows, longest = ENDING[name]
    table = torch.randn(rows, HEADS, generator=torch.Generator().manual_seed(4))
    traced = analysed(of_all(bias), table)
    assert not traced.refusals and traced.max_tokens == longest
    assert ragged_error(of_all(bias), table, lengths=(5, 1, 41, 3)) < 1e-5


def test_a_table_that_is_too_long_to_be_looked_at_is_refused() -> None:
    table = torch.randn(4097, HEADS, generator=torch.Generator().manual_seed(4))
    function = of_all(lambda d, table: table[d.clamp(min=0)].permute(2, 0, 1))
    assert any("reads a table beyond its end" in reason for reason in reasons(function, table))


def test_numbers_of_each_query_that_end_bound_requests_too() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
        bias = own_bias(q, k, profiles, index=lambda distance: distance.abs())
        return weigh(hide_future(scores_of(q, k) + bias).softmax(-1), v)

    traced = analysed(function, PROFILES)
    assert not traced.refusals and traced.max_tokens == 6
    assert ragged_error(function, PROFILES, lengths=(5, 1, 6, 3)) < 1e-5


def test_a_table_by_position_that_ends_is_refused() -> None:
    function = of_all(lambda d, table: table[torch.arange(d.shape[0]) + 0 * d].permute(2, 0, 1))
    assert any("differs between pairs of the same distance" in reason for reason in reasons(function, TABLE))


def test_a_bias_that_changes_as_far_as_it_was_looked_at_is_refused() -> None:
    table = torch.randn(2**18, 1, generator=torch.Generator().manual_seed(3))
    function = of_all(lambda d, table: table[d.clamp(min=0)].permute(2, 0, 1))
    assert any("goes on to change with the distance" in reason for reason in reasons(function, table))


def own_sinks(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """``weight``: [D, 1], of which each query has a sink for each head."""
    sinks = (q @ weight).transpose(1, 2)
    scores = torch.cat([hide_future(scores_of(q, k)), sinks], dim=-1)
    return weigh(scores.softmax(-1)[..., :-1], v)


def one_sink_for_all_heads(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    sinks = (q @ weight).transpose(1, 2)[:, :1].expand(-1, HEADS, -1, -1)
    scores = torch.cat([hide_future(scores_of(q, k)), sinks], dim=-1)
    return weigh(scores.softmax(-1)[..., :-1], v)


def repeated_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """``sinks``: [H], as gpt-oss repeats them for each token."""
    each = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], -1)
    return weigh(torch.cat([hide_future(scores_of(q, k)), each], dim=-1).softmax(-1)[..., :-1], v)


def test_sinks_that_are_repeated_for_each_token_are_those_of_heads() -> None:
    (call,) = analysed(repeated_sinks, TABLE[0].contiguous()).calls
    assert call.sinks is not None and not isinstance(call.sinks, Operand)


@pytest.mark.parametrize("function", [own_sinks, one_sink_for_all_heads])
def test_sinks_of_each_query(function: Callable[..., Tensor]) -> None:
    weight = PROFILES[:, :1].contiguous()
    (call,) = analysed(function, weight).calls
    assert isinstance(call.sinks, Operand)
    assert ragged_error(function, weight, lengths=(5, 1, 40, 3)) < 1e-5
