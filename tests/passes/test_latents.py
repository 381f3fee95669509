"""Keys and values that are made of a latent: which are recognised, that the rows kept in their place give the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from selective_compile.passes import latent_rows, latents
from selective_compile.passes.attention_calls import Latent
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.latents import recognise_latents
from selective_compile.passes.sampled_rows import keep_sampled_rows
from tests.passes.graphs import analysed, sample

HEADS, NOPE, ROPE, VALUE, RANK = 4, 8, 4, 6, 8  # the query q [4, 8] is half of a query's own columns
GENERATOR = torch.Generator().manual_seed(0)
UP = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=GENERATOR)
KEYS, VALUES = torch.randn(HEADS * NOPE, RANK, generator=GENERATOR), torch.randn(HEADS * 8, RANK, generator=GENERATOR)
BOTH = torch.cat([KEYS, VALUES])
LENGTHS, CHUNK, BLOCK = (5, 1, 12, 3), 4, 4


def heads(x: Tensor, size: int) -> Tensor:
    """[B, S, H * size] -> [B, H, S, size]"""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def latent_of(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(y: Tensor) -> Tensor:
    """[B, 1, S, 4]: two parts put together, as a rotation's are."""
    return torch.cat([y[..., 2:4] - y[..., :2], y[..., :2] + 1], dim=-1)[:, None]


def attended(q: Tensor, own: Tensor, shared: list[Tensor], value: Tensor, **options: Any) -> Tensor:
    """``shared`` are keys [B, 1, S, n] in front of the heads' own and behind them."""
    first, last = (x.expand(-1, HEADS, -1, -1) for x in shared)
    query = torch.cat([q.transpose(1, 2)[..., : first.shape[-1]], q.transpose(1, 2), q.transpose(1, 2)], dim=-1)
    key = torch.cat([first, own, last], dim=-1)
    mixed = F.scaled_dot_product_attention(query[..., : key.shape[-1]], key, value, is_causal=True, **options)
    return mixed.transpose(1, 2).flatten(2)


def nothing(y: Tensor) -> Tensor:
    return y[:, None, :, :0]


def interleaved(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    """As in DeepSeek: a head's rows for its key, then those for its value."""
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, key, [nothing(y), rotated(y)], value)


def written(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    """The key is written into new memory."""
    made = heads(F.linear(latent_of(x), up), NOPE + VALUE)
    key = made.new_empty(*made.shape[:-1], NOPE + ROPE)
    key[..., :NOPE].copy_(made[..., :NOPE])
    key[..., NOPE:].copy_(rotated(y).expand(-1, HEADS, -1, -1))
    query = torch.cat([q, q[..., :ROPE]], dim=-1).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, made[..., NOPE:], is_causal=True).transpose(1, 2).flatten(2)


