"""The definition of every op with a state, in plain eager PyTorch: a loop over requests and over their tokens.

The functions have the schemas of `selective_compile.state_ops`, whose docstring has the shapes. They compute in
float32, or in float64 when an argument is float64 (which the ops do not take): that is the exact result the kernel
tests compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """`selective::causal_conv1d`: the state is the last W - 1 inputs. Returns [T, C]."""
    (X, taps), output = _wide(x, weight), torch.zeros_like(x)
    shift = taps.new_zeros(len(weight)) if bias is None else bias.to(taps.dtype)

    def step(state: Tensor, t: int) -> Tensor:
        window = torch.cat([state, X[t, :, None]], 1)  # [C, W]
        summed = (window * taps).sum(1) + shift
        output[t] = F.silu(summed) if silu else summed
        return window[:, 1:]

    _recur(step, taps.new_zeros(len(weight), weight.shape[1] - 1), state_pool, cu_seqlens_q, context_lens, state_slots)
    return output


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *pool_and_requests: Any
) -> Tensor:
    """`selective::selective_scan` (Mamba-1): a state of n numbers per channel. Returns [T, I]."""
    X, dt, A, B, C = _wide(x, dt, A, B, C)
    output, skip = torch.zeros_like(x), X * (0 if D is None else D.to(X.dtype))
    # [T, n] for all channels, or [T, G, n]: one row for each of I // G of them.
    B, C = (_per_head(tensor if tensor.dim() == 3 else tensor[:, None], x.shape[1]) for tensor in (B, C))

    def step(state: Tensor, t: int) -> Tensor:
        state = torch.exp(dt[t, :, None] * A) * state + (dt[t] * X[t])[:, None] * B[t]
        output[t] = (state * C[t]).sum(1) + skip[t]
        return state

    _recur(step, torch.zeros_like(A), *pool_and_requests)
    return output


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *pool_and_requests: Any) -> Tensor:
    """`selective::ssd` (Mamba-2): a state [P, n] per head, one decay for all of it. Returns [T, H, P]."""
    X, dt, A, B, C = _wide(x, dt, A, B, C)
    output, skip = torch.zeros_like(x), X * (0 if D is None else D.to(X.dtype)[:, None])
    B, C = (_per_head(tensor, x.shape[1]) for tensor in (B, C))

    def step(state: Tensor, t: int) -> Tensor:
        decay = torch.exp(dt[t] * A)[:, None, None]
        state = decay * state + (dt[t, :, None] * X[t])[:, :, None] * B[t, :, None, :]
        output[t] = (state * C[t, :, None, :]).sum(2) + skip[t]
        return state

    _recur(step, X.new_zeros(*x.shape[1:], B.shape[2]), *pool_and_requests)
    return output


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    *pool_and_requests: Any,
) -> Tensor:
    """`selective::gated_delta_rule`: a state [D, Dv] per head that maps keys to values. Returns [T, H, Dv]."""
    Q, K, V, decay, beta = _wide(query, key, value, decay, beta)
    Q, K = (_per_head(tensor, value.shape[1]) for tensor in (Q, K))
    factor, output = (decay if decay.dim() == 3 else decay[..., None])[..., None].exp(), torch.zeros_like(value)

    def step(state: Tensor, t: int) -> Tensor:
        state = factor[t] * state
        remembered = (K[t, :, :, None] * state).sum(1)
        state = state + K[t, :, :, None] * (beta[t, :, None] * (V[t] - remembered))[:, None, :]
        output[t] = scale * (Q[t, :, :, None] * state).sum(1)
        return state

    _recur(step, V.new_zeros(value.shape[1], key.shape[2], value.shape[2]), *pool_and_requests)
    return output


def linear_recurrence(decay: Tensor, update: Tensor, *pool_and_requests: Any) -> Tensor:
    """`selective::linear_recurrence`: one number per channel. Returns [T, C]."""
    (factor, added), output = _wide(decay, update), torch.zeros_like(update)

    def step(state: Tensor, t: int) -> Tensor:
        state = factor[t] * state + added[t]
        output[t] = state
        return state

    _recur(step, added.new_zeros(update.shape[1]), *pool_and_requests)
    return output


def wkv(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *pool_and_requests: Any) -> Tensor:
    """`selective::wkv` (RWKV-4): two running sums over exp(largest exponent so far). Returns [T, C]."""
    (w, u, K, V), output = _wide(time_decay, time_first, key, value), torch.zeros_like(value)

    def step(state: Tensor, t: int) -> Tensor:
        numerator, denominator, largest = state.unbind(1)
        now = torch.maximum(largest, u + K[t])
        past, present = torch.exp(largest - now), torch.exp(u + K[t] - now)
        output[t] = (past * numerator + present * V[t]) / (past * denominator + present)
        new = torch.maximum(largest + w, K[t])
        past, present = torch.exp(largest + w - new), torch.exp(K[t] - new)
        return torch.stack([past * numerator + present * V[t], past * denominator + present, new], 1)

    _recur(step, K.new_tensor([0.0, 0.0, -1e38]).expand(key.shape[1], 3), *pool_and_requests)
    return output


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
    """`selective::mlstm` (xLSTM): a state [D, Dv] per head, and what it is divided by. Returns [T, H, Dv]."""
    Q, K, V, gate, decay = _wide(query, key, value, input_gate, decay)
    with_ones, output = F.pad(V, (0, 1), value=1.0), torch.zeros_like(value)

    def step(state: Tensor, t: int) -> Tensor:
        faded = decay[t] + state[:, -1, -1]
        largest = torch.maximum(faded, gate[t])
        kept, added = torch.exp(faded - largest), torch.exp(gate[t] - largest)
        update = K[t, :, :, None] * (added[:, None] * with_ones[t])[:, None, :]
        sums = kept[:, None, None] * state[:, :-1] + update
        answer = scale * (Q[t, :, :, None] * sums).sum(1)
        output[t] = answer[:, :-1] / (torch.maximum(answer[:, -1:].abs(), torch.exp(-largest)[:, None]) + eps)
        state = F.pad(sums, (0, 0, 0, 1))
        state[:, -1, -1] = largest
        return state

    _recur(step, V.new_zeros(value.shape[1], key.shape[2] + 1, value.shape[2] + 1), *pool_and_requests)
    return output


def _recur(
    step: Callable[[Tensor, int], Tensor],
    fresh: Tensor,
    state_pool: Tensor | None,
    cu_seqlens_q: Tensor,
    context_lens: Tensor | None,
    state_slots: Tensor | None,
) -> None:
    """Give each request's state and row t to `step`, which returns the state after it, and keep the last one."""
    for n, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if begin == end:
            continue
        state = fresh
        if state_pool is not None:
            assert context_lens is not None and state_slots is not None, "a pool comes with its requests"
            slot = int(state_slots[n])
            # A fresh request does not read its slot, which holds what its last owner left there.
            state = state_pool[slot].to(fresh.dtype) if context_lens[n] > end - begin else fresh
        for t in range(begin, end):
            state = step(state, t)
        if state_pool is not None:
            state_pool[slot] = state


def _wide(*tensors: Tensor) -> Iterable[Tensor]:
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return (tensor.to(dtype) for tensor in tensors)


def _per_head(tensor: Tensor, heads: int) -> Tensor:
    """[T, G, size] as [T, H, size]: head h has what group h // (H // G) has."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
