"""The ops with a state on CPUs: the launchers of the C++ kernels beside this file, built when first used.

Legend
    packed   the kernels' one argument: addresses, sizes and strides as 8-byte fields, in the order of `Call` in
             state_call.h
    inputs   the tensors with a row for each token, read where they lie; one whose vectors are not contiguous, or that
             is float64, is copied first
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=40q2d").pack
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_REFUSALS = {
    1: "cu_seqlens_q must start at 0, never fall, and end at or below the number of rows",
    2: "context_lens must be at least the request's rows",
    3: "state_slots must name slots of the pool",
}
_NO_ROWS = (0, 0, 0, 0)
Requests = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


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
    """`selective::causal_conv1d` (shapes here and below: `selective_compile.state_ops`). Returns [T, C].

    Raises, as do those below:
        ValueError: shapes or dtypes do not fit together, or the metadata point outside the tensors. The pool is
            unchanged then.
        NativeBuildError: the kernels cannot be built here.
    """
    channels, width = x.shape[1], weight.shape[1]
    _check(weight=(weight, (channels, width)), bias=(bias, (channels,)))
    requests = (state_pool, cu_seqlens_q, context_lens, state_slots)
    slot = (channels, width - 1)
    return _launch(0, x, (x,), (weight, bias), requests, slot, x.dtype, (channels, 1, width, 0, silu))


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *requests: Any) -> Tensor:
    """`selective::selective_scan`. Returns [T, I]."""
    (rows, channels), (_, size) = x.shape, A.shape
    B, C = (tensor[:, None] if tensor.dim() == 2 else tensor for tensor in (B, C))
    groups = B.shape[1]
    if C.shape[1] != groups:
        # Rows of one and of several groups: each is read by its own stride.
        groups = max(groups, C.shape[1])
        B, C = (tensor.expand(rows, groups, -1) if tensor.shape[1] == 1 else tensor for tensor in (B, C))
    shared = (rows, groups, size)
    _check(dt=(dt, (rows, channels)), A=(A, (channels, size)), B=(B, shared), C=(C, shared), D=(D, (channels,)))
    _check_groups(channels, groups)
    sizes = (channels, groups, size, 0, 0)
    return _launch(1, x, (x, dt, B, C), (A, D), requests, (channels, size), torch.float32, sizes)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *requests: Any) -> Tensor:
    """`selective::ssd`. Returns [T, H, P]."""
    (rows, heads, head_size), (_, groups, size) = x.shape, B.shape
    shared = (rows, groups, size)
    _check(dt=(dt, (rows, heads)), A=(A, (heads,)), B=(B, shared), C=(C, shared), D=(D, (heads,)))
    _check_groups(heads, groups)
    sizes = (heads, groups, size, head_size, 0)
    return _launch(2, x, (x, dt, B, C), (A, D), requests, (heads, head_size, size), torch.float32, sizes)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, scale: float, *requests: Any
) -> Tensor:
    """`selective::gated_delta_rule`. Returns [T, H, Dv]."""
    (rows, key_heads, key_size), (_, heads, value_size) = key.shape, value.shape
    per_channel = decay.dim() == 3
    decays = (rows, heads, key_size) if per_channel else (rows, heads)
    _check(
        query=(query, key.shape),
        value=(value, (rows, heads, value_size)),
        decay=(decay, decays),
        beta=(beta, (rows, heads)),
    )
    _check_groups(heads, key_heads)
    slot, sizes = (heads, key_size, value_size), (heads, key_heads, key_size, value_size, per_channel)
    inputs = (query, key, value, decay, beta)
    return _launch(3, value, inputs, (None, None), requests, slot, torch.float32, sizes, scale)


def linear_recurrence(decay: Tensor, update: Tensor, *requests: Any) -> Tensor:
    """`selective::linear_recurrence`. Returns [T, C]."""
    _, channels = update.shape
    _check(decay=(decay, update.shape))
    sizes = (channels, 1, 1, 0, 0)
    return _launch(4, update, (decay, update), (None, None), requests, (channels,), torch.float32, sizes)


def wkv(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *requests: Any) -> Tensor:
    """`selective::wkv`. Returns [T, C]."""
    _, channels = value.shape
    _check(key=(key, value.shape), time_decay=(time_decay, (channels,)), time_first=(time_first, (channels,)))
    parameters, sizes = (time_decay, time_first), (channels, 1, 3, 0, 0)
    return _launch(5, value, (key, value), parameters, requests, (channels, 3), torch.float32, sizes)


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    decay: Tensor,
    scale: float,
    eps: float,
    *requests: Any,
) -> Tensor:
    """`selective::mlstm`. Returns [T, H, Dv]."""
    (rows, heads, key_size), value_size = key.shape, value.shape[2]
    gates = (rows, heads)
    _check(
        query=(query, key.shape),
        value=(value, (rows, heads, value_size)),
        input_gate=(input_gate, gates),
        decay=(decay, gates),
    )
    slot, sizes = (heads, key_size + 1, value_size + 1), (heads, heads, key_size, value_size, 0)
    inputs = (query, key, value, input_gate, decay)
    return _launch(6, value, inputs, (None, None), requests, slot, torch.float32, sizes, scale, eps)


def _launch(
    op: int,
    like: Tensor,
    inputs: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, Tensor | None],
    requests: Requests,
    slot: tuple[int, ...],
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int],
    scale: float = 0.0,
    extra: float = 0.0,
) -> Tensor:
    """Run the kernel `op`; its result is like `like`, its pool has slots of this shape and dtype."""
    if like.dtype not in _DTYPES:
        raise ValueError(f"the rows must be float32, bfloat16 or float16, got {like.dtype}")
    pool, bounds, lengths, slots = _metadata(requests, slot, dtype)
    output = torch.empty_like(like, memory_format=torch.contiguous_format)
    # Kept under names through the call: where a copy is made, nothing else holds it.
    rows = [_readable(tensor) for tensor in inputs]
    floats = [None if tensor is None else tensor.to(torch.float32).contiguous() for tensor in parameters]
    # One line per line of `Call`.
    packed = _pack(
        *(field for tensor in rows for field in _fields(tensor)),
        *(_NO_ROWS * (5 - len(rows))),
        *(_address(tensor) for tensor in floats),
        *(output.data_ptr(), _address(pool)),
        *(_DTYPES[output.dtype], 0 if pool is None else pool.stride(0) * pool.element_size()),
        *(0 if pool is None else pool.shape[0], bounds.data_ptr(), _address(lengths)),
        *(_address(slots), native.torch_parallel()),
        *(torch.get_num_threads(), op, output.shape[0], bounds.shape[0] - 1),
        *sizes,
        *(scale, extra),
    )
    status = _functions["selective_state"](packed)
    if status:
        raise ValueError(_REFUSALS[status])
    return output


def _readable(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        tensor = tensor.to(torch.float32)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _fields(tensor: Tensor) -> tuple[int, int, int, int]:
    strides = tensor.stride()
    return tensor.data_ptr(), _DTYPES[tensor.dtype], strides[0], strides[1] if len(strides) == 3 else 0


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(**tensors: tuple[Tensor | None, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _check_groups(heads: int, groups: int) -> None:
    if heads % groups:
        raise ValueError(f"the groups must divide {heads}, got {groups}")


def _metadata(requests: Requests, slot: tuple[int, ...], dtype: torch.dtype) -> Requests:
    """What is given, checked; without a pool the rest of it is not looked at."""
    pool, bounds, lengths, slots = requests
    if not (bounds.dtype is torch.int32 and bounds.dim() == 1 and bounds.is_contiguous()):
        raise ValueError(f"cu_seqlens_q must be contiguous [N + 1] int32, got {list(bounds.shape)} {bounds.dtype}")
    if pool is None:
        return None, bounds, None, None
    if not (pool.shape[1:] == slot and pool.dtype is dtype):
        raise ValueError(f"state_pool must be [num_slots, *{list(slot)}] {dtype}, got {list(pool.shape)} {pool.dtype}")
    if not (pool.is_contiguous() or pool[:1].is_contiguous()):
        raise ValueError("a slot of state_pool must be contiguous")
    if lengths is None or slots is None:
        raise ValueError("context_lens and state_slots must be given with a state_pool, got None")
    if not (lengths.dtype is torch.int32 and slots.dtype is torch.int64):
        raise ValueError(f"context_lens must be int32, state_slots int64, got {lengths.dtype} and {slots.dtype}")
    if not (
        lengths.shape == slots.shape == (bounds.shape[0] - 1,) and lengths.is_contiguous() and slots.is_contiguous()
    ):
        raise ValueError("context_lens and state_slots must be contiguous and have N entries")
    return requests
