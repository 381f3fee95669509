"""The operators of attention to latents: schemas, fakes, and their implementations.

    selective::latent_attention   write this step's rows into a paged pool, then attend: a row is the key of its token,
                                  and its first `value_size` numbers are the value
    selective::head_products      each head's rows times a matrix of its own: queries to latents, results from them

The first is `selective::ragged_attention` with one key/value head whose values lie in its keys, so that they are kept
and read once. The shapes are those of `selective_compile.ops`, with K 1, but for

    key           [T, 1, D]
    key_pool      [num_blocks, 1, block_size, D], changed in place; query's dtype, int8 with rows of
                  row_bytes(D), which the CPU's kernel alone reads, or float8_e4m3fn
    key_scales    [1] float32, above 0, with a pool of float8_e4m3fn, else None
    value_size    at least 1 and at most D
    result        [T, H, value_size], query's dtype; rows past cu_seqlens_q[N] are 0

and of head_products, all of one dtype:

    weight        [H, size, r], a matrix for each head
    x             [T, H, r]: weight[h] @ x[t, h]; or transposed [T, H, size]: weight[h].T @ x[t, h]
    result        [T, H, size], or transposed [T, H, r]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile import fp8_rows, reference
from selective_compile.attention_checks import (
    check_per_head,
    check_prefix,
    check_rows,
    check_scales,
    check_selection,
    require,
)
from selective_compile.implementations import implementation_on
from selective_compile.int8_rows import row_bytes
from selective_compile.ops import reference_stands_in, refuse_gradients, register


def _kernel(device_type: str) -> Callable[..., Tensor]:
    resolved = implementation_on(device_type)
    if resolved == "cpu":
        from selective_compile.kernels import ragged_attention_cpu

        return ragged_attention_cpu.latent_attention
    if resolved == "triton":
        from selective_compile.kernels import latent_attention_triton

        return latent_attention_triton.latent_attention
    return reference.latent_attention


def _run_latent_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    if reference_stands_in(args[1]):
        return reference.latent_attention(query, *args)
    return _kernel(query.device.type)(query, *args)


def _run_head_products(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    refuse_gradients(x, weight)
    return _products(x, weight)(x, weight, transposed)


@functools.cache
def _native_products() -> Callable[..., Tensor] | None:
    from selective_compile.kernels import head_products_cpu

    return head_products_cpu.head_products if head_products_cpu.available() else None


def _products(x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    resolved = implementation_on(x.device.type)
    if resolved == "reference":
        return reference.head_products
    takes = x.dtype in (torch.float32, torch.bfloat16) and x.stride(2) == weight.stride(2) == 1
    return (_native_products() if resolved == "cpu" and takes else None) or by_library


def by_library(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """`selective::head_products` as a batched product."""
    return torch.bmm(x.transpose(0, 1), weight if transposed else weight.transpose(1, 2)).transpose(0, 1).contiguous()


def _fake_head_products(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    require(x.dim() == weight.dim() == 3, f"x and weight must be [T, H, n] and [H, size, r], got {x.dim()} dimensions")
    require(x.dtype == weight.dtype, f"weight must be {x.dtype}, got {weight.dtype}")
    fits = x.shape[1] == weight.shape[0] and x.shape[2] == weight.shape[1 if transposed else 2]
    require(fits, f"weight must have a matrix for each head of x, got {list(weight.shape)} for {list(x.shape[1:])}")
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[2 if transposed else 1]))


def _fake_latent_attention(
    query: Tensor,
    key: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    value_size: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    prefix: int = 0,
) -> Tensor:
    check_rows(query, key, key)
    check_per_head(query, sinks, slopes)
    check_selection(query, selection, window, chunk)
    check_prefix(prefix, window, chunk, selection)
    require(key.shape[1] == 1, f"key must have one head, got {key.shape[1]}")
    size = row_bytes(key.shape[2]) if key_pool.dtype == torch.int8 else key.shape[2]
    fits = key_pool.dim() == 4 and key_pool.shape[1] == 1 and key_pool.shape[3] == size
    require(fits, f"key_pool must be [num_blocks, 1, block_size, {size}], got {list(key_pool.shape)}")
    check_scales(key_pool, key_scales=key_scales)
    known = key_pool.dtype in (query.dtype, torch.int8, fp8_rows.DTYPE)
    require(known, f"key_pool must be {query.dtype}, torch.int8 or {fp8_rows.DTYPE}, got {key_pool.dtype}")
    inside = 1 <= value_size <= key.shape[2]
    require(inside, f"value_size must be at least 1 and at most {key.shape[2]}, got {value_size}")
    return query.new_empty(query.shape[0], query.shape[1], value_size)


latent_attention = register(
    "latent_attention(Tensor query, Tensor key, Tensor(a!) key_pool, Tensor cu_seqlens_q, Tensor context_lens, "
    "Tensor block_table, Tensor slot_mapping, int value_size, float scale, int window, float softcap, int chunk=0, "
    "Tensor? sinks=None, Tensor? slopes=None, Tensor? selection=None, Tensor? key_scales=None, "
    "int prefix=0) -> Tensor",
    _run_latent_attention,
    _fake_latent_attention,
)
head_products = register(
    "head_products(Tensor x, Tensor weight, bool transposed) -> Tensor", _run_head_products, _fake_head_products
)
