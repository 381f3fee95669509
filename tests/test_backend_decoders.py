"""The padded call of hand-written decoders: spellings of attention, and what counts the columns of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import (
    HEAD_SIZE,
    VOCABULARY,
    WIDTH,
    Decoder,
    additive_mask,
    by_bmm,
    by_einsum,
    by_matmul,
    by_rows,
    by_sdpa,
    by_softcapped_einsum,
    compared_mask,
    no_mask,
    tril_mask,
    window_mask,
)
from tests.exactness import TOLERANCE, engine_error, fast, greatest, padded_error, step_program
from tests.padded_calls import IDS


def unmasked_tril(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return tril_mask(ids, None)


def behind_no_tokens(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """As Meta's Llama has it: in front of a mask as many columns as tokens were there before."""
    mask = unmasked_tril(ids, None)
    return torch.cat([mask.new_ones(1, 1, ids.shape[1], 0), mask], dim=-1)


class OfBuffers(nn.Module):
    """As TransformerLens and earlier versions of GPT-2 have it: what hides is a buffer, and the scale numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.tensor(-1e9))
        self.scale = np.sqrt(HEAD_SIZE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        weights = torch.where(mask, q @ k.transpose(-1, -2) / self.scale, self.lowest).softmax(-1)
        return (torch.where(torch.isnan(weights), torch.zeros_like(weights), weights) @ v).transpose(1, 2).flatten(2)


def test_what_hides_may_be_a_buffer_and_must_stay() -> None:
    model = Decoder(layers=1, attend=OfBuffers(), mask=tril_mask)
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    assert engine.submit([3, 1, 4], max_new_tokens=2).result().error is None
    model.blocks[0].attend.lowest.fill_(-1.0)
    assert "lowest" in str(engine.submit([3, 1, 4], max_new_tokens=2).result().error)


SPELLINGS: dict[str, dict[str, Any]] = {
    "where, a buffer, numpy's scale": {"attend": OfBuffers(), "mask": tril_mask},
    "einsum, triangle": {"attend": by_einsum, "mask": tril_mask},
    "einsum, comparison, grouped heads": {"attend": by_einsum, "mask": compared_mask, "kv_heads": 2},
    "matmul, added mask, one key head": {"attend": by_matmul, "mask": additive_mask, "kv_heads": 1},
    "bmm, where, no padding": {"attend": by_bmm, "mask": unmasked_tril, "kv_heads": 2},
    "a mask behind none": {"attend": by_einsum, "mask": behind_no_tokens},
    "rows of queries of all heads": {"attend": by_rows, "mask": no_mask, "kv_heads": 2},
    "sdpa, boolean mask, grouped heads": {"attend": by_sdpa, "mask": tril_mask, "kv_heads": 2},
    "sdpa, causal flag": {"attend": by_sdpa, "mask": no_mask},
    "softcap": {"attend": by_softcapped_einsum, "mask": unmasked_tril},
    "window": {"attend": by_einsum, "mask": window_mask(5), "kv_heads": 2},
}
UNPADDED = (
    "a mask behind none",
    "bmm, where, no padding",
    "rows of queries of all heads",
    "sdpa, causal flag",
    "softcap",
)


@pytest.mark.parametrize("name", SPELLINGS)
def test_hand_written_decoder_is_exact_in_both_calls(name: str) -> None:
    """Padded left, right and both, two batch shapes; and the engine's step in chunks over scattered blocks."""
    model = Decoder(layers=1, **SPELLINGS[name])
    error, report = padded_error(model, vocabulary=VOCABULARY, masked=name not in UNPADDED)
    assert report.ok, report
    assert len(sc.selective.reports) == 1  # one graph for every shape
    assert error < TOLERANCE
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


class OfData(nn.Module):
    """Reads `data` of its weight and of what it is given, as some of PEFT's adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        twice = torch.mm(self.linear.weight.data, 2 * torch.eye(WIDTH))
        return x + F.linear(x.data, twice, self.linear.bias.data)


def test_data_of_tensors_is_what_they_hold_now() -> None:
    """Tracing took it for a constant, whose values there were none of: other logits, or a crash."""
    mix = OfData()
    model = Decoder(layers=2, mix=mix)
    program = step_program(model)
    for change in (1.0, -1.5):
        with torch.no_grad():
            mix.linear.weight.mul_(change)
        assert engine_error(model, vocabulary=VOCABULARY, program=program) < TOLERANCE
        error, report = padded_error(model, vocabulary=VOCABULARY)
        assert report.ok and error < TOLERANCE, report


def test_what_reads_a_constant_that_the_trace_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of what Dynamo calls and tracing does not see.
    monkeypatch.setattr(sys.modules["selective_compile.passes.normalise"], "DATA", None)
    model = Decoder(layers=1, mix=OfData())
    with pytest.raises(sc.RefusedError, match="reads a constant that the trace does not hold"):
        step_program(model)


def test_scores_rounded_to_a_narrower_type_are_not_rewritten_silently() -> None:
    """The rewrite would leave the rounding out: other logits than the model's, by more than the tolerance."""

    def rounded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        scores = (q @ k.transpose(-1, -2) * 0.35).masked_fill(~mask, -1e30).half().float()
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    error, _ = padded_error(Decoder(layers=1, attend=rounded), vocabulary=VOCABULARY)
    assert error < TOLERANCE


def chunk_mask(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    chunks = torch.arange(ids.shape[1]) // 5
    return tril_mask(ids, attention_mask) & (chunks[:, None] == chunks)


def prefix_mask(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    kept = tril_mask(ids, None) | (torch.arange(ids.shape[1]) < 5)
    return kept if attention_mask is None else kept & (attention_mask != 0)[:, None, None, :]


def bias_by_distance(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    places, slopes = torch.arange(ids.shape[1]), torch.tensor([1.0, 0.5, 0.25, 0.125])
    return additive_mask(ids, attention_mask) - slopes[:, None, None] * (places[:, None] - places)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


COUNTING_COLUMNS: dict[str, Any] = {
    "window": lambda: Decoder(layers=1, mask=window_mask(5)),
    "chunks": lambda: Decoder(layers=1, mask=chunk_mask),
    "prefix": lambda: Decoder(layers=2, mask=prefix_mask),
    "bias by distance": lambda: Decoder(layers=1, attend=by_matmul, mask=bias_by_distance),
    "convolution": lambda: Decoder(layers=1, mix=Convolution()),
}


@pytest.mark.parametrize("make", COUNTING_COLUMNS.values(), ids=COUNTING_COLUMNS)
def test_what_counts_columns_counts_those_of_padding_too(make: Callable[[], Decoder]) -> None:
    model = make()
    error, report = padded_error(model, vocabulary=VOCABULARY)
    assert report.ok and error < TOLERANCE
    compiled = fast(model)
    holes = torch.ones_like(IDS)
    holes[0, 4], holes[1, 2:4], holes[2, 10], holes[3, :5] = 0, 0, 0, 0
    for mask in (holes, torch.ones_like(IDS)):
        with torch.no_grad():
            difference = compiled(IDS, mask) - model(IDS, mask)
        assert greatest(difference[mask.bool()]) < TOLERANCE
