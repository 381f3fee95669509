"""Rotations, and norms in front of them, that go into the attention behind them; and those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from selective_compile.implementations import forced_implementation
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flatten import flatten
from selective_compile.passes.fp8_pools import keep_as_fp8
from selective_compile.passes.fuse_rotary import fuse_rotary
from selective_compile.passes.int8_pools import keep_as_int8
from selective_compile.passes.rotation import RotationReader
from tests.passes.graphs import analysed, sample
from tests.passes.spellings import expanded, sdpa

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [B, S, H, D], cos and sin [S, ...] -> [B, S, H, D]
SIZE, BLOCK = 8, 4
GENERATOR = torch.Generator().manual_seed(0)
FREQUENCIES = torch.rand(SIZE // 2, generator=GENERATOR)
WEIGHTS = torch.randn(2, SIZE, generator=GENERATOR).unbind()


def tables(x: Tensor, frequencies: Tensor, *, whole: bool = True) -> tuple[Tensor, Tensor]:
    """[S, D], or [S, D / 2] with a column for each pair."""
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1) if whole else angles
    return angles.cos(), angles.sin()


def half_turned(x: Tensor) -> Tensor:
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)


def neighbours_turned(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    return x * cos + half_turned(x) * sin


def by_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table[:, : SIZE // 2].repeat_interleave(2, dim=-1)[:, None] for table in (cos, sin))
    return x * cos + neighbours_turned(x) * sin


def by_chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (one, other), pairs = x.chunk(2, dim=-1), (cos[:, None, : SIZE // 2], sin[:, None, : SIZE // 2])
    return torch.cat([one * pairs[0] - other * pairs[1], other * pairs[0] + one * pairs[1]], dim=-1)


def by_unbound_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, : SIZE // 2], sin[:, None, : SIZE // 2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def of_the_first_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([by_halves(x[..., :4], cos[:, :4], sin[:, :4]), x[..., 4:]], dim=-1)


def of_the_last_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[..., :2], by_halves(x[..., 2:], cos[:, 2:], sin[:, 2:])], dim=-1)


def of_heads_in_front(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, S, D] in between, as most models have it."""
    turned = x.transpose(1, 2) * cos + half_turned(x.transpose(1, 2)) * sin
    return turned.transpose(1, 2)


# As the operator has it: first, rotated, interleaved; columns of the tables.
SPELLINGS: dict[Rotate, tuple[Any, ...]] = {
    by_halves: (0, 8, False, 8),
    by_neighbours: (0, 8, True, 4),
    by_chunks: (0, 8, False, 4),
    by_unbound_pairs: (0, 8, True, 4),
    of_the_first_part: (0, 4, False, 4),
    of_the_last_part: (2, 6, False, 6),
    of_heads_in_front: (0, 8, False, 8),
}


def attending(rotate: Rotate, key_rotate: Rotate | None = None) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor) -> Tensor:
        cos, sin = tables(q, frequencies)
        return sdpa(rotate(q, cos, sin), (key_rotate or rotate)(k, cos, sin), v, is_causal=True)

    return function


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) if weight is None else weight * normed.to(x.dtype)


