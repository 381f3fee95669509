"""The reference against attention written out per query row, and against Hugging Face's own functions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import chunked_causal_mask_function
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from selective_compile import reference

BLOCK_SIZE = 4
# Rows of three requests in four steps: prefill whole and chunked, decode, absent, late arrival.
SCHEDULE = ((9, 3, 0), (1, 5, 0), (1, 0, 6), (1, 1, 1))
PER_HEAD = [(False, False), (True, False), (False, True), (True, True)]


def one_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """[H, D] at the last of the positions of keys [c, K, D] -> [H, Dv], from the formulas alone."""
    group, last = query.shape[0] // keys.shape[1], len(keys) - 1
    seen = [j for j in range(len(keys)) if not window or last - j < window]
    seen = [j for j in seen if not chunk or j // chunk == last // chunk]
    rows = []
    for head, q in enumerate(query):
        score = scale * (keys[seen, head // group] @ q)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * torch.tensor([float(j - last) for j in seen])
        weight = torch.exp(score)
        total = weight.sum() if sinks is None else weight.sum() + torch.exp(sinks[head])
        rows.append((weight / total) @ values[seen, head // group])
    return torch.stack(rows)


def with_padding(rows: list[Tensor], spans: list[range]) -> Tensor:
    """The rows of each request in this step, end to end, and one padding row of NaN."""
    picked = [tensor[span] for tensor, span in zip(rows, spans, strict=True)]
    return torch.cat([*picked, torch.full_like(rows[0][:1], math.nan)])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (3, 0), (100, 0), (0, 1), (0, 5), (0, 100), (3, 5)])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize(("with_sinks", "with_slopes"), PER_HEAD)
def test_steps_over_a_pool_equal_attention_over_the_whole_history(
    heads, window, chunk, softcap, with_sinks, with_slopes
):
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
    sinks = torch.randn(query_heads, generator=generator) if with_sinks else None
    slopes = torch.rand(query_heads, generator=generator) if with_slopes else None
    options = (scale, window, softcap, chunk, sinks, slopes)
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
            *options,
        )
        expected = [
            one_row(queries[n][p], keys[n][: p + 1], values[n][: p + 1], *options) for n in range(3) for p in spans[n]
        ]
        torch.testing.assert_close(output[:-1], torch.stack(expected), rtol=1e-5, atol=1e-5)
        assert output[-1].eq(0).all()
        done = [span.stop for span in spans]
    written = sum(totals) * kv_heads
    assert int(key_pool.isfinite().all(-1).sum()) == int(value_pool.isfinite().all(-1).sum()) == written


@pytest.mark.parametrize("prefix", [1, 2, 6, 9, 40])
@pytest.mark.parametrize(("with_sinks", "with_slopes"), PER_HEAD)
def test_a_prefix_is_seen_by_all_rows_as_far_as_it_is_there(prefix, with_sinks, with_slopes):
    """A request of 11 tokens in steps of 7, 1 and 3, by a softmax over a whole matrix with what is hidden written out;
    in one step it is the same as without a pool."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(11, heads, 4, generator=generator) for heads in (6, 2, 2))
    sinks = torch.randn(6, generator=generator) if with_sinks else None
    slopes = torch.rand(6, generator=generator) if with_slopes else None
    there = torch.tensor([7] * 7 + [8] + [11] * 3)[:, None]

    def expected(there: Tensor) -> Tensor:
        i, j = torch.arange(11)[:, None], torch.arange(11)
        score = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(3, 1)) * 0.3
        score = score + (0 if slopes is None else slopes[:, None, None] * (j - i))
        seen = ((j <= i) | (j < prefix)) & (j < there)
        weight = score.exp() * seen
        total = weight.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        return torch.einsum("hqk,khd->qhd", weight / total, value.repeat_interleave(3, 1))

    pools = [torch.full((3, 2, 4, 4), math.nan) for _ in range(2)]
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = table[0, torch.arange(11) // 4].long() * 4 + torch.arange(11) % 4
    options = (0.3, 0, 0.0, 0, sinks, slopes, None)
    rows = []
    for begin, end in ((0, 7), (7, 8), (8, 11)):
        new = (tensor[begin:end] for tensor in (query, key, value))
        lengths = one_request(end - begin), torch.tensor([end], dtype=torch.int32)
        rows.append(
            reference.ragged_attention(*new, *pools, *lengths, table, slots[begin:end], *options, prefix=prefix)
        )
    torch.testing.assert_close(torch.cat(rows), expected(there), rtol=1e-5, atol=1e-5)
    whole = reference.varlen_attention(query, key, value, one_request(11), *options, prefix)
    torch.testing.assert_close(whole, expected(torch.tensor(11)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "chunk"), [(2, 0), (0, 4), (2, 4), (1, 3)])
def test_what_no_row_sees_is_not_read(window, chunk):
    """A row at position 5 does not see the block of the positions 0 to 3 by a window of 2, nor by a chunk of 4."""
    query, key, value = (torch.ones(1, 1, 4) for _ in range(3))
    pools = [torch.full((2, 1, BLOCK_SIZE, 4), torch.nan) for _ in range(2)]
    for pool in pools:
        pool[1, :, 0] = 1.0
    table = torch.tensor([[1 << 20, 1]], dtype=torch.int32)
    bounds, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    output = reference.ragged_attention(
        query, key, value, *pools, bounds, lengths, table, torch.tensor([5]), 1.0, window, 0.0, chunk
    )
    torch.testing.assert_close(output, torch.ones(1, 1, 4))


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


def draw(rows: int, heads: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(rows, n, 8, generator=generator) for n in (heads, 2, 2))
    return query, key, value


def one_request(rows: int) -> Tensor:
    return torch.tensor([0, rows], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shift", [-40.0, 0.0, 40.0])
def test_sinks_are_those_of_gpt_oss(dtype, shift):
    generator = torch.Generator().manual_seed(3)
    query, key, value = draw(9, 4, generator)
    sinks = (shift + torch.randn(4, generator=generator)).to(dtype)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks.float(), training=False)
    mask = torch.full((9, 9), -torch.inf).triu(1)
    heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    expected, _ = eager_attention_forward(module, *heads_first, attention_mask=mask, scaling=0.3)
    output = reference.varlen_attention(query, key, value, one_request(9), 0.3, 0, 0.0, sinks=sinks)
    torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["bloom", "mpt"])
