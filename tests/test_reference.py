"""The reference against attention written out per query row, with the history kept outside the pools."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from selective_compile import reference

BLOCK_SIZE = 4
# Rows of three requests in four steps: prefill whole and chunked, decode, absent, late arrival.
SCHEDULE = ((9, 3, 0), (1, 5, 0), (1, 0, 6), (1, 1, 1))


def one_row(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """[H, D] at the last of the positions of keys [c, K, D] -> [H, Dv], from the formulas alone."""
    group = query.shape[0] // keys.shape[1]
    if window:
        keys, values = keys[-window:], values[-window:]
    rows = []
    for head, q in enumerate(query):
        score = scale * (keys[:, head // group] @ q)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        weight = torch.exp(score - score.max())
        rows.append((weight / weight.sum()) @ values[:, head // group])
    return torch.stack(rows)


def with_padding(rows: list[Tensor], spans: list[range]) -> Tensor:
    """The rows of each request in this step, end to end, and one padding row of NaN."""
    picked = [tensor[span] for tensor, span in zip(rows, spans, strict=True)]
    return torch.cat([*picked, torch.full_like(rows[0][:1], math.nan)])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_steps_over_a_pool_equal_attention_over_the_whole_history(heads, window, softcap):
    generator = torch.Generator().manual_seed(0)
    (query_heads, kv_heads), key_size, value_size, scale = heads, 8, 6, 0.4
    totals = [sum(step[n] for step in SCHEDULE) for n in range(3)]
    blocks = [-(-total // BLOCK_SIZE) for total in totals]
    table = torch.zeros(3, max(blocks), dtype=torch.int32)
    for n, owned in enumerate(torch.randperm(sum(blocks), generator=generator).split(blocks)):
        table[n, : blocks[n]] = owned
    key_pool = torch.full((sum(blocks), kv_heads, BLOCK_SIZE, key_size), math.nan)
    value_pool = torch.full((sum(blocks), kv_heads, BLOCK_SIZE, value_size), math.nan)
    queries = [torch.randn(total, query_heads, key_size, generator=generator) for total in totals]
    keys = [torch.randn(total, kv_heads, key_size, generator=generator) for total in totals]
    values = [torch.randn(total, kv_heads, value_size, generator=generator) for total in totals]
    done = [0, 0, 0]
    for step in SCHEDULE:
        spans = [range(past, past + count) for past, count in zip(done, step, strict=True)]
        slots = [int(table[n, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for n in range(3) for p in spans[n]]
        query, key, value = (with_padding(rows, spans) for rows in (queries, keys, values))
        output = reference.ragged_attention(
            query,
            key,
            value,
            key_pool,
            value_pool,
            torch.tensor([0, *step]).cumsum(0).int(),
            torch.tensor([span.stop for span in spans], dtype=torch.int32),
            table,
            torch.tensor([*slots, -1]),
            scale,
            window,
            softcap,
        )
        expected = [
            one_row(queries[n][p], keys[n][: p + 1], values[n][: p + 1], scale, window, softcap)
            for n in range(3)
            for p in spans[n]
        ]
        torch.testing.assert_close(output[:-1], torch.stack(expected), rtol=1e-5, atol=1e-5)
        assert output[-1].eq(0).all()
        done = [span.stop for span in spans]
    written = sum(totals) * kv_heads
    assert int(key_pool.isfinite().all(-1).sum()) == int(value_pool.isfinite().all(-1).sum()) == written


def test_varlen_equals_sdpa_of_each_request():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(11, heads, 8, generator=generator) for heads in (4, 2, 2))
    bounds = [0, 4, 4, 10]
    output = reference.varlen_attention(query, key, value, torch.tensor(bounds, dtype=torch.int32), 0.25, 0, 0.0)
    for begin, end in ((0, 4), (4, 10)):
        q, k, v = (tensor[begin:end].transpose(0, 1) for tensor in (query, key, value))
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(output[begin:end], expected.transpose(0, 1), rtol=1e-5, atol=1e-6)
    assert output[10:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(7, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 7], dtype=torch.int32)
    output = reference.varlen_attention(query, key, value, bounds, 0.3, 0, 0.0)
    wide = reference.varlen_attention(query.float(), key.float(), value.float(), bounds, 0.3, 0, 0.0)
    assert output.dtype == dtype
    assert torch.equal(output, wide.to(dtype))