def values_first(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    value, key = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([VALUE, NOPE], dim=-1)
    return attended(q, key, [rotated(y), nothing(y)], value)


def two_layers(q: Tensor, x: Tensor, y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    latent = latent_of(x)
    key, value = heads(F.linear(latent, keys), NOPE), heads(F.linear(latent, values), 8)
    return attended(q, key, [rotated(y)[..., :2], rotated(y)], value)


def all_keys_then_all_values(q: Tensor, x: Tensor, y: Tensor, both: Tensor) -> Tensor:
    key, value = F.linear(latent_of(x), both).split([HEADS * NOPE, HEADS * 8], dim=-1)
    return attended(q, heads(key, NOPE), [nothing(y), nothing(y)], heads(value, 8))


def eager(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    """Scores of its own, with a softcap and a sink in the way of the maps."""
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    key = torch.cat([key, rotated(y).expand(-1, HEADS, -1, -1)], dim=-1)
    query = torch.cat([q, q[..., :ROPE]], dim=-1).transpose(1, 2)
    scores = torch.tanh(query @ key.transpose(-1, -2) * 0.3 / 2.0) * 2.0
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_what_is_recognised() -> None:
    found = latent(interleaved, UP)
    assert (found.size, found.row_size, found.at) == (RANK, RANK + ROPE, 0)
    assert [(rows.first, rows.step, rows.size) for rows in (found.key, found.value)] == [(0, 14, 8), (8, 14, 6)]
    assert [(columns.first, columns.size) for columns in found.shared] == [(0, 4)]
    found = latent(two_layers, KEYS, VALUES)
    assert (found.at, found.row_size) == (2, RANK + 2 + ROPE)
    found = latent(all_keys_then_all_values, BOTH)
    assert [(rows.first, rows.step) for rows in (found.key, found.value)] == [(0, 8), (32, 8)]
    assert found.shared == () and found.row_size == RANK


@pytest.mark.parametrize(
    ("function", "weights"),
    [
        (interleaved, [UP]),
        (written, [UP]),
        (values_first, [UP]),
        (two_layers, [KEYS, VALUES]),
        (all_keys_then_all_values, [BOTH]),
        (eager, [UP]),
        (interleaved, [torch.stack([UP, UP], dim=2)[..., 0]]),
    ],
    ids=["interleaved", "written", "values_first", "two_layers", "all_keys_then_all_values", "eager", "strided"],
)
def test_rows_in_place_of_keys_and_values_give_the_same(function: Callable[..., Tensor], weights: list[Tensor]) -> None:
    traced = analysed(function, *weights)
    assert recognise_latents(traced) == 1
    kept = traced.calls[0].latent
    assert kept is not None
    flat = flatten(traced, paged=True)
    targets = [str(node.target) for node in flat.module.graph.nodes]
    assert targets.count("selective.latent_attention.default") == 1 and "aten.linear.default" not in targets
    assert [list(x.shape)[1::2] for x in flat.example_inputs[len(flat.weights) + 3 :] if x.dim() == 4] == [
        [1, kept.row_size]
    ]
    names_of = [name for name in inspect.signature(function).parameters if name in ("q", "x", "y")]
    requests = [[sample(n, 1, length, seed=length) for n in names_of] for length in LENGTHS]
    pool = torch.full((sum(-(-n // BLOCK) for n in LENGTHS), 1, BLOCK, kept.row_size), torch.nan)
    for n, request in enumerate(requests):
        torch.testing.assert_close(
            in_chunks(flat, request, pool, n), function(*request, *weights)[0], rtol=0, atol=1e-5
        )


def test_weights_are_read_where_they_are() -> None:
    """Nothing is multiplied beforehand: a weight that changes in place changes the next step."""
    weight = UP.clone()
    flat = flat_of(interleaved, weight)
    request = [sample(n, 1, 4) for n in "qxy"]
    pool = torch.zeros(1, 1, BLOCK, RANK + ROPE)
    before = in_chunks(flat, request, pool, 0)
    weight.mul_(1.5)
    after = in_chunks(flat, request, pool, 0)
    torch.testing.assert_close(after, interleaved(*request, weight)[0], rtol=0, atol=1e-5)
    assert float((after - before).abs().max()) > 0.1


def test_on_a_gpu_the_maps_are_multiplied_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_rows, "has_kernel", lambda weight: False)
    flat = flat_of(interleaved, UP)
    targets = [str(node.target) for node in flat.module.graph.nodes]
    assert targets.count("aten.bmm.default") == 2 and "selective.head_products.default" not in targets
    request = [sample(n, 1, 5) for n in "qxy"]
    ours = in_chunks(flat, request, torch.zeros(2, 1, BLOCK, RANK + ROPE), 0)
    torch.testing.assert_close(ours, interleaved(*request, UP)[0], rtol=0, atol=1e-5)


def test_on_a_gpu_keys_and_values_are_kept_where_no_tile_has_room_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found, half, single = latent(interleaved, UP), torch.bfloat16, torch.float32
    for most, beside, dtype, fits in (
        (RANK, ROPE, half, True),
        (RANK - 1, ROPE, half, False),
        (RANK, ROPE - 1, half, False),
        (RANK, ROPE, single, False),
        (RANK, 2 * ROPE, single, True),
    ):
        monkeypatch.setattr(latents, "MOST_IN_LATENT", most)
        monkeypatch.setattr(latents, "MOST_BESIDE", beside)
        with FakeTensorMode():
            assert latents.fits_a_tile(found, torch.empty(0, dtype=dtype, device="cuda")) is fits
        assert latents.fits_a_tile(found, torch.empty(0, dtype=dtype))
    monkeypatch.setattr(latents, "fits_a_tile", lambda found, query: False)
    traced = analysed(interleaved, UP)
    assert recognise_latents(traced) == 0
    targets = [str(node.target) for node in flatten(traced, paged=True).module.graph.nodes]
    assert targets.count("selective.ragged_attention.default") == 1


def test_rows_are_selected_behind_the_attention() -> None:
    flat = flat_of(interleaved, UP)
    assert keep_sampled_rows(flat) == 1
    order = [str(node.target) for node in flat.module.graph.nodes]
    assert order.index("selective.latent_attention.default") < order.index("aten.index_select.default")


def with_bias(q: Tensor, x: Tensor, y: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), up, bias), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, key, [nothing(y), rotated(y)], value)


def rotated_heads(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    """What is behind the heads' own columns differs between heads."""
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    last = rotated(y) * torch.arange(1, HEADS + 1)[:, None, None]
    return attended(q, key, [nothing(y), last], value)


def changed_keys(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, key.tanh(), [nothing(y), rotated(y)], value)


def other_latent(q: Tensor, x: Tensor, y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), keys), NOPE), heads(F.linear(latent_of(y), values), 8)
    return attended(q, key, [nothing(y), rotated(y)], value)


def reversed_heads(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    """The rows of the weight lie the other way round."""
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, torch.cat(key.split(1, dim=1)[::-1], dim=1), [nothing(y), rotated(y)], value)


def scattered_columns(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    key = torch.cat([key[..., :4], rotated(y)[..., :2].expand(-1, HEADS, -1, -1), key[..., 4:]], dim=-1)
    return attended(q, key, [nothing(y), nothing(y)], value)


def padded_values(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), up), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, key, [nothing(y), rotated(y)], torch.cat([value, value.new_zeros(*value.shape[:-1], 6)], dim=-1))


def computed_weight(q: Tensor, x: Tensor, y: Tensor, up: Tensor) -> Tensor:
    key, value = heads(F.linear(latent_of(x), up * 2), NOPE + VALUE).split([NOPE, VALUE], dim=-1)
    return attended(q, key, [nothing(y), rotated(y)], value)


def no_gain(q: Tensor, x: Tensor, y: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Ordinary keys and values are linear maps too, of as many numbers as they have."""
    wide = torch.cat([latent_of(x), x, y, y], dim=-1)
    key, value = heads(F.linear(wide, keys), NOPE), heads(F.linear(wide, values), 8)
    return attended(q, key, [nothing(y), nothing(y)], value)


@pytest.mark.parametrize(
    ("function", "weights"),
    [
        (with_bias, [UP, torch.randn(len(UP), generator=GENERATOR)]),
        (rotated_heads, [UP]),
        (changed_keys, [UP]),
        (other_latent, [KEYS, VALUES]),
        (reversed_heads, [UP]),
        (scattered_columns, [UP]),
        (padded_values, [UP]),
        (computed_weight, [UP]),
        (no_gain, [KEYS.repeat(1, 4), VALUES.repeat(1, 4)]),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_near_misses_are_left_as_they_are(function: Callable[..., Tensor], weights: list[Tensor]) -> None:
    traced = analysed(function, *weights)
    assert traced.calls and not traced.refusals
    assert recognise_latents(traced) == 0
    flat = flatten(traced, paged=True)
    targets = [str(node.target) for node in flat.module.graph.nodes]
    assert "selective.latent_attention.default" not in targets
    assert "selective.ragged_attention.default" in targets


def test_a_second_run_finds_the_same() -> None:
    traced = analysed(interleaved, UP)
    assert recognise_latents(traced) == 1
    before = traced.calls[0].latent
    assert recognise_latents(traced) == 1 and traced.calls[0].latent == before


def latent(function: Callable[..., Tensor], *weights: Tensor) -> Latent:
    traced = analysed(function, *weights)
    recognise_latents(traced)
    found = traced.calls[0].latent
    assert found is not None
    return found


def flat_of(function: Callable[..., Tensor], *weights: Tensor) -> FlatGraph:
    traced = analysed(function, *weights)
    recognise_latents(traced)
    return flatten(traced, paged=True)


def in_chunks(flat: FlatGraph, request: list[Tensor], pool: Tensor, n: int) -> Tensor:
    """``[S, h]``: request ``n`` by up to `CHUNK` tokens a step, in blocks from the end of the pool."""
    length, found = request[0].shape[1], []
    before = sum(-(-other // BLOCK) for other in LENGTHS[:n])
    blocks = len(pool) - 1 - before - torch.arange(-(-length // BLOCK))
    for start in range(0, length, CHUNK):
        positions = torch.arange(start, min(start + CHUNK, length))
        arguments = [given.example for given in flat.weights]
        arguments += [request[given.index - 2][:, positions] for given in flat.tokens]
        arguments += [positions] if flat.uses_positions else []
        bounds, context = torch.tensor([0, len(positions)]), positions[-1:] + 1
        arguments += [bounds.to(torch.int32), context.to(torch.int32), blocks[None].to(torch.int32)]
        arguments += [blocks[positions // BLOCK] * BLOCK + positions % BLOCK, pool]
        found.append(flat.module(*arguments)[0][0])
    return torch.cat(found)
