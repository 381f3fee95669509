"""The custom operators with a state per request: schemas, fakes, and their implementations.

    selective::causal_conv1d       short depthwise convolutions, as in front of every recurrence below
    selective::selective_scan      Mamba-1
    selective::ssd                 Mamba-2; decayed linear attention
    selective::gated_delta_rule    Qwen3-Next, Kimi delta attention; DeltaNet with a decay of 0
    selective::linear_recurrence   RG-LRU's core (Griffin), or any other diagonal one
    selective::wkv                 RWKV-4
    selective::mlstm               xLSTM

`selective_compile.state_reference` says what they compute. Like the others they have no derivative and refuse to run
on tensors that require grad while gradients are recorded. Each is there a second time, as selective::varlen_<name>
without state_pool, context_lens and state_slots: every request is fresh, and nothing is kept.

What they share (T rows, N requests):

    cu_seqlens_q  [N + 1] int32, rows of request n are cu_seqlens_q[n] : cu_seqlens_q[n + 1], possibly none
    context_lens  [N] int32, tokens of the request after this step. Where they are its rows of this step, it is fresh:
                  it starts from the zero state, and its slot is not read. Else it continues from its slot
    state_slots   [N] int64, the row of the pool that is the request's own; not looked at for one without rows
    state_pool    [num_slots, ...], changed in place: what is left in a request's slot is the state after its last row.
                  A request without rows leaves it alone. float32, but for causal_conv1d
    result        rows past cu_seqlens_q[N] are 0

All compute in float32. Tensors may be of different floating dtypes where nothing else is said. Their last dimension,
and a pool within a slot, should be contiguous: what is not is copied, or refused where it is written.

causal_conv1d: out[t] = sum over w of weight[:, w] * x[t - (W - 1) + w], plus bias; then SiLU if `silu`
    x             [T, C]; rows before the request's first are 0
    weight, bias  [C, W], [C] or None
    state_pool    [num_slots, C, W - 1] of x's dtype: the last W - 1 rows of x, oldest first
    result        [T, C], x's dtype

selective_scan: h = exp(dt * A) * h + dt * B * x; out = sum over n of C * h, plus D * x
    x, dt         [T, I]; dt as it is used, biased and through softplus
    A, D          [I, n], [I] or None
    B, C          [T, n], or [T, G, n]: channel i reads group i // (I // G) (Zamba)
    state_pool    [num_slots, I, n]
    result        [T, I], x's dtype

ssd: h = exp(dt * A) * h + dt * x (outer) B; out = h . C + D * x
    x, dt         [T, H, P], [T, H]; dt as it is used
    A, D          [H], [H] or None
    B, C          [T, G, n]; head h reads group h // (H // G)
    state_pool    [num_slots, H, P, n]
    result        [T, H, P], x's dtype
    Linear attention with a fixed decay per head (Lightning Attention: MiniMax) is this op with x the value,
    dt 1, A the logarithm of the decay, B the key and C the scaled query.

gated_delta_rule: S = exp(decay) * S; S = S + k (outer) beta * (v - k . S); out = scale * q . S
    query, key    [T, Hk, D], one dtype with value; value head h reads query and key head h // (H // Hk)
    value         [T, H, Dv]
    decay         [T, H], or [T, H, D] with one decay for each channel of the key; logarithms
    beta          [T, H]
    state_pool    [num_slots, H, D, Dv]
    result        [T, H, Dv], value's dtype

linear_recurrence: h = decay * h + update; out = h
    decay, update [T, C]; the decay itself, not its logarithm
    state_pool    [num_slots, C]
    result        [T, C], update's dtype

wkv: out = (p + exp(u + k) * v) / (q + exp(u + k)); p = exp(w) * p + exp(k) * v; q = exp(w) * q + exp(k)
    time_decay    w [C], negative: what transformers' -exp(time_decay) gives
    time_first    u [C]
    key, value    [T, C], one dtype
    state_pool    [num_slots, C, 3]: p and q, both divided by exp(m), and m, the largest exponent in them. A fresh
                  request has 0, 0 and -1e38
    result        [T, C], value's dtype

mlstm: S = f * S + i * k (outer) v; n = f * n + i * k; out = scale * q . S / (max(|scale * q . n|, exp(-m)) + eps), with
f = exp(decay + m_before - m), i = exp(input_gate - m) and m = max(decay + m_before, input_gate)
    query, key    [T, H, D], one dtype with value
    value         [T, H, Dv]
    input_gate    [T, H]; before its exponential
    decay         [T, H]; logarithms: the log-sigmoid of the forget gate
    state_pool    [num_slots, H, D + 1, Dv + 1]: S with n as its last column, and m in the corner of a last row of zeros
    result        [T, H, Dv], value's dtype
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile import state_fakes, state_reference
from selective_compile.implementations import implementation_on
from selective_compile.ops import refuse_gradients, register


def _runner(op: str) -> Callable[..., Tensor]:
    def run(first: Tensor, *args: Any) -> Tensor:
        refuse_gradients(first, *args)
        return _kernel(op, implementation_on(first.device.type))(first, *args)

    return run


@functools.cache
def _kernel(op: str, implementation: str) -> Callable[..., Tensor]:
    # Imported when first wanted: a machine without a GPU may lack Triton, and one with it a C++ compiler.
    if implementation == "cpu":
        from selective_compile.kernels import state_cpu

        if state_cpu.available():
            return getattr(state_cpu, op)
    if implementation == "triton":
        return getattr(importlib.import_module(f"selective_compile.kernels.{op}_triton"), op)
    return getattr(state_reference, op)


def _without_pool(function: Callable[..., Tensor], at: int) -> Callable[..., Tensor]:
    """The function without its argument `at`, the pool, nor those that go with it: it is given None for them."""

    def varlen(*args: Any) -> Tensor:
        return function(*args[:at], None, args[at], None, None, *args[at + 1 :])

    return varlen


def _define(
    op: str, arguments: str, fake: Callable[..., Tensor], options: str = ""
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """The op and its varlen variant: `arguments`, the pool and the requests, `options`."""
    # Two ops, for Inductor of torch 2.13 cannot take None for an optional tensor that is written.
    run, at = _runner(op), arguments.count(",") + 1
    pool = "Tensor(a!) state_pool, Tensor cu_seqlens_q, Tensor context_lens, Tensor state_slots"
    return (
        register(f"{op}({arguments}, {pool}{options}) -> Tensor", run, fake),
        register(
            f"varlen_{op}({arguments}, Tensor cu_seqlens_q{options}) -> Tensor",
            _without_pool(run, at),
            _without_pool(fake, at),
        ),
    )


causal_conv1d, varlen_causal_conv1d = _define(
    "causal_conv1d", "Tensor x, Tensor weight, Tensor? bias", state_fakes.causal_conv1d, ", bool silu"
)
selective_scan, varlen_selective_scan = _define(
    "selective_scan", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D", state_fakes.selective_scan
)
ssd, varlen_ssd = _define("ssd", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D", state_fakes.ssd)
gated_delta_rule, varlen_gated_delta_rule = _define(
    "gated_delta_rule",
    "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, float scale",
    state_fakes.gated_delta_rule,
)
linear_recurrence, varlen_linear_recurrence = _define(
    "linear_recurrence", "Tensor decay, Tensor update", state_fakes.linear_recurrence
)
wkv, varlen_wkv = _define("wkv", "Tensor time_decay, Tensor time_first, Tensor key, Tensor value", state_fakes.wkv)
mlstm, varlen_mlstm = _define(
    "mlstm",
    "Tensor query, Tensor key, Tensor value, Tensor input_gate, Tensor decay, float scale, float eps",
    state_fakes.mlstm,
)
