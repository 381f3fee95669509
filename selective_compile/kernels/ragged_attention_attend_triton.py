"""The launches that attend to what is written, of whichever op: attention itself, cut into pieces, and where keys are
split the merge behind it.  `ragged_attention_kernel_triton` has the kernel and the legend."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.ragged_attention_cut_triton import Cut
from selective_compile.kernels.ragged_attention_kernel_triton import attention_kernel
from selective_compile.kernels.ragged_attention_tiles import (
    WHOLE,
    SplitConfig,
    TileConfig,
    asynchronous_products,
    bulk_copies,
    most_keys,
    processors,
    split_config,
    tile_config,
    worth_late,
)
from selective_compile.kernels.registers import backend

Score = tuple[float, int, float, int, int]  # scale, window, softcap, chunk and prefix
PerHead = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # sinks, slopes, scales of keys, of values


def attend(
    query: Tensor,
    keys_and_values: tuple[Tensor, Tensor],
    metadata: tuple[Tensor, Tensor, Tensor],
    per_head: PerHead,
    strides: tuple[int, ...],
    kv_heads_and_block_size: tuple[int, ...],
    score: Score,
    distance_bias: Tensor | None = None,
    *,
    written: Callable[[], Tensor],
    whole: bool = False,
) -> Tensor:
    """Attend to what is written, and merge where keys are split. Returns [T, H, Dv].

    written: launches what writes the step's keys and values, and returns the query of that size, which it may have made
    anew. It comes behind the plan, which attention reads before what is in front of it is complete: where keys are
    split, there must be such a launch.
    keys_and_values: pools, or rows where the block size is 0; metadata: cu_seqlens_q, context_lens and block_table;
    strides: of block, head and slot of both; whole: every program takes all keys.
    """
    (kv_heads, block_size), (_, window, _, chunk, prefix) = kv_heads_and_block_size, score
    (num_rows, heads, key_size), value_size = query.shape, keys_and_values[1].shape[-1]
    num_requests, group = metadata[0].shape[0] - 1, heads // kv_heads
    assert all(tensor.stride(-1) == 1 for tensor in (query, *keys_and_values)), "rows must be contiguous"
    assert all(tensor is None or tensor.is_contiguous() for tensor in per_head), "heads must be contiguous"
    if prefix and (window or chunk):
        raise ValueError(f"window and chunk must be 0 with a prefix, got {window} and {chunk}")
    biases = None if distance_bias is None else distance_bias.contiguous()
    slopes, distances = per_head[1] is not None, biases is not None
    sizes = (num_requests, group, block_size)
    tile = _tile(query, keys_and_values, sizes, score, slopes=slopes, distances=distances)
    output = query.new_empty(num_rows, heads, value_size)
    if num_rows == 0:
        return output
    rows, parts = tile.block_m // tile.heads, heads // tile.heads
    splits = WHOLE if whole else _splits(query, tile, parts, window=window, chunk=chunk)
    cut = Cut.of(
        query,
        metadata[:2],
        splits,
        value_size=value_size,
        rows_and_keys=(rows, tile.block_n),
        window=window,
        chunk=chunk,
        prefix=prefix,
    )
    query = written()
    # The interpreter would multiply the bit patterns of bfloat16.
    widen, early = not query.is_cuda, begins_early(query.device)
    rows_follow = (strides[2], strides[5]) == (key_size, value_size)
    ahead = tile.ahead if tile.bulk and rows_follow and cut.split is not None else 0
    # fmt: off
    on_device(attention_kernel, query)[(cut.num_pieces * parts,)](
        output, *cut.given, query, *keys_and_values, *_descriptors(keys_and_values, tile), *metadata, *per_head, biases,
        num_rows, num_requests, cut.num_pieces, *query.stride()[:2], *strides, metadata[2].stride(0), *score,
        tile.heads, group // tile.heads, heads, key_size, value_size, block_size, tile.block_m, tile.block_n,
        tile.block_d, tile.block_dv, widen, cut.split is not None, tile.late, early, ahead, 32 * tile.num_warps,
        *by_row(biases, per_head[0]), enable_fp_fusion=True, **tile.options(backend()), **launch_options(early),
    )
    # fmt: on
    cut.merge(output, num_requests=num_requests)
    return output


def _tile(
    query: Tensor,
    keys_and_values: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    score: Score,
    *,
    slopes: bool,
    distances: bool,
) -> TileConfig:
    """Of a launch; sizes: N, heads of a key/value head, and the block size."""
    (keys, values), (num_requests, group, block_size) = keys_and_values, sizes
    _, window, softcap, chunk, prefix = score
    return tile_config(
        num_rows=query.shape[0],
        num_requests=num_requests,
        group=group,
        key_size=query.shape[2],
        value_size=values.shape[-1],
        bytes_per_element=query.element_size(),
        block_size=block_size,
        bulk=bulk_copies(query.device) and aligned(keys) and aligned(values),
        late=worth_late(window=window, chunk=chunk, prefix=prefix),
        slopes=slopes,
        distances=distances,
        narrow=keys.element_size() < query.element_size(),
        most=asynchronous_products(query.device) and softcap == 0 and chunk == 0,
        backend=backend(),
    )


def _splits(query: Tensor, tile: TileConfig, parts: int, *, window: int, chunk: int) -> SplitConfig:
    keys = most_keys(rows=tile.block_m // tile.heads, window=window, chunk=chunk, block_n=tile.block_n)
    return split_config(parts=parts, keys=keys, large=tile.large, processors=processors(query.device))


def by_row(biases: Tensor | None, sinks: Tensor | None) -> tuple[int, bool, bool]:
    """How many distances there are, whether all rows have the same biases, and whether rows have sinks of their own."""
    distances, one = (0, False) if biases is None else (biases.shape[2], biases.shape[0] == 1)
    return distances, one, sinks is not None and sinks.dim() == 2


def aligned(pool: Tensor) -> bool:
    """Whether a descriptor can tell where its rows [..., D] lie: all at multiples of 16 bytes, each in a place of its
    own."""
    strides = [stride * pool.itemsize for stride in pool.stride()[:-1]]
    return all(place % 16 == 0 for place in (pool.data_ptr(), *strides)) and 0 not in strides


def _descriptors(
    keys_and_values: tuple[Tensor, Tensor], tile: TileConfig
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Of bulk copies, made on the host: the launch hands them over by value, so that a captured graph holds them and
    nothing is allocated."""
    if not tile.bulk:
        return None, None
    keys, values = keys_and_values
    return described(keys, [1, 1, tile.block_n, tile.block_d]), described(values, [1, 1, tile.block_n, tile.block_dv])


def described(pool: Tensor, sizes: list[int]) -> TensorDescriptor:
    """The pool as tiles of those sizes."""
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), sizes)
