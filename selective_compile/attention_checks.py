"""What the tensors of an attention operator must be, told before a kernel reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from selective_compile import fp8_rows


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require(tensor.dim() == 3, f"{name} must be [T, heads, size], got {list(tensor.shape)}")
        require(tensor.dtype == query.dtype, f"{name} must be {query.dtype}, got {tensor.dtype}")
        torch._check(tensor.shape[0] == query.shape[0])
    heads, kv_heads = query.shape[1], key.shape[1]
    require(query.shape[2] == key.shape[2], f"key must have head size {query.shape[2]}, got {key.shape[2]}")
    require(kv_heads == value.shape[1], f"value must have {kv_heads} heads, got {value.shape[1]}")
    require(heads % kv_heads == 0, f"query must have a multiple of {kv_heads} heads, got {heads}")


def check_per_head(query: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> None:
    heads = query.shape[1]
    if slopes is not None:
        require(slopes.shape == (heads,), f"slopes must be [{heads}], got {list(slopes.shape)}")
    if sinks is not None:
        fits = sinks.dim() in (1, 2) and sinks.shape[-1] == heads
        require(fits, f"sinks must be [{heads}] or [T, {heads}], got {list(sinks.shape)}")
        if sinks.dim() == 2:
            torch._check(sinks.shape[0] == query.shape[0])
        require(sinks.is_floating_point(), f"sinks must be of a floating dtype, got {sinks.dtype}")
    if slopes is not None:
        require(slopes.dtype == torch.float32, f"slopes must be torch.float32, got {slopes.dtype}")


def check_scales(key_pool: Tensor, **given: Tensor | None) -> None:
    for name, scales in given.items():
        if key_pool.dtype != fp8_rows.DTYPE:
            require(scales is None, f"{name} must be None with pools of {key_pool.dtype}")
        elif scales is None or scales.shape != (key_pool.shape[1],) or scales.dtype != torch.float32:
            found = None if scales is None else f"{list(scales.shape)} {scales.dtype}"
            raise ValueError(f"{name} must be [{key_pool.shape[1]}] torch.float32, got {found}")


def check_selection(
    query: Tensor, selection: Tensor | None, window: int, chunk: int, sinks: Tensor | None = None
) -> None:
    if selection is None:
        return
    fits = selection.dim() == 2 and selection.dtype == torch.int32
    require(fits, f"selection must be [T, count] torch.int32, got {list(selection.shape)} {selection.dtype}")
    torch._check(selection.shape[0] == query.shape[0])
    require(not window and not chunk, f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    require(sinks is None or sinks.dim() == 1, "sinks must be the same for all rows with a selection")


def check_prefix(prefix: int, window: int, chunk: int, selection: Tensor | None) -> None:
    """No kernel has the keys of a prefix beside those of a window or a chunk, or of a selection."""
    if not prefix:
        return
    require(prefix > 0, f"prefix must be at least 0, got {prefix}")
    require(selection is None, f"selection must be None with a prefix, got one beside a prefix of {prefix}")
    require(not window and not chunk, f"window and chunk must be 0 with a prefix, got {window} and {chunk}")


def check_distance_bias(query: Tensor, bias: Tensor | None, prefix: int, selection: Tensor | None) -> None:
    """Of keys of a prefix that are behind a row no distance is told, and no kernel has a bias beside a selection."""
    if bias is None:
        return
    heads = query.shape[1]
    fits = bias.dim() == 3 and bias.shape[1] == heads and bias.shape[2] > 0 and bias.is_floating_point()
    found = f"{list(bias.shape)} {bias.dtype}"
    require(fits, f"distance_bias must be [T, {heads}, R] or [1, {heads}, R] of a floating dtype, got {found}")
    if not (isinstance(bias.shape[0], int) and bias.shape[0] == 1):
        torch._check(bias.shape[0] == query.shape[0])
    require(not prefix, f"prefix must be 0 with a distance_bias, got {prefix}")
    require(selection is None, "selection must be None with a distance_bias")
