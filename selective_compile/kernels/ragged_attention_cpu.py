"""Ragged attention on CPUs: the launchers of the C++ kernel beside this file, built when first used.

Legend
    packed   the kernel's one argument: addresses, sizes and strides as 8-byte fields, in the order of `Call` in
             ragged_attention_call.h. One struct.pack costs a third of what forty ctypes arguments do
"""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from selective_compile.int8_rows import row_bytes
from selective_compile.kernels import native
from selective_compile.kernels.statuses import REFUSALS

_functions = native.Functions(__file__)
available, unavailable_reason, address_of = _functions.available, _functions.unavailable_reason, _functions.address
build_beside = _functions.build_beside

_pack = struct.Struct("=46q2d").pack
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
    key_scales: None = None,
    value_scales: None = None,
    prefix: int = 0,
    distance_bias: Tensor | None = None,
) -> Tensor:
    """`selective::ragged_attention` (shapes: `selective_compile.ops`). Returns [T, H, Dv].

    Raises:
        ValueError: a dtype or layout is not supported, or the metadata point outside the tensors. The pools are
            unchanged then.
        NativeBuildError: the kernel cannot be built here.
    """
    if selection is not None:
        refuse_reach(window, chunk, prefix)
        tensors = (query, key, value, key_pool, value_pool, cu_seqlens_q, context_lens, block_table, slot_mapping)
        return _selection().ragged_selected_attention(*tensors, scale, softcap, sinks, slopes, selection)
    refuse_limits(prefix, window, chunk)
    check_rows(query, key, value)
    check_metadata(cu_seqlens_q, context_lens, block_table, slot_mapping, rows=query.shape[0])
    sinks, slopes = per_head(sinks, query, "sinks", by_row=True), per_head(slopes, query, "slopes")
    distance_bias = by_distance(distance_bias, query)
    check_pools(key, value, key_pool, value_pool)
    tensors = (query, key, value, key_pool, value_pool, cu_seqlens_q, context_lens, block_table, slot_mapping)
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    by_row = fields_by_row(distance_bias, sinks)
    score = (window, chunk, prefix, address(sinks), address(slopes), *by_row, scale, softcap)
    _launch(call_fields(output, *tensors, score))
    return output


def latent_attention(
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
    key_scales: None = None,
    prefix: int = 0,
) -> Tensor:
    """`selective::latent_attention` (shapes: `selective_compile.latent_ops`). Returns [T, H, value_size].

    To the kernel the values are a pool that begins where the keys' does: it writes it once, and of int8 rows it takes
    the scale from where the key has it.

    Raises:
        ValueError, NativeBuildError: as `ragged_attention`.
    """
    stored = row_bytes(value_size) if key_pool.dtype is torch.int8 else value_size
    pools, metadata = (key_pool, key_pool[..., :stored]), (cu_seqlens_q, context_lens, block_table, slot_mapping)
    score: Any = (scale, window, softcap, chunk, sinks, slopes, selection, None, None, prefix)
    return ragged_attention(query, key, key[..., :value_size], *pools, *metadata, *score)


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
    """`selective::varlen_attention` (shapes: `selective_compile.ops`). Returns [T, H, Dv].

    The kernel reads key and value where they lie: to it they are a pool of one block.

    Raises:
        ValueError: a dtype or layout is not supported, or cu_seqlens_q points outside the tensors.
        NativeBuildError: the kernel cannot be built here.
    """
    if selection is not None:
        refuse_reach(window, chunk, prefix)
        tensors = (query, key, value, cu_seqlens_q)
        return _selection().varlen_selected_attention(*tensors, scale, softcap, sinks, slopes, selection)
    refuse_limits(prefix, window, chunk)
    check_rows(query, key, value)
    if not (cu_seqlens_q.dtype is torch.int32 and cu_seqlens_q.is_contiguous()):
        raise ValueError(f"cu_seqlens_q must be contiguous int32, got {cu_seqlens_q.dtype}")
    sinks, slopes = per_head(sinks, query, "sinks", by_row=True), per_head(slopes, query, "slopes")
    distance_bias = by_distance(distance_bias, query)
    key_row, key_head, _ = key.stride()
    value_row, value_head, _ = value.stride()
    output = query.new_empty((*query.shape[:2], value.shape[2]))
    fields = _fields(
        (output, query, key, value),
        (key.data_ptr(), value.data_ptr(), cu_seqlens_q.data_ptr(), 0),
        (0, 0),
        False,
        (cu_seqlens_q.numel() - 1, 0, 0, 0, 0),
        (0, key_head, key_row, 0, value_head, value_row),
        (window, chunk, prefix, address(sinks), address(slopes), *fields_by_row(distance_bias, sinks), scale, softcap),
        torch.get_num_threads(),
    )
    _launch(fields)
    return output


