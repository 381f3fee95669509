"""What the ops with a state give for tensors without values: shapes and dtypes checked, and the result's.

One function for each op of `selective_compile.state_ops`, whose docstring has the shapes; None for the pool and what
goes with it stands for the op's varlen variant. All raise ValueError for what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selective_compile.attention_checks import require


def _check_requests(
    pool_and_requests: tuple[Any, ...], state: tuple[int, ...], legend: str, dtype: torch.dtype = torch.float32
) -> None:
    """The last four tensors: metadata, and a pool of slots of the shape `state`, which `legend` spells out."""
    pool, cu_seqlens_q, context_lens, state_slots = pool_and_requests
    _check_metadata("cu_seqlens_q", cu_seqlens_q, torch.int32)
    if pool is None:
        return
    fits = pool.dim() == 1 + len(state) and tuple(pool.shape[1:]) == state
    require(fits, f"state_pool must be [num_slots, {legend}] with {list(state)}, got {list(pool.shape)}")
    require(pool.dtype == dtype, f"state_pool must be {dtype}, got {pool.dtype}")
    for name, tensor, wanted in (
        ("context_lens", context_lens, torch.int32),
        ("state_slots", state_slots, torch.int64),
    ):
        _check_metadata(name, tensor, wanted)


def _check_metadata(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    fits = tensor.dim() == 1 and tensor.dtype == dtype
    require(fits, f"{name} must be 1-dimensional {dtype}, got {list(tensor.shape)} {tensor.dtype}")


def _check_rows(name: str, tensor: Tensor, like: Tensor, legend: str, *sizes: int) -> None:
    """A row [*sizes] for each row of `like`."""
    fits = tensor.dim() == 1 + len(sizes) and tuple(tensor.shape[1:]) == sizes
    require(fits, f"{name} must be [T, {legend}] with {list(sizes)}, got {list(tensor.shape)}")
    torch._check(tensor.shape[0] == like.shape[0])
    _check_floating(name, tensor)


def _check_parameter(name: str, tensor: Tensor | None, legend: str, *sizes: int) -> None:
    if tensor is not None:
        fits = tuple(tensor.shape) == sizes
        require(fits, f"{name} must be [{legend}] with {list(sizes)}, got {list(tensor.shape)}")
        _check_floating(name, tensor)


def _check_first(name: str, tensor: Tensor, legend: str) -> None:
    """The tensor whose sizes the others are held to."""
    dimensions = legend.count(",") + 1
    require(tensor.dim() == dimensions, f"{name} must be [{legend}], got {list(tensor.shape)}")
    _check_floating(name, tensor)


def _check_floating(name: str, tensor: Tensor) -> None:
    require(tensor.is_floating_point(), f"{name} must be of a floating dtype, got {tensor.dtype}")


def _check_groups(name: str, tensor: Tensor, heads: int, size: int, legend: str) -> None:
    """B or C: [T, G, size] with G dividing the heads."""
    fits = tensor.dim() == 3 and tensor.shape[2] == size and heads % tensor.shape[1] == 0
    require(fits, f"{name} must be {legend} with G dividing {heads} and n = {size}, got {list(tensor.shape)}")
    _check_floating(name, tensor)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state_pool: Tensor | None,
    cu_seqlens_q: Tensor,
    context_lens: Tensor | None,
    state_slots: Tensor | None,
    silu: bool,
) -> Tensor:
    _check_first("x", x, "T, C")
    _check_first("weight", weight, "C, W")
    channels, width = x.shape[1], weight.shape[1]
    _check_parameter("weight", weight, "C, W", channels, width)
    _check_parameter("bias", bias, "C", channels)
    pool_and_requests = (state_pool, cu_seqlens_q, context_lens, state_slots)
    _check_requests(pool_and_requests, (channels, width - 1), "C, W - 1", x.dtype)
    return x.new_empty(x.shape)


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *pool_and_requests: Any
) -> Tensor:
    _check_first("x", x, "T, I")
    _check_first("A", A, "I, n")
    channels, size = x.shape[1], A.shape[1]
    _check_rows("dt", dt, x, "I", channels)
    _check_parameter("A", A, "I, n", channels, size)
    for name, tensor in (("B", B), ("C", C)):
        grouped = tensor[:, None] if tensor.dim() == 2 else tensor
        _check_groups(name, grouped, channels, size, "[T, n] or [T, G, n]")
        torch._check(tensor.shape[0] == x.shape[0])
    _check_parameter("D", D, "I", channels)
    _check_requests(pool_and_requests, (channels, size), "I, n")
    return x.new_empty(x.shape)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *pool_and_requests: Any) -> Tensor:
    _check_first("x", x, "T, H, P")
    heads, size = x.shape[1:]
    _check_rows("dt", dt, x, "H", heads)
    _check_first("B", B, "T, G, n")
    for name, tensor in (("B", B), ("C", C)):
        _check_groups(name, tensor, heads, B.shape[2], "[T, G, n]")
        torch._check(tensor.shape[0] == x.shape[0])
    for name, parameter in (("A", A), ("D", D)):
        _check_parameter(name, parameter, "H", heads)
    _check_requests(pool_and_requests, (heads, size, B.shape[2]), "H, P, n")
    return x.new_empty(x.shape)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, scale: float, *pool_and_requests: Any
) -> Tensor:
    for name, tensor, legend in (("query", query, "T, Hk, D"), ("key", key, "T, Hk, D"), ("value", value, "T, H, Dv")):
        _check_first(name, tensor, legend)
        require(tensor.dtype == value.dtype, f"{name} must be {value.dtype}, got {tensor.dtype}")
    (key_heads, key_size), (heads, value_size) = key.shape[1:], value.shape[1:]
    _check_rows("query", query, value, "Hk, D", key_heads, key_size)
    _check_rows("key", key, value, "Hk, D", key_heads, key_size)
    require(heads % key_heads == 0, f"value must have a multiple of {key_heads} heads, got {heads}")
    if decay.dim() == 3:
        _check_rows("decay", decay, value, "H, D", heads, key_size)
    else:
        _check_rows("decay", decay, value, "H", heads)
    _check_rows("beta", beta, value, "H", heads)
    _check_requests(pool_and_requests, (heads, key_size, value_size), "H, D, Dv")
    return value.new_empty(value.shape)


def linear_recurrence(decay: Tensor, update: Tensor, *pool_and_requests: Any) -> Tensor:
    _check_first("update", update, "T, C")
    _check_rows("decay", decay, update, "C", update.shape[1])
    _check_requests(pool_and_requests, (update.shape[1],), "C")
    return update.new_empty(update.shape)


def wkv(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *pool_and_requests: Any) -> Tensor:
    _check_first("value", value, "T, C")
    channels = value.shape[1]
    _check_rows("key", key, value, "C", channels)
    require(key.dtype == value.dtype, f"key must be {value.dtype}, got {key.dtype}")
    for name, parameter in (("time_decay", time_decay), ("time_first", time_first)):
        _check_parameter(name, parameter, "C", channels)
    _check_requests(pool_and_requests, (channels, 3), "C, 3")
    return value.new_empty(value.shape)


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    decay: Tensor,
    scale: float,
    eps: float,
    *pool_and_requests: Any,
) -> Tensor:
    _check_first("key", key, "T, H, D")
    _check_first("value", value, "T, H, Dv")
    (heads, key_size), value_size = key.shape[1:], value.shape[2]
    _check_rows("query", query, value, "H, D", heads, key_size)
    _check_rows("value", value, key, "H, Dv", heads, value_size)
    for name, tensor in (("query", query), ("key", key)):
        require(tensor.dtype == value.dtype, f"{name} must be {value.dtype}, got {tensor.dtype}")
    _check_rows("input_gate", input_gate, value, "H", heads)
    _check_rows("decay", decay, value, "H", heads)
    _check_requests(pool_and_requests, (heads, key_size + 1, value_size + 1), "H, D + 1, Dv + 1")
    return value.new_empty(value.shape)
