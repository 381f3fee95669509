"""The custom operators: schemas, fakes, and the kernels that run them.

    selective::ragged_attention   write this step's keys and values into a paged KV pool, then attend
    selective::varlen_attention   the same without a pool: a request's context is its own rows
    selective::linear             torch.nn.functional.linear, by kernels of ours: on a CPU one that reads a weight
                                  where it lies, on a GPU one whose rows do not depend on their number
    selective::linears            the same for several weights and one x, in one call

`selective_compile.reference` says what they compute. Both are for inference: they have no derivative, and
refuse to run on tensors that require grad while gradients are recorded.

They are registered through `torch.library.Library` and not `torch.library.custom_op`, whose Python wrapper
costs several microseconds a call; a step of a 32-layer model makes 32 calls.

Shapes and dtypes (T rows, N requests, H query heads, K key/value heads, D and Dv key and value head sizes;
the last dimension of every tensor is contiguous):

    query         [T, H, D] float32, bfloat16 or float16
    key, value    [T, K, D], [T, K, Dv]; query head h reads key/value head h // (H // K)
    key_pool      [num_blocks, K, block_size, D], changed in place; value_pool likewise with Dv; query's dtype, or both
                  int8 with the rows of `selective_compile.int8_rows`, row_bytes(D) and row_bytes(Dv) long, but not for
                  Triton's kernels, or both float8_e4m3fn with a scale for each head (`selective_compile.fp8_rows`),
                  but not for the native CPU kernels, in whose place the reference runs. A row of this step is attended
                  to as it stands in the pool
    cu_seqlens_q  [N + 1] int32, rows of request n are cu_seqlens_q[n] : cu_seqlens_q[n + 1], possibly none
    context_lens  [N] int32, tokens of the request in the pool after this step's write
    block_table   [N, max_blocks] int32, block i of request n holds its tokens from i * block_size
    slot_mapping  [T] int64, block * block_size + offset of the row's key and value, or -1: write nothing
    scale         multiplies query . key; softcap > 0 then makes the score softcap * tanh(score / softcap)
    window        > 0: a row at position p sees the positions j with p - window < j <= p; 0: all j <= p
    chunk         > 0: of these, only the positions j with j // chunk == p // chunk; 0: all of them
    sinks         [H] of a floating dtype, or None: a logit per query head that takes part in the softmax as one
                  more key whose value is 0; neither scaled nor softcapped. [T, H]: one of each row's own, with no
                  selection only
    slopes        [H] float32, or None: slopes[h] * (j - p) is added to the score after scale and softcap (ALiBi)
    selection     [T, count] int32, or None: a row sees only these positions of its request, up to its own; each at
                  most once, and -1 behind them. With window 0 and chunk 0 only (`selective_compile.selection_ops`)
    key_scales    [K] float32, above 0, with pools of float8_e4m3fn, else None; value_scales likewise
    prefix        > 0: a row also sees the positions j < prefix that are behind it, as far as its request has them in
                  this step: j < context_lens[n]. With window 0, chunk 0 and no selection only
    distance_bias [T, H, R] of a floating dtype, or [1, H, R] for all rows, or None: what it has for a row and head at
                  min(p - j, R - 1) is added to the score after scale and softcap. With prefix 0 and no selection only
    result        [T, H, Dv], query's dtype; rows past cu_seqlens_q[N] are 0

and of linear: x [..., K], weight [N, K], bias [N] or None, result [..., N], all of x's dtype; linears takes lists of
weights and biases, and returns the list of their results.

Blocks wholly in front of the first position that a request's first row sees (by its window and chunk) are not read
either: they may have been freed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile import fp8_rows, implementations, reference
from selective_compile.attention_checks import (
    check_distance_bias,
    check_per_head,
    check_prefix,
    check_rows,
    check_scales,
    check_selection,
    require,
)
from selective_compile.implementations import Implementation
from selective_compile.int8_rows import row_bytes


@functools.cache
def _kernel(op: str, name: Implementation, batch_invariant: bool, device_type: str) -> Callable[..., Any]:
    resolved = implementations.resolved_name(name, device_type)
    linear = {"linear": _linear, "linears": _linears}.get(op)
    kernel = linear(name, resolved) if linear else getattr(_module(resolved), op)
    if batch_invariant and resolved == "triton" and op in ("ragged_attention", "rotary_attention"):
        return functools.partial(kernel, batch_invariant=True)
    return kernel


def attention_kernel(op: str, device_type: str) -> Callable[..., Tensor]:
    """What runs the attention `op` here and now on "cpu" or "cuda" tensors; raises as `implementation_on`."""
    return _kernel(op, *implementations.forced.get(), device_type)


def _linear(name: Implementation, resolved: str) -> Callable[..., Tensor]:
    if name == "reference":
        return reference.linear
    if resolved == "triton":
        from selective_compile.kernels import linear_triton

        return linear_triton.linear
    if resolved == "cpu":
        from selective_compile.kernels import linear_cpu

        if linear_cpu.available():
            return linear_cpu.linear
    return F.linear


def _linears(name: Implementation, resolved: str) -> Callable[..., list[Tensor]]:
    from selective_compile.kernels import linear_cpu

    one = _linear(name, resolved)
    return linear_cpu.linears if one is linear_cpu.linear else functools.partial(_each, one)


def _each(linear: Callable[..., Tensor], x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _module(resolved: str) -> ModuleType:
    # Imported when first wanted: a machine without a GPU may lack Triton, and one with it a C++ compiler.
    if resolved == "cpu":
        from selective_compile.kernels import ragged_attention_cpu

        return ragged_attention_cpu
    if resolved == "triton":
        from selective_compile.kernels import ragged_attention_triton

        return ragged_attention_triton
    return reference


def _run_ragged_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    if reference_stands_in(args[2]):
        return reference.ragged_attention(query, *args)
    return _kernel("ragged_attention", *implementations.forced.get(), query.device.type)(query, *args)


def reference_stands_in(pool: Tensor) -> bool:
    """Whether no kernel but an interpreted one reads such a pool on its device."""
    return pool.dtype is fp8_rows.DTYPE and pool.device.type == "cpu" and implementations.forced.get()[0] != "triton"


def _run_varlen_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    return _kernel("varlen_attention", *implementations.forced.get(), query.device.type)(query, *args)


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    refuse_gradients(x, weight, bias)
    return _kernel("linear", *implementations.forced.get(), x.device.type)(x, weight, bias)


def _run_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    refuse_gradients(x, *weights, *biases)
    return _kernel("linears", *implementations.forced.get(), x.device.type)(x, weights, biases)


def refuse_gradients(*args: Any) -> None:
    """Raise RuntimeError if a tensor among `args` requires grad while gradients are recorded."""
    # Autograd would differentiate through the reference but not through a kernel: a gradient must not depend
    # on which of them ran.
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise RuntimeError("the selective ops have no derivative: call them under torch.no_grad()")


def fake_ragged_attention(
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
) -> Tensor:
    check_rows(query, key, value)
    check_per_head(query, sinks, slopes)
    check_selection(query, selection, window, chunk, sinks)
    check_prefix(prefix, window, chunk, selection)
    check_distance_bias(query, distance_bias, prefix, selection)
    check_scales(key_pool, key_scales=key_scales, value_scales=value_scales)
    for name, pool, rows in (("key_pool", key_pool, key), ("value_pool", value_pool, value)):
        stored = key_pool.dtype if key_pool.dtype in (torch.int8, fp8_rows.DTYPE) else query.dtype
        size = row_bytes(rows.shape[2]) if stored == torch.int8 else rows.shape[2]
        fits = pool.dim() == 4 and pool.shape[1] == rows.shape[1] and pool.shape[3] == size
        require(fits, f"{name} must be [num_blocks, K, block_size, {size}], got {list(pool.shape)}")
        require(pool.dtype == stored, f"{name} must be {stored}, got {pool.dtype}")
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _fake_varlen_attention(
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
    check_rows(query, key, value)
    check_per_head(query, sinks, slopes)
    check_selection(query, selection, window, chunk, sinks)
    check_prefix(prefix, window, chunk, selection)
    check_distance_bias(query, distance_bias, prefix, selection)
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    require(weight.dim() == 2, f"weight must be [N, K], got {list(weight.shape)}")
    torch._check(x.shape[-1] == weight.shape[1])
    require(weight.dtype == x.dtype, f"weight must be {x.dtype}, got {weight.dtype}")
    if bias is not None:
        require(bias.dtype == x.dtype, f"bias must be {x.dtype}, got {bias.dtype}")
        torch._check(bias.shape[0] == weight.shape[0])
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    require(len(weights) == len(biases), f"biases must be {len(weights)}, got {len(biases)}")
    return [_fake_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


_library = torch.library.Library("selective", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define `selective::<schema>`, run by `run` on CPU and CUDA tensors and by `fake` when traced."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"selective::{name}", fake, lib=_library)
    return getattr(torch.ops.selective, name).default


ragged_attention = register(
    "ragged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, "
    "Tensor cu_seqlens_q, Tensor context_lens, Tensor block_table, Tensor slot_mapping, "
    "float scale, int window, float softcap, int chunk=0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? selection=None, Tensor? key_scales=None, Tensor? value_scales=None, int prefix=0, "
    "Tensor? distance_bias=None) -> Tensor",
    _run_ragged_attention,
    fake_ragged_attention,
)
varlen_attention = register(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
    "float scale, int window, float softcap, int chunk=0, Tensor? sinks=None, Tensor? slopes=None, "
    "Tensor? selection=None, int prefix=0, Tensor? distance_bias=None) -> Tensor",
    _run_varlen_attention,
    _fake_varlen_attention,
)
linear = register("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", _run_linear, _fake_linear)
linears = register("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]", _run_linears, _fake_linears)