def _selection() -> ModuleType:
    # Most models select no keys, and need no second library to be built.
    from selective_compile.kernels import selection_cpu

    return selection_cpu


def refuse_reach(window: int, chunk: int, prefix: int = 0) -> None:
    """Raise ValueError unless all are 0, as they must be with a selection."""
    if window or chunk:
        raise ValueError(f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    if prefix:
        raise ValueError(f"prefix must be 0 with a selection, got {prefix}")


def refuse_limits(prefix: int, window: int, chunk: int) -> None:
    """Raise ValueError if there is a prefix and a window or chunk, which no kernel has at once."""
    if prefix and (window or chunk):
        raise ValueError(f"window and chunk must be 0 with a prefix, got {window} and {chunk}")


def call_fields(
    output: Any,
    query: Any,
    key: Any,
    value: Any,
    key_pool: Any,
    value_pool: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    block_table: Any,
    slot_mapping: Any,
    score: tuple[Any, ...],
    threads: Any = None,
) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`).

    Args:
        score: window, chunk, prefix, the addresses of sinks and slopes or 0, `fields_by_row`, scale and softcap.
    """
    num_blocks, _, block_size, _ = key_pool.shape
    key_block, key_head, key_slot, _ = key_pool.stride()
    value_block, value_head, value_slot, _ = value_pool.stride()
    return _fields(
        (output, query, key, value),
        (key_pool.data_ptr(), value_pool.data_ptr(), cu_seqlens_q.data_ptr(), context_lens.data_ptr()),
        (block_table.data_ptr(), slot_mapping.data_ptr()),
        key_pool.dtype is torch.int8,
        (context_lens.numel(), block_size, num_blocks, block_table.shape[1], block_table.stride(0)),
        (key_block, key_head, key_slot, value_block, value_head, value_slot),
        score,
        torch.get_num_threads() if threads is None else threads,
    )


def _fields(
    tensors: tuple[Any, Any, Any, Any],
    pools_and_lengths: tuple[Any, ...],
    blocks: tuple[Any, ...],
    int8_pools: bool,
    sizes: tuple[Any, ...],
    pool_strides: tuple[Any, ...],
    score: tuple[Any, ...],
    threads: Any,
) -> tuple[Any, ...]:
    """One line per line of `Call`."""
    _, query, key, value = tensors
    rows, query_heads, size = query.shape
    _, heads, value_size = value.shape
    query_row, query_head, _ = query.stride()
    key_row, key_head, _ = key.stride()
    value_row, value_head, _ = value.stride()
    return (
        *(each.data_ptr() for each in tensors),
        *pools_and_lengths,
        *blocks,
        native.torch_parallel(),
        *(DTYPES[query.dtype], int(int8_pools), int(native.MATRIX_UNIT), threads),
        *(rows, query_heads, heads, size, value_size),
        *sizes,
        *(query_row, query_head, key_row, key_head, value_row, value_head),
        *pool_strides,
        *score,
    )


def _launch(fields: tuple[Any, ...]) -> None:
    status = _functions["selective_attention"](_pack(*fields))
    if status:
        raise ValueError(REFUSALS[status])


def per_head(values: Tensor | None, query: Tensor, name: str, *, by_row: bool = False) -> Tensor | None:
    """The values as the kernel reads them; the caller holds them until it has run, for they may be a copy."""
    if values is None:
        return None
    rows, heads, _ = query.shape
    fits = values.shape == (heads,) or (by_row and values.shape == (rows, heads))
    if not (fits and values.is_floating_point()):
        wanted = f"[{heads}]{f' or [{rows}, {heads}]' if by_row else ''}"
        raise ValueError(f"{name} must be {wanted} of a floating dtype, got {list(values.shape)} {values.dtype}")
    return values.to(torch.float32).contiguous()


def by_distance(values: Tensor | None, query: Tensor) -> Tensor | None:
    """As `per_head`, of biases by distance [T or 1, H, R]."""
    if values is None:
        return None
    rows, heads, _ = query.shape
    if not (values.dim() == 3 and values.shape[0] in (1, rows) and values.shape[1] == heads and values.shape[2]):
        raise ValueError(f"distance_bias must be [1, {heads}, R] or [{rows}, {heads}, R], got {list(values.shape)}")
    if not values.is_floating_point():
        raise ValueError(f"distance_bias must be of a floating dtype, got {values.dtype}")
    return values.to(torch.float32).contiguous()


def fields_by_row(distance_bias: Any, sinks: Any) -> tuple[Any, ...]:
    """The address of biases by distance, numbers of a row, 0 if all rows have the same, and distances; numbers of a row
    of sinks likewise.  Of None zeros."""
    sink_row = 0 if sinks is None or len(sinks.shape) == 1 else sinks.shape[1]
    if distance_bias is None:
        return 0, 0, 0, sink_row
    rows, heads, distances = distance_bias.shape
    same = isinstance(rows, int) and rows == 1
    return distance_bias.data_ptr(), 0 if same else heads * distances, distances, sink_row


def address(values: Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()


def check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtype = query.dtype
    if dtype not in DTYPES:
        raise ValueError(f"query must be float32, bfloat16 or float16, got {dtype}")
    if not (key.dtype is dtype and value.dtype is dtype):
        raise ValueError(f"key and value must be {dtype}, got {key.dtype} and {value.dtype}")
    rows, query_heads, size = query.shape
    value_rows, heads, _ = value.shape
    if not (key.shape == (rows, heads, size) and value_rows == rows and query_heads % heads == 0):
        shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        raise ValueError(f"query, key, value must be [T, H, D], [T, K, D], [T, K, Dv] with K dividing H, got {shapes}")
    if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
        raise ValueError("the last dimension of query, key and value must be contiguous")


def check_pools(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor) -> None:
    stored, size, value_size = key.dtype, key.shape[2], value.shape[2]
    if key_pool.dtype is torch.int8:
        stored, size, value_size = torch.int8, row_bytes(size), row_bytes(value_size)
    if not (key_pool.dtype is stored and value_pool.dtype is stored):
        found = f"{key_pool.dtype} and {value_pool.dtype}"
        raise ValueError(f"the pools must be {key.dtype}, or torch.int8 both of them, got {found}")
    blocks = (key_pool.shape[0], key.shape[1], key_pool.shape[2])
    if not (key_pool.shape == (*blocks, size) and value_pool.shape == (*blocks, value_size)):
        raise ValueError(
            f"the pools must be [num_blocks, K, block_size, D] and [num_blocks, K, block_size, Dv] with rows of {size} "
            f"and {value_size} {stored}, got {list(key_pool.shape)} and {list(value_pool.shape)}"
        )
    if not key_pool.stride(3) == value_pool.stride(3) == 1:
        raise ValueError("the last dimension of the pools must be contiguous")


def check_metadata(
    cu_seqlens_q: Tensor, context_lens: Tensor, block_table: Tensor, slot_mapping: Tensor, *, rows: int
) -> None:
    requests = context_lens.numel()
    if not (
        cu_seqlens_q.dtype is context_lens.dtype is block_table.dtype is torch.int32
        and slot_mapping.dtype is torch.int64
        and cu_seqlens_q.is_contiguous()
        and context_lens.is_contiguous()
        and slot_mapping.is_contiguous()
        and (block_table.stride(1) == 1 or block_table.shape[1] < 2)
    ):
        raise ValueError("the metadata must be contiguous and int32, the slot mapping int64")
    if not (cu_seqlens_q.numel() == requests + 1 and block_table.shape[0] == requests and slot_mapping.numel() == rows):
        raise ValueError("cu_seqlens_q, context_lens, block_table and slot_mapping must have N + 1, N, N and T entries")