@pytest.mark.parametrize("heads", [4, 6])
def test_slopes_are_those_of_bloom_and_mpt(model, heads):
    rows, (query, key, value) = 9, draw(9, heads, torch.Generator().manual_seed(4))
    if model == "bloom":
        bias = build_alibi_tensor(torch.ones(1, rows, dtype=torch.int64), heads, torch.float32)
    else:
        bias = build_mpt_alibi_tensor(heads, rows)
    slopes = (bias[..., -1] - bias[..., -2]).flatten()
    mask = bias.reshape(heads, 1, rows) + torch.full((rows, rows), -torch.inf).triu(1)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1)
    output = reference.varlen_attention(query, key, value, one_request(rows), 0.3, 0, 0.0, slopes=slopes)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_chunks_are_those_of_hugging_faces_chunked_mask(chunk):
    query, key, value = draw(17, 4, torch.Generator().manual_seed(5))
    at, visible = torch.arange(17), chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    mask = visible(torch.tensor(0), torch.tensor(0), at[:, None], at)
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(0, 1)
    output = reference.varlen_attention(query, key, value, one_request(17), 0.3, 0, 0.0, chunk=chunk)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(7, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    sinks, slopes = torch.randn(4, generator=generator).to(dtype), torch.rand(4, generator=generator)
    bounds, options = one_request(7), (0.3, 0, 0.0, 0, sinks, slopes)
    output = reference.varlen_attention(query, key, value, bounds, *options)
    wide = reference.varlen_attention(query.float(), key.float(), value.float(), bounds, *options)
    assert output.dtype == dtype
    assert torch.equal(output, wide.to(dtype))
