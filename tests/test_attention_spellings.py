"""Spellings of attention around its softmax, and of positions: exact in the engine's step, or refused by name."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.live_weights import EVERY
from tests.decoders import HEAD_SIZE, HEADS, MAX_POSITIONS, VOCABULARY, WIDTH, Decoder, no_mask, repeated
from tests.exactness import TOLERANCE, engine_error, padded_error


def test_weights_whose_heads_and_tokens_are_one_dimension_are_not_read_as_tokens() -> None:
    """With one head of values, as multi-query attention has it, heads and queries can be rows alike."""

    def merged(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch, length = query.shape[:2]
        scores = torch.einsum("bqhd,bkhd->bhqk", query / math.sqrt(HEAD_SIZE), repeated(key))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).reshape(batch, HEADS * length, length)
        return (weights @ value[:, :, 0]).view(batch, HEADS, length, HEAD_SIZE).transpose(1, 2).flatten(2)

    refused_or_exact(Decoder(layers=1, attend=merged, kv_heads=1))


def test_weights_of_one_head_that_all_heads_of_values_share_are_refused_or_exact() -> None:
    def shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", query[:, :, :1], key[:, :, :1])
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).expand(-1, HEADS, -1, -1)
        return (weights @ repeated(value).transpose(1, 2)).transpose(1, 2).flatten(2)

    for heads in (1, HEADS):
        refused_or_exact(Decoder(layers=1, attend=shared, kv_heads=heads))


def refused_or_exact(model: Decoder) -> None:
    try:
        error = engine_error(model, vocabulary=VOCABULARY)
    except sc.RefusedError as refused:
        assert "heads" in str(refused) or "tokens of its weights" in str(refused)
    else:
        assert error < TOLERANCE


SCALES: dict[str, Any] = {
    "full": lambda scores: scores / torch.full([], HEAD_SIZE**0.5),
    "root": lambda scores: scores / torch.sqrt(torch.tensor(HEAD_SIZE, dtype=torch.float32)),
    "in front": lambda scores: torch.tensor([0.5]) * scores,
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_scale_may_be_a_tensor_that_the_forward_makes(scale: Any) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = scale(torch.einsum("bqhd,bkhd->bhqk", query, repeated(key)))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)

    assert engine_error(Decoder(layers=1, attend=attend), vocabulary=VOCABULARY) < TOLERANCE


def less_distance(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    slopes = 0.5 ** torch.arange(1, HEADS + 1)
    return (scores - slopes[:, None, None] * (places[:, None] - places)).masked_fill(places > places[:, None], -1e10)


def less_hidden(scores: Tensor) -> Tensor:
    """As GPT-2 had it first."""
    kept = torch.ones(scores.shape[-1], scores.shape[-1]).tril()
    return scores * kept - 1e10 * (1 - kept)


def less_seen(scores: Tensor) -> Tensor:
    return scores - 1e10 * (1 - torch.ones(scores.shape[-1], scores.shape[-1]).triu())


def by_scores(less: Any) -> Any:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        weights = less(torch.einsum("bqhd,bkhd->bhqk", query, repeated(key)) / 3).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)

    return attend


@pytest.mark.parametrize("less", [less_distance, less_hidden])
def test_a_mask_or_a_bias_may_be_taken_off(less: Any) -> None:
    assert engine_error(Decoder(layers=1, attend=by_scores(less)), vocabulary=VOCABULARY) < TOLERANCE


def test_what_is_taken_off_is_proved_as_what_is_added_is() -> None:
    with pytest.raises(sc.RefusedError, match="no mask family"):
        engine_error(Decoder(layers=1, attend=by_scores(less_seen)), vocabulary=VOCABULARY)


def test_a_mask_of_the_type_of_token_ids_reads_none_of_them() -> None:
    def lower(ids: Tensor, attention_mask: Any) -> Tensor:
        return torch.ones(ids.shape[1], ids.shape[1]).tril().type_as(ids) == 1

    assert engine_error(Decoder(layers=1, mask=lower), vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
def test_tokens_may_be_numbered_in_other_types(dtype: torch.dtype) -> None:
    def turned(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=dtype).float()
        return x * torch.cos(places[:, None] * torch.linspace(0.1, 1, x.shape[2]))

    assert engine_error(Decoder(layers=1, mix=turned), vocabulary=VOCABULARY) < TOLERANCE


class InHalf(torch.nn.Module):
    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.layer, self.enabled = torch.nn.Linear(WIDTH, WIDTH), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return self.layer(x).float()


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_within_a_forward_is_written_out(enabled: bool) -> None:
    model = Decoder(layers=1, mix=InHalf(enabled=enabled))
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    assert sc.explain(model).verdict == "ragged" and not sc.explain(model).called_once
    error, _ = padded_error(model, vocabulary=VOCABULARY)
    assert error < TOLERANCE


def test_requests_may_be_picked_by_their_numbers() -> None:
    def picked(x: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0])]

    assert engine_error(Decoder(layers=1, mix=picked), vocabulary=VOCABULARY) < TOLERANCE


class OwnTable(nn.Module):
    """Attention, with a bias that the first call makes for all positions and keeps as an attribute, as of MPT; and a
    triangle in the shape of its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.bias = False, torch.zeros(0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        length = query.shape[1]
        if not self.made:
            slopes = torch.tensor([0.5, 0.25, 0.01, 1.0])[None, :, None, None]
            self.bias = slopes * torch.arange(1 - MAX_POSITIONS, 1).view(1, 1, 1, -1)
            self.made = True
        scores = torch.einsum("bqhd,bkhd->bhqk", query, repeated(key)) + self.bias[:, :, :, -length:]
        later = ~scores.new_ones(length, length, dtype=torch.float16).tril().bool()
        weights = scores.masked_fill(later, torch.finfo(scores.dtype).min).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)


def test_a_table_may_be_an_attribute_that_is_no_buffer() -> None:
    model = Decoder(layers=1, attend=OwnTable(), mask=no_mask)
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize("how", ["in place", "another"])
def test_a_table_that_is_no_buffer_must_stay(how: str) -> None:
    model: Any = Decoder(layers=1, attend=OwnTable(), mask=no_mask)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    assert engine.report.verdict == "ragged"
    held = next(part for part in model.modules() if isinstance(part, OwnTable))
    with engine.running():
        assert engine.submit([1, 2, 3], max_new_tokens=2).result().error is None
        if how == "in place":
            held.bias.mul_(2)
        else:
            held.bias = held.bias * 2
        time.sleep(EVERY)
        assert "must" in str(engine.submit([1, 2, 3], max_new_tokens=2).result().error)