def rms_with_an_offset(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


def rms_by_division(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x * x).mean(-1, keepdim=True).add(eps).sqrt() * weight


def rms_of_torch(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x, (SIZE,), weight, eps)


def rms_by_a_power(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * torch.pow(x.square().mean(-1, keepdim=True) + eps, -0.5) * weight


NORMS = {rms: 0.0, rms_with_an_offset: 1.0, rms_by_division: 0.0, rms_of_torch: 0.0, rms_by_a_power: 0.0}


def normed(norm: Callable[..., Tensor], key_norm: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
        cos, sin = tables(q, frequencies)
        query, key = norm(q, ours), (key_norm or norm)(k, theirs)
        return sdpa(by_halves(query, cos, sin), by_halves(key, cos, sin), v, is_causal=True)

    return function


def flat_of(function: Callable[..., Any], *weights: Tensor) -> FlatGraph:
    return flatten(analysed(function, *weights), paged=True)


def results(flat: FlatGraph, steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of requests that take so many tokens in each step; and, behind them, what the pools hold."""
    blocks = [-(-sum(rows) // BLOCK) for rows in zip(*steps, strict=True)]
    table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for n, own in enumerate(torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).split(blocks)):
        table[n, : len(own)] = own
    heads = [call.key.heads for call in flat.calls for _ in ("keys", "values")]
    pools = [torch.full((sum(blocks), each, BLOCK, SIZE), torch.nan) for each in heads]
    begun, found = [0] * len(blocks), []
    for rows in steps:
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(begun, rows, strict=True)])
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        slots = table[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
        begun = [b + n for b, n in zip(begun, rows, strict=True)]
        bounds = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        names = [given.source.removeprefix("L['").removesuffix("']") for given in flat.tokens]
        tokens = [sample(name, 1, sum(rows), seed=sum(begun) + i) for i, name in enumerate(names)]
        weights = [given.example for given in flat.weights]
        given = [*weights, *tokens, *([positions] if flat.uses_positions else [])]
        with torch.no_grad(), forced_implementation("reference"):
            metadata = (bounds, torch.tensor(begun, dtype=torch.int32), table, slots)
            found.append(flat.module(*given, *metadata, *pools)[0])
    return [*found, *pools]


STEPS = ((5, 1, 12), (1, 1, 1), (0, 7, 1))


def assert_fused(function: Callable[..., Any], *weights: Tensor, count: int = 1) -> FlatGraph:
    """The same numbers in three steps of other sizes; nothing of the rotation is left; a second run counts 0."""
    flat = flat_of(function, *weights)
    expected = results(flat, STEPS)
    assert fuse_rotary(flat) == count
    for found, before in zip(results(flat, STEPS), expected, strict=True):
        torch.testing.assert_close(found, before, equal_nan=True)
    assert fuse_rotary(flat) == 0
    return flat


def targets(flat: FlatGraph) -> list[str]:
    return [str(node.target) for node in flat.module.graph.nodes if node.op == "call_function"]


def arguments_of(flat: FlatGraph) -> list[Any]:
    return next(list(node.args) for node in flat.module.graph.nodes if "rotary_attention" in str(node.target))


@pytest.mark.parametrize("rotate", [*SPELLINGS], ids=lambda rotate: rotate.__name__)
def test_a_rotation_goes_into_the_attention(rotate: Rotate) -> None:
    flat = assert_fused(attending(rotate), FREQUENCIES)
    gone = {"aten.neg.default", "aten.stack.default", "aten.sub.Tensor", "selective.ragged_attention.default"}
    assert not gone & set(targets(flat))
    assert targets(flat).count("aten.mul.Tensor") == 1  # positions times frequencies
    arguments = arguments_of(flat)
    assert arguments[5:9] == [None, None, None, 0.0]
    assert (*arguments[9:12], arguments[3].meta["val"].shape[1]) == SPELLINGS[rotate]


def test_keys_that_are_rotated_behind_their_repetition_are_rotated_once() -> None:
    def function(q: Tensor, kv: Tensor, frequencies: Tensor) -> Tensor:
        cos, sin = tables(q, frequencies)
        key = of_heads_in_front(expanded(kv), cos, sin)
        return sdpa(by_halves(q, cos, sin), key, expanded(kv), is_causal=True)

    flat = assert_fused(function, FREQUENCIES)
    assert [arguments_of(flat)[i].meta["val"].shape[1] for i in range(3)] == [4, 2, 2]


def test_tables_are_made_once_for_all_layers() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor) -> Tensor:
        cos, sin = tables(q, frequencies)
        for _ in range(3):
            q = sdpa(by_halves(q, cos, sin), by_halves(k, cos, sin), v, is_causal=True)
        return q

    flat = assert_fused(layers, FREQUENCIES, count=3)
    fused = [node for node in flat.module.graph.nodes if "rotary_attention" in str(node.target)]
    assert len({node.args[3:5] for node in fused}) == 1


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_rotation_is_read_once_for_layers_spelled_alike(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rotates each by its own tables; where one table is both cosine and sine, it is another spelling."""
    read = RotationReader.read
    count: list[fx.Node] = []
    monkeypatch.setattr(RotationReader, "read", lambda self: count.append(self.end) or read(self))

    def layers(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor) -> Tensor:
        for layer in range(4):
            cos, sin = tables(q, frequencies * (1 if shared else 2**layer))
            turned = (cos, cos) if layer == 3 else (cos, sin)
            q = sdpa(by_halves(q, *turned), by_halves(k, *turned), v, is_causal=True)
        return q

    flat = assert_fused(layers, FREQUENCIES, count=4)
    fused = [node for node in flat.module.graph.nodes if "rotary_attention" in str(node.target)]
    assert len({node.args[3:5] for node in fused}) == (2 if shared else 4)
    assert [node.args[3] is node.args[4] for node in fused] == [False, False, False, True]
    assert len(set(count)) == 4  # of eight ends: given or from an attention, whose strides differ, in either spelling


@pytest.mark.parametrize("norm", [*NORMS], ids=lambda norm: norm.__name__)
def test_a_norm_goes_along(norm: Callable[..., Tensor]) -> None:
    flat = assert_fused(normed(norm), FREQUENCIES, *WEIGHTS)
    arguments = arguments_of(flat)
    assert [weight.meta["val"].shape for weight in arguments[5:7]] == [(SIZE,), (SIZE,)]
    assert arguments[7:9] == [1e-5, NORMS[norm]]
    assert not {"aten.rsqrt.default", "aten.mean.dim", "aten.rms_norm.default"} & set(targets(flat))


def test_a_norm_without_weights_goes_along() -> None:
    flat = assert_fused(normed(lambda x, _: rms(x)), FREQUENCIES, *WEIGHTS)
    assert arguments_of(flat)[5:9] == [None, None, 1e-5, 0.0]


def all_heads(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x.flatten(2), weight.repeat(4)).unflatten(-1, (4, SIZE))


def of_each_head_its_own(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x, weight * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None])


def centred(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), weight)


def of_another(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt((x * 2).pow(2).mean(-1, keepdim=True) + 1e-5))


def in_half_precision(x: Tensor, weight: Tensor) -> Tensor:
    return weight * rms(x).half().float()


@pytest.mark.parametrize(
    ("norm", "key_norm"),
    [
        (rms, lambda x, weight: rms(x, weight, 1e-6)),
        (rms, rms_with_an_offset),
        (rms, lambda x, _: x),
        (all_heads, None),
        (of_each_head_its_own, None),
        (of_another, None),
        (centred, None),
        (in_half_precision, None),
        (lambda x, weight: rms(x, weight * 2), None),
        (lambda x, weight: F.layer_norm(x, (SIZE,), weight), None),
    ],
    ids=(
        "epsilons",
        "offsets",
        "queries_alone",
        "all_heads",
        "each_head",
        "of_another",
        "centred",
        "half",
        "computed_weight",
        "layer_norm",
    ),
)
def test_other_norms_are_left_alone(norm: Callable[..., Tensor], key_norm: Any) -> None:
    """Their kernels would stay: nothing would be saved."""
    flat = flat_of(normed(norm, key_norm), FREQUENCIES, *WEIGHTS)
    code = flat.module.code
    assert fuse_rotary(flat) == 0
    assert flat.module.code == code


def other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] - half_turned(x) * sin[:, None]


def scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos, sin) * 0.5


