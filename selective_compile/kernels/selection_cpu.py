"""Selections of keys on CPUs: the launchers of the C++ kernels beside this file, built when first used.

Legend
    packed   the kernels' one argument: addresses, sizes and strides as 8-byte fields, in the order of `Call` in
             selection_call.h
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from selective_compile.kernels import native
from selective_compile.kernels.ragged_attention_cpu import (
    DTYPES,
    address,
    check_metadata,
    check_pools,
    check_rows,
    per_head,
)
from selective_compile.kernels.statuses import REFUSALS

_functions = native.Functions(__file__)

_pack = struct.Struct("=41q2d").pack


def ragged_top_keys(
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
    """`selective::ragged_top_keys` (shapes: `selective_compile.selection_ops`). Returns [T, count] int32.

    Raises:
        ValueError: a dtype or layout is not supported, or the metadata point outside the tensors. The pool is
            unchanged then.
        NativeBuildError: the kernel cannot be built here.
    """
    check_rows(query, key, key)
    check_metadata(cu_seqlens_q, context_lens, block_table, slot_mapping, rows=query.shape[0])
    _check_index_pool(key_pool, key)
    selection = query.new_empty((query.shape[0], count), dtype=torch.int32)
    held = _row_weights(weights, query)
    _launch(
        "selective_top_keys",
        selection,
        (query, key, None),
        (key_pool, None),
        (cu_seqlens_q, context_lens, block_table, slot_mapping),
        (count, 0, held.data_ptr(), 0, 0, scale, 0.0),
    )
    return selection


def varlen_top_keys(
    query: Tensor, key: Tensor, weights: Tensor, cu_seqlens_q: Tensor, scale: float, count: int
) -> Tensor:
    """`selective::varlen_top_keys` (shapes: `selective_compile.selection_ops`). Returns [T, count] int32.

    Raises:
        ValueError: a dtype or layout is not supported, or cu_seqlens_q points outside the tensors.
        NativeBuildError: the kernel cannot be built here.
    """
    check_rows(query, key, key)
    _check_bounds(cu_seqlens_q)
    selection = query.new_empty((query.shape[0], count), dtype=torch.int32)
    held = _row_weights(weights, query)
    of_heads = (count, 0, held.data_ptr(), 0, 0, scale, 0.0)
    _launch("selective_top_keys", selection, (query, key, None), None, (cu_seqlens_q,), of_heads)
    return selection


def ragged_selected_attention(
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
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    selection: Tensor,
) -> Tensor:
    """`selective::ragged_attention` with a selection: each row reads the keys selected for it. Returns [T, H, Dv].

    Raises:
        ValueError: a dtype or layout is not supported, or the metadata point outside the tensors. The pools are
            unchanged then.
        NativeBuildError: the kernel cannot be built here.
    """
    check_rows(query, key, value)
    check_metadata(cu_seqlens_q, context_lens, block_table, slot_mapping, rows=query.shape[0])
    check_pools(key, value, key_pool, value_pool)
    metadata = (cu_seqlens_q, context_lens, block_table, slot_mapping)
    pools = (key_pool, value_pool)
    return _attend((query, key, value), pools, metadata, scale, softcap, sinks, slopes, selection)


def varlen_selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    selection: Tensor,
) -> Tensor:
    """`selective::varlen_attention` with a selection. Returns [T, H, Dv].

    Raises:
        ValueError: a dtype or layout is not supported, or cu_seqlens_q points outside the tensors.
        NativeBuildError: the kernel cannot be built here.
    """
    check_rows(query, key, value)
    _check_bounds(cu_seqlens_q)
    return _attend((query, key, value), None, (cu_seqlens_q,), scale, softcap, sinks, slopes, selection)


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    pools: tuple[Tensor, Tensor] | None,
    metadata: tuple[Tensor, ...],
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    selection: Tensor,
) -> Tensor:
    query, _, value = tensors
    rows, heads, _ = query.shape
    if not (selection.dtype is torch.int32 and selection.dim() == 2 and selection.shape[0] == rows):
        raise ValueError(f"selection must be [{rows}, count] int32, got {list(selection.shape)} {selection.dtype}")
    sinks, slopes = per_head(sinks, query, "sinks"), per_head(slopes, query, "slopes")
    selection = selection.contiguous()
    output = query.new_empty((rows, heads, value.shape[2]))
    of_heads = (selection.shape[1], selection.data_ptr(), 0, address(sinks), address(slopes), scale, softcap)
    _launch("selective_selected_attention", output, tensors, pools, metadata, of_heads)
    return output


def _launch(
    name: str,
    output: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    pools: tuple[Tensor, Tensor | None] | None,
    metadata: tuple[Tensor, ...],
    score: tuple[int, int, int, int, int, float, float],
) -> None:
    query, key, value = tensors
    rows, query_heads, size = query.shape
    value_size = 0 if value is None else value.shape[2]
    bounds, *others = metadata
    if pools is None:  # to the kernel, the rows are a pool of one block
        keys, values = key, value
        key_strides: tuple[int, ...] = (0, key.stride(1), key.stride(0))
        value_strides: tuple[int, ...] = (0, 0, 0) if value is None else (0, value.stride(1), value.stride(0))
        sizes = (bounds.numel() - 1, 0, 0, 0, 0)
        int8_pools = False
    else:
        keys, values = pools
        int8_pools = keys.dtype is torch.int8
        key_strides = keys.stride()[:3]
        value_strides = (0, 0, 0) if values is None else values.stride()[:3]
        table = others[1]
        sizes = (bounds.numel() - 1, keys.shape[2], keys.shape[0], table.shape[1], table.stride(0))
    # One line per line of `Call`.
    packed = _pack(
        *(output.data_ptr(), query.data_ptr(), key.data_ptr(), address(value), keys.data_ptr(), address(values)),
        *(bounds.data_ptr(), *(tensor.data_ptr() for tensor in others[:2])),
        *(tensor.data_ptr() for tensor in others[2:]),
        *(() if others else (0, 0, 0)),
        native.torch_parallel(),
        *(DTYPES[query.dtype], int8_pools, torch.get_num_threads()),
        *(rows, query_heads, key.shape[1], size, value_size),
        *sizes,
        *(*query.stride()[:2], *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2])),
        *key_strides,
        *value_strides,
        *score,
    )
    status = _functions[name](packed)
    if status:
        raise ValueError(REFUSALS[status])


def _row_weights(weights: Tensor, query: Tensor) -> Tensor:
    """The weights as the kernel reads them; the caller holds them until it has run, for they may be a copy."""
    if not (weights.shape == query.shape[:2] and weights.is_floating_point()):
        wanted = f"{list(query.shape[:2])} of a floating dtype"
        raise ValueError(f"weights must be {wanted}, got {list(weights.shape)} {weights.dtype}")
    return weights.to(torch.float32).contiguous()


def _check_bounds(cu_seqlens_q: Tensor) -> None:
    if not (cu_seqlens_q.dtype is torch.int32 and cu_seqlens_q.is_contiguous()):
        raise ValueError(f"cu_seqlens_q must be contiguous int32, got {cu_seqlens_q.dtype}")


def _check_index_pool(pool: Tensor, rows: Tensor) -> None:
    fits = pool.dim() == 4 and pool.dtype is rows.dtype and pool.shape[1::2] == rows.shape[1:] and pool.stride(3) == 1
    if not fits:
        wanted = f"[num_blocks, {rows.shape[1]}, block_size, {rows.shape[2]}] {rows.dtype}, contiguous in the last"
        raise ValueError(f"key_pool must be {wanted}, got {list(pool.shape)} {pool.dtype}")
