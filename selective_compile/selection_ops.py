"""The operators that select keys for a sparse attention: schemas, fakes, and their implementations.

    selective::ragged_top_keys   write this step's index keys into a paged pool, then select the best of each row
    selective::varlen_top_keys   the same without a pool: a request's context is its own rows

`selective_compile.reference` says what they compute. The score of position j for a row at position p is

    sum over h of weights[h] * relu(scale * (query[h] . key[h // (H // K)] at j))

and of the positions j <= p, the row gets the `count` with the highest scores, all of them if there are no more. Of
equal scores, those of smaller positions count as higher. (PyTorch's topk leaves the choice open, so where the scores of
a model are equal, its own choice may be another, and is another for other lengths of a request.)

Shapes and dtypes (T rows, N requests, H heads, K heads of keys, D head size), beside those of `selective_compile.ops`:

    query         [T, H, D] float32, bfloat16 or float16
    key           [T, K, D], query's dtype
    weights       [T, H] of a floating dtype
    key_pool      [num_blocks, K, block_size, D], changed in place; query's dtype
    count         at least 1
    result        [T, count] int32: positions in the row's request, ascending, then -1; rows past cu_seqlens_q[N] are -1

Products and sums are in float32, and so are the scores that are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile import reference
from selective_compile.attention_checks import require
from selective_compile.implementations import implementation_on
from selective_compile.ops import refuse_gradients, register


def _kernel(op: str, device_type: str) -> Callable[..., Tensor]:
    resolved = implementation_on(device_type)
    if resolved == "cpu":
        from selective_compile.kernels import selection_cpu

        return getattr(selection_cpu, op)
    if resolved == "triton":
        from selective_compile.kernels import selection_triton

        return getattr(selection_triton, op)
    return getattr(reference, op)


def _run_ragged_top_keys(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    return _kernel("ragged_top_keys", query.device.type)(query, *args)


def _run_varlen_top_keys(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    return _kernel("varlen_top_keys", query.device.type)(query, *args)


def _fake_ragged_top_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    count: int,
) -> Tensor:
    fits = key_pool.dim() == 4 and key_pool.shape[1] == key.shape[1] and key_pool.shape[3] == key.shape[2]
    require(fits, f"key_pool must be [num_blocks, K, block_size, D], got {list(key_pool.shape)}")
    require(key_pool.dtype == query.dtype, f"key_pool must be {query.dtype}, got {key_pool.dtype}")
    return _fake_varlen_top_keys(query, key, weights, cu_seqlens_q, scale, count)


def _fake_varlen_top_keys(
    query: Tensor, key: Tensor, weights: Tensor, cu_seqlens_q: Tensor, scale: float, count: int
) -> Tensor:
    for name, tensor in (("query", query), ("key", key)):
        require(tensor.dim() == 3, f"{name} must be [T, heads, size], got {list(tensor.shape)}")
        require(tensor.dtype == query.dtype, f"{name} must be {query.dtype}, got {tensor.dtype}")
    torch._check(key.shape[0] == query.shape[0])
    torch._check(weights.shape[0] == query.shape[0])
    require(query.shape[2] == key.shape[2], f"key must have head size {query.shape[2]}, got {key.shape[2]}")
    heads = query.shape[1]
    require(heads % key.shape[1] == 0, f"query must have a multiple of {key.shape[1]} heads, got {heads}")
    require(weights.dim() == 2 and weights.shape[1] == heads, f"weights must be [T, {heads}]")
    require(weights.is_floating_point(), f"weights must be of a floating dtype, got {weights.dtype}")
    require(count >= 1, f"count must be at least 1, got {count}")
    return query.new_empty((query.shape[0], count), dtype=torch.int32)


ragged_top_keys = register(
    "ragged_top_keys(Tensor query, Tensor key, Tensor weights, Tensor(a!) key_pool, Tensor cu_seqlens_q, "
    "Tensor context_lens, Tensor block_table, Tensor slot_mapping, float scale, int count) -> Tensor",
    _run_ragged_top_keys,
    _fake_ragged_top_keys,
)
varlen_top_keys = register(
    "varlen_top_keys(Tensor query, Tensor key, Tensor weights, Tensor cu_seqlens_q, float scale, int count) -> Tensor",
    _run_varlen_top_keys,
    _fake_varlen_top_keys,
)
