"""Pass 2 and pass 5: what treats tokens independently stays and gives the same numbers; what mixes them is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.axes import Axis
from selective_compile.passes.token_axes import mark_token_axes
from tests.passes.graphs import marked, ragged_error, reasons, refusals

WEIGHT, TABLE = torch.randn(8, 8), torch.randn(300, 8)
Function = Callable[..., Any]


def from_top(x: Tensor) -> Tensor:
    values, _ = x.topk(2, dim=-1)
    return x * values.sum(-1, keepdim=True)


def complex_rotation(x: Tensor) -> Tensor:
    """As llama4 rotates."""
    angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(2)


TOKEN_WISE: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "linear": (lambda x, w: F.linear(x, w), (WEIGHT,)),
    "matmul": (lambda x, w: x @ w, (WEIGHT,)),
    "matmul of merged rows": (lambda x, w: (x.reshape(-1, 8) @ w).reshape(x.shape), (WEIGHT,)),
    "addmm": (lambda x, w: torch.addmm(w[0], x.reshape(-1, 8), w).reshape(x.shape), (WEIGHT,)),
    "einsum": (lambda x, w: torch.einsum("bsd,de->bse", x, w), (WEIGHT,)),
    "complex rotation": (lambda x: complex_rotation(x), ()),
    "per-token product": (lambda x, y: torch.einsum("bsd,bsd->bs", x, y)[..., None] * x, ()),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), ()),
    "rms norm": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), ()),
    "spread of features": (lambda x: x / (x.std(-1, keepdim=True) + torch.var(x, 2, unbiased=False)[..., None]), ()),
    "softmax of features": (lambda x: x.softmax(-1), ()),
    "cumsum of features": (lambda x: x.cumsum(-1), ()),
    "cumprod of features": (lambda x: x.cumprod(-1), ()),
    "flip of features": (lambda x: x.flip(-1), ()),
    "norm of features": (lambda x: x / torch.norm(x, p=1, dim=-1, keepdim=True), ()),
    "log of a sigmoid": (lambda x: F.logsigmoid(x), ()),
    "sort of features": (lambda x: x.sort(-1)[0], ()),
    "top-k": (from_top, ()),
    "split": (lambda x: torch.cat(list(reversed(x.split(4, dim=-1))), dim=-1), ()),
    "chunk and stack": (lambda x: torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2), ()),
    "rotary halves": (lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1), ()),
    "transposes": (lambda x: x.transpose(1, 2).permute(0, 2, 1).unsqueeze(1).squeeze(1), ()),
    "all dimensions reversed": (lambda x: x.T.mul(2).T, ()),
    "smaller of two": (lambda x, y: torch.min(x, y), ()),
    "larger of two, one a weight": (lambda x, w: torch.max(x, w[0]), (WEIGHT,)),
    "embedding": (lambda ids, w: F.embedding(ids, w), (TABLE,)),
    "rows of a table by the length": (lambda x, w: x + w[: x.shape[1]], (TABLE,)),
    "rows of a table at positions": (lambda x, w: x + w[torch.arange(x.shape[1])[None]], (TABLE,)),
    "rows of a table from 2": (lambda x, w: x + w[None, 2 : x.shape[1] + 2], (TABLE,)),
    "rows of a table by the length, at positions": (
        lambda x, w: x + w[: x.shape[1]][torch.arange(x.shape[1])[None]] * w[: x.shape[1]][torch.arange(x.shape[1])],
        (TABLE,),
    ),
    "rows of a table with dimensions of size 1, by the length, at positions": (
        lambda x, w: x + w[None, None][:, :, : x.shape[1]].squeeze(1).squeeze(0)[torch.arange(x.shape[1])[None]],
        (TABLE,),
    ),
    "each token at its own place": (
        lambda x: x[:, torch.arange(x.shape[1])] + x[:, torch.arange(x.shape[1])][:, torch.arange(x.shape[1])],
        (),
    ),
    "each token selected at its own place": (
        lambda x, w: (
            x.index_select(1, torch.arange(x.shape[1])) + w[: x.shape[1]].index_select(0, torch.arange(x.shape[1]))
        ),
        (TABLE,),
    ),
    "positions kept in a table": (
        lambda x, w: x + F.embedding((w[:, 0] * 0).cumsum(0).long()[None, : x.shape[1]], w),
        (TABLE,),
    ),
    "positions": (lambda x, w: x + F.embedding(torch.arange(x.shape[1]), w), (TABLE,)),
    "positions from 2": (lambda x, w: x + F.embedding(torch.arange(2, x.shape[1] + 2), w), (TABLE,)),
    "positions by cumsum": (
        lambda x, w: x + F.embedding(torch.ones(x.shape[1], dtype=torch.int64).cumsum(0) - 1, w),
        (TABLE,),
    ),
    "positions as angles": (lambda x: x + (torch.arange(x.shape[1])[:, None] * 0.1).cos(), ()),
    "where": (lambda ids, x: torch.where((ids > 3)[..., None], x, -x), ()),
    "in place": (lambda x: (x * 1).add_(1), ()),
    "parts written in place": (lambda x: from_parts(x), ()),
    "a part added to in place": (lambda x: first_feature_doubled(x * 1), ()),
    "in place on a permutation": (lambda x: (x * 1).transpose(1, 2).add_(1).transpose(1, 2), ()),
    "concatenated by another name": (lambda x, y: torch.concat([x, y.reshape_as(x)], -1), ()),
    "shaped as another": (lambda x, y: x.reshape(-1, 8).view_as(y) + x[..., :1].expand_as(y), ()),
    "repeated whole": (lambda x, w: (x.reshape(-1, 8).repeat(3, 1).view(3, -1, 8) @ w).sum(0).view(x.shape), (WEIGHT,)),
    "gather from a table": (
        lambda ids, w: w[:, 0].expand(ids.shape[0], -1).gather(1, ids)[..., None],
        (TABLE,),
    ),
    "broadcast together": (lambda x: sum(torch.broadcast_tensors(x, torch.arange(8.0))), ()),
    "in place on a permutation, read elsewhere": (lambda x: beside_a_view(x * 1), ()),
    "in place of a copy": (lambda x: x.clone().mul_(2) + x, ()),
    "in place of another type": (lambda x: x.to(torch.bfloat16).add_(x).float(), ()),
    "gather of features": (lambda x: x.gather(-1, x.argsort(-1)), ()),
    "features filled": (lambda x: x * (x * 1).index_fill(-1, torch.tensor([0, 2]), 0.5), ()),
    "scatter of features": (lambda x: torch.zeros_like(x).scatter_(-1, x.topk(2)[1], 1.0) * x, ()),
    "scatter with sums": (lambda x: torch.zeros_like(x).scatter_add(-1, x.topk(2)[1], x), ()),
    "one-hot": (lambda ids, w: F.one_hot(ids, 300).float() @ w, (TABLE,)),
    "maximum of features": (lambda x: x - x.max(-1, keepdim=True)[0], ()),
    "axes swapped by other names": (lambda x: x.swapaxes(1, 2).swapdims(-1, 1).movedim(1, 2).moveaxis(2, 1), ()),
    "features rolled": (lambda x: x.roll(3, -1), ()),
    "features tiled": (lambda x: x.tile(2), ()),
    "features padded": (lambda x: F.pad(x, (1, 2), value=1.0) + F.pad(x, (-2, 5)), ()),
    "gated half": (lambda x: F.glu(x), ()),
    "slopes of channels": (lambda x, w: F.prelu(x.mT, w[0]).mT, (WEIGHT,)),
    "mean and spread": (lambda x: standardised(*torch.std_mean(x, -1, keepdim=True), x), ()),
    "norm of groups": (lambda x, w: F.group_norm(x.reshape(-1, 8), 2, w[0], w[1]).view(x.shape), (WEIGHT,)),
    "norm of channels": (lambda x, w: F.batch_norm(x.mT, w[0], w[1].abs(), w[2], w[3]).mT, (WEIGHT,)),
    "norm of channels of rows": (
        lambda x, w: F.batch_norm(x.reshape(-1, 8), w[0], w[1].abs(), None, w[3]).reshape(x.shape),
        (WEIGHT,),
    ),
    "norm of a channel": (lambda x, w: F.batch_norm(x[:, None], w[0, :1], w[1, :1].abs())[:, 0], (WEIGHT,)),
    "norm of channels of requests": (
        lambda x, w: F.instance_norm(x.mT, w[0], w[1].abs(), w[2], w[3], use_input_stats=False).mT,
        (WEIGHT,),
    ),
    "buckets": (lambda x, w: torch.bucketize(x, w[0].sort()[0]) + torch.searchsorted(w[1].sort()[0], x), (WEIGHT,)),
    "among ids": (lambda ids: torch.isin(ids, torch.tensor([1, 2]))[..., None].float(), ()),
    "median and more": (lambda x: x.median(-1)[0] + x.kthvalue(2)[0] + x.round().mode()[0] + x.nansum(-1), ()),
    "least and largest": (lambda x: torch.stack(x.aminmax(dim=-1), -1), ()),
    "running maximum": (lambda x: x.cummax(-1)[0] + x.logcumsumexp(-1), ()),
    "diagonal of features": (lambda x, w: (x[..., None] * w).diagonal(1, -2, -1), (WEIGHT,)),
    "spectrum of features": (lambda x: torch.fft.rfft(x, dim=-1).abs(), ()),
    "complex by parts": (lambda x: (torch.complex(x, -x).conj() * 1j).imag, ()),
    "a row of weights": (lambda x, w: x @ w[0] + torch.mv(x.reshape(-1, 8), w[1]).view(x.shape[:2]), (WEIGHT,)),
    "products by other names": (
        lambda x, w: torch.inner(x, w) + torch.tensordot(x, w, 1) + torch.outer(w[0], w[1])[0],
        (WEIGHT,),
    ),
    "convolution of one token": (lambda x, w: F.conv1d(x.mT, w[..., None], w[0]).mT, (WEIGHT,)),
    "einsum of three": (lambda x, w: torch.einsum("bsi,ij,jk->bsk", x, w, w), (WEIGHT,)),
    "einsum with dots": (
        lambda x, w: torch.einsum("...i, oi -> ...o", x, w) + torch.einsum("...i,io", x, w),
        (WEIGHT,),
    ),
    "einsum of one": (lambda x, w: torch.einsum("bsi->bs", x)[..., None] * torch.einsum("ii->i", w), (WEIGHT,)),
    "marked ones overwritten": (lambda ids, x: marked_overwritten(ids, x * 1), ()),
    "features overwritten": (lambda x: features_overwritten(x * 1), ()),
    "in place by and": (lambda ids: both(ids > 3, ids < 200)[..., None].float(), ()),
    "constant of the batch's size": (lambda x: x + torch.ones(x.shape[0], x.shape[1], 1), ()),
}


def standardised(spread: Tensor, mean: Tensor, x: Tensor) -> Tensor:
    return (x - mean) / spread


def marked_overwritten(ids: Tensor, x: Tensor) -> Tensor:
    x[x > 1] = 0.5
    x[ids > 100] = 2.0
    x[ids < 10] = torch.arange(8.0)
    x[..., torch.arange(8) < 2] = 3.0
    return x


def features_overwritten(x: Tensor) -> Tensor:
    x[..., torch.tensor([0, 5])] = x[..., :2] * 3
    x[..., torch.tensor([1])] = 0.0
    return x


def both(one: Tensor, other: Tensor) -> Tensor:
    one &= other
    return one


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_token_wise_operations_give_the_same_numbers_on_a_ragged_batch(name: str) -> None:
    function, weights = TOKEN_WISE[name]
    assert ragged_error(function, *weights) < 1e-5


MIXING: dict[str, tuple[Function, str]] = {
    "norm over tokens": (lambda x: x / torch.norm(x, dim=1, keepdim=True), "dimension 1"),
    "roll": (lambda x: x.roll(1, 1), "enumerates tokens"),
    "cumsum": (lambda x: x.cumsum(1), "enumerates tokens"),
    "cumprod": (lambda x: x.cumprod(1), "enumerates tokens"),
    "flip": (lambda x: x.flip(1), "enumerates tokens"),
    "sort": (lambda x: x.sort(1)[0], "enumerates tokens"),
    "softmax": (lambda x: x.softmax(1), "enumerates tokens"),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "enumerates tokens"),
    "mean of everything": (lambda x: x - x.mean(), "enumerates requests"),
    "mean over requests": (lambda x: x - x.mean(0, keepdim=True), "enumerates requests"),
    "maximum over requests": (lambda x: x + x.amax(0, keepdim=True), "enumerates requests"),
    "maximum": (lambda x: x - x.max(1, keepdim=True)[0], "enumerates tokens"),
    "logsumexp": (lambda x: x - x.logsumexp(1, keepdim=True), "enumerates tokens"),
    "first token": (lambda x: x - x[:, :1], "enumerates tokens"),
    "last token": (lambda x: x - x[:, -1:], "enumerates tokens"),
    "one request": (lambda x: x + x[0], "enumerates requests"),
    "shift by slicing": (lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), "enumerates tokens"),
    "shift by padding": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "enumerates tokens"),
    "convolution": (
        lambda x: F.conv1d(x.transpose(1, 2), torch.ones(8, 1, 1), groups=8).transpose(1, 2),
        "no transfer",
    ),
    "layer norm over tokens": (lambda x: F.layer_norm(x.mT.contiguous(), (x.shape[1],)).mT, ""),
    "batch norm": (
        lambda x: F.batch_norm(x.reshape(-1, 8), None, None, training=True).reshape(x.shape),
        "no transfer",
    ),
    "norm of channels by a request's tokens": (lambda x: F.instance_norm(x.mT).mT, "no transfer"),
    "norm of channels by tokens": (lambda x: F.batch_norm(x.mT, x.mean((0, 1)), x.amax((0, 1))).mT, "requests"),
    "merged rows reversed": (lambda x: x.reshape(-1, 8).flip(0).reshape(x.shape), "enumerates requests and tokens"),
    "view cutting tokens": (lambda x: x.reshape(x.shape[0], 8, x.shape[1]).transpose(1, 2), "cuts across"),
    "view swapping requests and tokens": (
        lambda x: x.reshape(x.shape[1], x.shape[0], 8).transpose(0, 1),
        "cuts across",
    ),
    "gather by token ids": (lambda ids, x: x[:, ids[0]], "enumerates requests"),
    "gather backwards": (lambda x: x[:, -torch.arange(x.shape[1])], "an index that is not the token's own"),
    "torch.gather": (lambda ids, x: x.gather(1, ids[..., None] * 0), "enumerates tokens"),
    "own index of few bits": (lambda x: x[:, torch.arange(x.shape[1]).to(torch.int8).long()], "not the token's own"),
    "selection by a boolean": (lambda ids, x: x[ids > 3][None], "boolean mask"),
    "sum over tokens by einsum": (lambda x: x + torch.einsum("bsd,bse->bde", x, x)[:, :1], "sum over the key axis"),
    "pairs of requests": (lambda x, y: x + torch.einsum("bsd,csd->bcs", x, y).sum(1)[..., None], "enumerates requests"),
    "random numbers": (lambda x: x + torch.rand_like(x), "draws random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5, True), "draws random numbers"),
    "division by the length": (lambda x: x / x.shape[1], "number of tokens"),
    "division by the batch": (lambda x: x / x.shape[0], "number of tokens"),
    "scaling by log of the length": (lambda x: x * math.log(x.shape[1]), "used as a number"),
    "a tensor of the length": (lambda x: x * torch.tensor(x.shape[1]), "used as a number"),
    "filled with the length": (lambda x: x * torch.full((1,), x.shape[1], dtype=torch.float32), "number of tokens"),
    "count of tokens": (lambda x: x * torch.ones(x.shape[1]).sum(), "enumerates tokens"),
    "count of requests": (lambda x: x * torch.ones(x.shape[0]).sum(), "enumerates requests"),
    "switch far away": (lambda x: torch.where(torch.ones(x.shape[1]).sum() > 2000, x * 2, x), "enumerates tokens"),
    "numbered requests": (lambda x: x + torch.arange(x.shape[0])[:, None, None], "numbers requests"),
    "running count of requests": (lambda x: x * torch.ones(x.shape[0]).cumsum(0)[:, None, None], "enumerates requests"),
    "positions as fractions": (lambda x: x + (torch.arange(x.shape[1]) / x.shape[1])[:, None], "number of tokens"),
    "positions backwards": (lambda x: x + (x.shape[1] - 1 - torch.arange(x.shape[1]))[:, None], "number of tokens"),
    "positions flipped": (lambda x: x + torch.arange(x.shape[1]).flip(0)[:, None], "enumerates tokens"),
    "positions that stop far away": (
        lambda x: x + ((torch.arange(x.shape[1]) < 500).long().cumsum(0) - 1)[:, None],
        "no straight line",
    ),
    "positions that bend where a function crosses a number": (
        lambda x: x + torch.where((torch.arange(x.shape[1]) + 1.0).log() < 7.0, 2, 1).cumsum(0)[:, None],
        "no straight line",
    ),
    "scale by the length, from where a function crosses a number": (
        lambda x: x * ((torch.arange(x.shape[1]) + 1.0).log() / 7.0).clamp(min=1.0).amax(),
        "enumerates tokens",
    ),
    "positions from the attention mask": (lambda mask, x: x + (mask.cumsum(1) - 1)[..., None], "enumerates tokens"),
    "spread of everything": (lambda x: x.permute(2, 0, 1) / x.permute(2, 0, 1).std(False), "enumerates requests"),
    "variance of everything": (lambda x: x.permute(0, 2, 1) / x.permute(0, 2, 1).var(True), "enumerates requests"),
    "repeated as often as a tensor says": (
        lambda x: x + torch.repeat_interleave(torch.tensor([1, 2])).sum(),
        "a tensor says",
    ),
    "all elements repeated": (lambda x: x.repeat_interleave(2).view(*x.shape, 2)[..., 0], "works along 3 dimensions"),
    "written at the number of tokens": (
        lambda x: torch.slice_scatter(x.repeat(1, 1, 40), x, 2, x.shape[1], x.shape[1] + x.shape[2]),
        "number of tokens",
    ),
    "everything rolled": (lambda x: x.roll(1), "enumerates requests"),
    "tokens tiled": (lambda x: x.tile(1, 2, 1)[:, : x.shape[1]], ""),
    "tokens padded": (lambda x: F.pad(x, (0, 0, 2, 0)), "enumerates tokens"),
    "tokens gated by tokens": (lambda x: F.glu(torch.cat([x, x], 1), 1), "enumerates tokens"),
    "mean and spread of tokens": (lambda x: standardised(*torch.std_mean(x, 1, keepdim=True), x), "enumerates tokens"),
    "groups of tokens": (lambda x: F.group_norm(x.mT, 2).mT, ""),
    "buckets by tokens": (lambda x: torch.bucketize(x, x[0, :, 0].sort()[0]), "requests"),
    "buckets of each row": (lambda x: torch.searchsorted(x.sort(-1)[0], x), "rows of its own"),
    "among other tokens": (lambda ids: torch.isin(ids, ids + 1)[..., None], "depends on tokens"),
    "median of tokens": (lambda x: x - x.median(1, keepdim=True)[0], "enumerates tokens"),
    "least of everything": (lambda x: x - x.aminmax()[0], "enumerates requests"),
    "running maximum of tokens": (lambda x: x.cummax(1)[0], "enumerates tokens"),
    "diagonal of tokens": (lambda x: x + (x[:, :, None] * x[:, None]).diagonal(0, 1, 3)[..., :1], "enumerates tokens"),
    "spectrum of tokens": (lambda x: torch.fft.fft(x, dim=1).abs(), "enumerates tokens"),
    "matrix of tokens times a row": (lambda x: x + (x.mT @ torch.ones_like(x[0, :, 0]))[:, None], ""),
    "convolution of every second token": (lambda x: F.conv1d(x.mT, torch.ones(8, 8, 1), stride=2).mT, "no transfer"),
    "einsum of three over tokens": (lambda x: x + torch.einsum("bsi,ij,btj->bi", x, torch.ones(8, 8), x)[:, None], ""),
    "chosen ones overwritten in turn": (lambda ids, x: written_in_turn(ids, x * 1), "boolean mask"),
    "tokens overwritten": (lambda x: tokens_overwritten(x * 1), "enumerates tokens"),
    "a token's number filled": (
        lambda x: x + x[:, torch.arange(x.shape[1])[:, None].index_fill(1, torch.tensor([0]), 0)[:, 0]],
        "",
    ),
    "tokens filled": (lambda x: (x * 1).index_fill(1, torch.tensor([0, 2]), 1.0), "enumerates tokens"),
    "filled where the length tells": (lambda x: (x * 1).index_fill(2, torch.tensor([x.shape[1]]) % 8, 1.0), ""),
    "in place on an input": (lambda x: x.add_(1), "in place"),
    "added at each token's place": (
        lambda x: (x * 1).index_add(1, torch.arange(x.shape[1]), x),
        "at their places in the request",
    ),
    "no token": (lambda x: torch.ones(x.shape), "depends on no token"),
    "in place on a part": (lambda x: in_place_on_a_part(x * 1), "enumerates tokens"),
}
MIXING_WITH_WEIGHT: dict[str, tuple[Function, str]] = {
    "table by the length from its end": (lambda x, w: x + w[-x.shape[1] :], ""),
    "every second row by the length": (lambda x, w: x + w[: 2 * x.shape[1] : 2], ""),
    "buffer that counts": (lambda x, w: x + w.add_(1)[0], "in place"),
    "positions backwards in a table": (
        lambda x, w: x + F.embedding(x.shape[1] - 1 - torch.arange(x.shape[1]), w),
        "number of tokens",
    ),
    "table row of the length": (lambda x, w: x + w[x.shape[1] - 1], "used as a number"),
}


def from_parts(x: Tensor) -> Tensor:
    """As the keys of multi-head latent attention are put together."""
    whole = x.new_empty(x.shape[0], x.shape[1], 12)
    whole[..., :4] = x[..., 4:]
    whole[..., 4:].copy_(x)
    return whole


def first_feature_doubled(x: Tensor) -> Tensor:
    x[..., 0] += x[..., 0]
    return x.relu()


def beside_a_view(x: Tensor) -> Tensor:
    x.transpose(1, 2).add_(1)
    return x


def below_a_view(x: Tensor) -> Tensor:
    whole = F.dropout(x, 0.5, False)
    x.add_(1)
    return torch.cat([whole, x], -1)


def written_in_turn(ids: Tensor, x: Tensor) -> Tensor:
    chosen = ids > 100
    x[chosen] = x[chosen].cumsum(0)
    return x


def tokens_overwritten(x: Tensor) -> Tensor:
    x[:, torch.tensor([0, 2])] = 1.0
    return x


def in_place_on_a_part(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


@pytest.mark.parametrize("name", [*MIXING, *MIXING_WITH_WEIGHT])
def test_mixing_operations_are_refused(name: str) -> None:
    function, reason = (MIXING | MIXING_WITH_WEIGHT)[name]
    given = reasons(function, *((TABLE,) if name in MIXING_WITH_WEIGHT else ()))
    assert given and any(reason in text for text in given), given


def test_what_is_written_below_what_may_be_a_copy_is_refused_or_exact() -> None:
    """From torch 2.15 on, dropout that drops nothing hands on its very input, and no reader is mistaken for another."""

    def function(x: Tensor) -> Tensor:
        return below_a_view(x * 1)

    given = reasons(function)
    assert any("in place" in text for text in given) if given else ragged_error(function) == 0


def test_axes_name_batch_tokens_and_features() -> None:
    traced = marked(lambda x, w: (x.reshape(-1, 8) @ w).reshape(x.shape), WEIGHT)
    x, _, merged, product, result = list(traced.axes.values())
    assert x.dims == ((Axis.BATCH,), (Axis.TOKEN,), (8,)) == result.dims
    assert merged.dims == ((Axis.BATCH, Axis.TOKEN), (8,)) == product.dims


def test_what_depends_on_an_unknown_node_is_not_reported_again() -> None:
    found = refusals(lambda x: x.roll(1, 1).relu().mean(1, keepdim=True) + x)
    assert [refusal.operator for refusal in found] == ["aten.roll.default"]


def test_an_unknown_operator_on_constants_alone_stays_constant() -> None:
    # Far from singular: the error of a product with an inverse grows with the condition of what was inverted.
    assert ragged_error(lambda x, w: x @ torch.linalg.inv(w), WEIGHT + 8 * torch.eye(8)) < 1e-5


def test_analysis_runs_twice_with_one_result() -> None:
    traced = marked(lambda x, w: F.linear(x, w).relu(), WEIGHT)
    before = dict(traced.axes)
    assert mark_token_axes(traced) == len(before)
    assert traced.axes == before and not traced.refusals
