"""The custom operators with a state per request: schemas, fakes, and their implementations.

    selective::causal_conv1d       short depthwise convolutions, as in front of every recurrence below
    selective::selective_scan      Mamba-1
    selective::ssd                 Mamba-2; decayed linear attention
    selective::gated_delta_rule    Qwen3-Next, Kimi delta attention; DeltaNet with a decay of 0
    selective::linear_recurrence   RG-LRU's core (Griffin), or any other diagonal one
    selective::wkv                 RWKV-4

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
    Linear attention with a fixed decay per head (Lightning Attention: MiniMax, Bailing) is this op with x the value,
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
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile import state_reference
from selective_compile.ops import implementation_on, refuse_gradients, register, require


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


def _fake_causal_conv1d(
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


def _fake_selective_scan(
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


def _fake_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *pool_and_requests: Any
) -> Tensor:
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


def _fake_gated_delta_rule(
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


def _fake_linear_recurrence(decay: Tensor, update: Tensor, *pool_and_requests: Any) -> Tensor:
    _check_first("update", update, "T, C")
    _check_rows("decay", decay, update, "C", update.shape[1])
    _check_requests(pool_and_requests, (update.shape[1],), "C")
    return update.new_empty(update.shape)


def _fake_wkv(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *pool_and_requests: Any) -> Tensor:
    _check_first("value", value, "T, C")
    channels = value.shape[1]
    _check_rows("key", key, value, "C", channels)
    require(key.dtype == value.dtype, f"key must be {value.dtype}, got {key.dtype}")
    for name, parameter in (("time_decay", time_decay), ("time_first", time_first)):
        _check_parameter(name, parameter, "C", channels)
    _check_requests(pool_and_requests, (channels, 3), "C, 3")
    return value.new_empty(value.shape)


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
    "causal_conv1d", "Tensor x, Tensor weight, Tensor? bias", _fake_causal_conv1d, ", bool silu"
)
selective_scan, varlen_selective_scan = _define(
    "selective_scan", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D", _fake_selective_scan
)
ssd, varlen_ssd = _define("ssd", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D", _fake_ssd)
gated_delta_rule, varlen_gated_delta_rule = _define(
    "gated_delta_rule",
    "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, float scale",
    _fake_gated_delta_rule,
)
linear_recurrence, varlen_linear_recurrence = _define(
    "linear_recurrence", "Tensor decay, Tensor update", _fake_linear_recurrence
)
wkv, varlen_wkv = _define("wkv", "Tensor time_decay, Tensor time_first, Tensor key, Tensor value", _fake_wkv)