def normed_behind(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rms(by_halves(x, cos, sin))


def of_a_third(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos, sin) + neighbours_turned(x) * cos[:, None]


def moved_by_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[..., :1], by_halves(x[..., 1:7], cos[:, 1:7], sin[:, 1:7]), x[..., 7:].neg()], dim=-1)


def by_doubled_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x, cos * 2, sin * 2)


def columns_shuffled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (table.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for table in (cos, sin))
    return by_halves(x, cos, sin)


def by_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    by = torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None]
    return x * (cos[:, None] * by) + half_turned(x) * (sin[:, None] * by)


def one_head_alone(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([by_halves(x[:, :, :1], cos, sin), x[:, :, 1:]], dim=2)


def heads_swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + half_turned(x[:, :, [1, 0, 3, 2]]) * sin[:, None]


def by_values(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * x.tanh() + half_turned(x) * sin[:, None]


def in_a_narrow_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return by_halves(x.bfloat16(), cos.bfloat16(), sin.bfloat16()).float()


def without(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def constant(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * WEIGHTS[0] + half_turned(x) * WEIGHTS[1]


NEAR_MISSES: list[tuple[Rotate, Rotate | None]] = [
    *((near, None) for near in (other_way, scaled, normed_behind, of_a_third, moved_by_one, by_head, one_head_alone)),
    *((near, None) for near in (columns_shuffled, heads_swapped, by_values, in_a_narrow_dtype, without, constant)),
    (by_halves, without),
    (by_halves, of_the_first_part),
    (by_halves, lambda x, cos, sin: by_halves(x, cos, sin * 1.5)),
    (by_halves, lambda x, cos, sin: by_halves(x, sin, cos)),
    (by_halves, lambda x, cos, sin: by_halves(x + 1, cos, sin)),
]


@pytest.mark.parametrize(("rotate", "key_rotate"), NEAR_MISSES)
def test_near_misses_are_left_alone(rotate: Rotate, key_rotate: Rotate | None) -> None:
    flat = flat_of(attending(rotate, key_rotate), FREQUENCIES)
    code = flat.module.code
    assert fuse_rotary(flat) == 0
    assert flat.module.code == code


def test_equal_tables_are_one() -> None:
    """Made for queries and for keys, and in each layer, as some models do."""

    def layers(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor) -> Tensor:
        for _ in range(2):
            q = attending(by_doubled_tables)(q, k, v, frequencies)
        return q

    flat = assert_fused(layers, FREQUENCIES, count=2)
    assert [targets(flat).count(f"aten.{name}.default") for name in ("cos", "sin")] == [1, 1]


def test_pools_of_int8_are_left_alone() -> None:
    flat = flat_of(attending(by_halves), FREQUENCIES)
    assert keep_as_int8(flat) == 1 and fuse_rotary(flat) == 0


def test_pools_of_e4m3_keep_their_scales() -> None:
    flat = flat_of(attending(by_halves), FREQUENCIES)
    assert keep_as_fp8(flat) == 1 and fuse_rotary(flat) == 1
    (call,) = (node for node in flat.module.graph.nodes if node.target is torch.ops.selective.rotary_attention.default)
    assert set(call.kwargs) >= {"key_scales", "value_scales"} and None not in call.kwargs.values()


def test_a_padded_call_is_left_alone() -> None:
    assert fuse_rotary(flatten(analysed(attending(by_halves), FREQUENCIES), paged=False)) == 0
