"""Ragged attention in Triton, for CUDA and ROCm: the ops, by the launches that they are made of.

    ragged_attention   plan, write (`ragged_attention_write_triton`), then attend
    rotary_attention   plan, norm, rotate and write (`rotary_attention_write_triton`), then attend
    varlen_attention   attend
    plan               how the step is cut, once for all layers (`split_plan_triton`)
    attend             one launch in which a program takes a tile of rows and the keys that they see, or a split of
                       them (`ragged_attention_attend_triton`), and where keys are split another, which merges what
                       the splits came to (`ragged_attention_merge_triton`)

Which steps have which tile is the table of `ragged_attention_tiles`. With a selection of keys, `selection_triton`
attends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selective_compile.kernels import selection_triton
from selective_compile.kernels.ragged_attention_attend_triton import attend
from selective_compile.kernels.ragged_attention_write_triton import write
from selective_compile.kernels.rotary_attention_write_triton import rotate_and_write


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """`selective::ragged_attention`: one launch writes into the pools, others attend. [T, H, Dv].

    batch_invariant: N is T, and a row's result is the same bits whatever the other rows and the block table's width.

    Raises:
        ValueError: the pools are int8, which only the CPU's kernels read.
    """
    if key_pool.dtype is torch.int8:
        raise ValueError(f"the pools must be {query.dtype} for Triton's kernels, got torch.int8")
    scales = (key_scales, value_scales)

    def written() -> Tensor:
        write(key, value, key_pool, value_pool, slot_mapping, *scales)
        return query

    metadata = (cu_seqlens_q, context_lens, block_table)
    pools, score, per_head = (key_pool, value_pool), (scale, window, softcap, chunk, prefix), (sinks, slopes, *scales)
    others = (selection, distance_bias)
    return _attend_to_pools(query, written, pools, metadata, score, per_head, *others, whole=batch_invariant)


def rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    first: int,
    rotated: int,
    interleaved: bool,
    key_pool: Tensor,
    value_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """`selective::rotary_attention`: one launch norms, rotates and writes into the pools, others attend. [T, H, Dv]."""
    weights, rotation = (query_weight, key_weight), (eps, weight_offset, first, rotated, interleaved)
    pools, scales = (key_pool, value_pool), (key_scales, value_scales)

    def written() -> Tensor:
        return rotate_and_write(query, key, value, (cos, sin), weights, rotation, pools, scales, slot_mapping)

    metadata = (cu_seqlens_q, context_lens, block_table)
    score, per_head = (scale, window, softcap, chunk, prefix), (sinks, slopes, *scales)
    others = (selection, distance_bias)
    return _attend_to_pools(query, written, pools, metadata, score, per_head, *others, whole=batch_invariant)


def _attend_to_pools(
    query: Tensor,
    written: Callable[[], Tensor],
    pools: tuple[Tensor, Tensor],
    metadata: tuple[Tensor, Tensor, Tensor],
    score: tuple[float, int, float, int, int],
    per_head: selection_triton.PerHead,
    selection: Tensor | None,
    distance_bias: Tensor | None,
    *,
    whole: bool,
) -> Tensor:
    """Attend to what is in the key and the value pool when the step's own are `written` there. [T, H, Dv]."""
    key_pool, value_pool = pools
    if selection is not None:
        scale, window, softcap, chunk, prefix = score
        _check_unmasked(window, chunk, prefix)
        options = ((scale, softcap), per_head, selection)
        return selection_triton.ragged_selected_attention(written(), key_pool, value_pool, metadata, *options)
    strides, sizes = (*key_pool.stride()[:3], *value_pool.stride()[:3]), key_pool.shape[1:3]
    return attend(query, pools, metadata, per_head, strides, sizes, score, distance_bias, whole=whole, written=written)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """`selective::varlen_attention`: the rows of `key` and `value` are read where they are. [T, H, Dv]."""
    if selection is not None:
        _check_unmasked(window, chunk, prefix)
        options = ((scale, softcap), sinks, slopes, selection)
        return selection_triton.varlen_selected_attention(query, key, value, cu_seqlens_q, *options)
    strides = (*key.stride()[:2], 0, *value.stride()[:2], 0)
    tensors, per_head = (cu_seqlens_q, cu_seqlens_q, cu_seqlens_q), (sinks, slopes, None, None)
    score = (scale, window, softcap, chunk, prefix)
    tensors_and_sizes = ((key, value), tensors, per_head, strides, (key.shape[1], 0), score, distance_bias)
    return attend(query, *tensors_and_sizes, written=lambda: query, whole=True)


def _check_unmasked(window: int, chunk: int, prefix: int) -> None:
    """Selected keys are among all keys in front of a row."""
    if window or chunk:
        raise ValueError(f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    if prefix:
        raise ValueError(f"prefix must be 0 with a selection, got {prefix}")
