"""The operator that rotates queries and keys on their way into attention: schema, fake, and its implementations.

    selective::rotary_attention   norm each head of the queries and keys, if there is a norm, rotate them, and do with
                                  them and the values what `selective::ragged_attention` does

`selective_compile.reference` says what it computes. Of a head x, the norm is over its own elements alone:

    x / sqrt(mean(x ** 2) + eps) * (weight + weight_offset)

and of its elements those from `first` on, `rotated` many, are rotated in pairs, the others stay. With d counted from
`first`, the partner of d is d + rotated / 2 in the first half and d - rotated / 2 in the second, or if `interleaved`,
the next for an even d and the one in front for an odd d:

    x[d] * cos[d] - x[partner] * sin[d]     for the first of a pair
    x[d] * cos[d] + x[partner] * sin[d]     for the second

All of it is in float32, and what comes out is rounded once, to query's dtype: no step in between is rounded, as in the
code that Inductor makes of the same graph, where PyTorch's own operators round after each.

Shapes and dtypes (T rows, H query heads, K key/value heads, D and Dv head sizes), beside those of
`selective_compile.ops`, whose pools and other arguments follow in the same order:

    query, key, value         [T, H, D], [T, K, D], [T, K, Dv], as they are before norm and rotation
    cos, sin                  [T, rotated], or both [T, rotated / 2]: a number for each pair; of a floating dtype
    query_weight, key_weight  [D] of a floating dtype, or None: no weight
    eps                       None: no norm
    key_pool, value_pool      as of `selective::ragged_attention`, but not int8
    result                    [T, H, Dv]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selective_compile import fp8_rows, reference
from selective_compile.attention_checks import require
from selective_compile.implementations import implementation_on
from selective_compile.ops import attention_kernel, fake_ragged_attention, ragged_attention, refuse_gradients, register


def _kernel(device_type: str) -> Callable[..., Tensor]:
    if implementation_on(device_type) == "cpu":
        return _rotate_then_attend
    return attention_kernel("rotary_attention", device_type)


def _rotate_then_attend(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
    """On a CPU no kernel does both: there Inductor makes code for the rotation, and graphs have no such call."""
    query, key = reference.rotated_heads(query, key, *args[:9])
    return ragged_attention(query, key, value, *args[9:])


def _run_rotary_attention(query: Tensor, *args: Any) -> Tensor:
    refuse_gradients(query, *args)
    return _kernel(query.device.type)(query, *args)


def _fake_rotary_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    first: int,
    rotated: int,
    interleaved: bool,
    key_pool: Tensor,
    value_pool: Tensor,
    *args: Any,
) -> Tensor:
    size = query.shape[-1]
    fits = first >= 0 and rotated >= 2 and rotated % 2 == 0 and first + rotated <= size
    require(fits, f"first and rotated must be an even part of {size} elements, got {first} and {rotated}")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 2 and table.shape[1] in (rotated, rotated // 2) and table.is_floating_point()
        require(fits, f"{name} must be [T, {rotated}] or [T, {rotated // 2}] of a floating dtype")
        torch._check(table.shape[0] == query.shape[0])
    require(cos.shape[1] == sin.shape[1], f"sin must be [T, {cos.shape[1]}] as cos, got [T, {sin.shape[1]}]")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        fits = weight is None or (weight.shape == (size,) and weight.is_floating_point())
        require(fits, f"{name} must be [{size}] of a floating dtype")
    known = key_pool.dtype in (query.dtype, fp8_rows.DTYPE)
    require(known, f"key_pool must be {query.dtype} or {fp8_rows.DTYPE}, got {key_pool.dtype}")
    return fake_ragged_attention(query, key, value, key_pool, value_pool, *args)


rotary_attention = register(
    "rotary_attention(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? query_weight, "
    "Tensor? key_weight, float? eps, float weight_offset, int first, int rotated, bool interleaved, "
    "Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor cu_seqlens_q, Tensor context_lens, Tensor block_table, "
    "Tensor slot_mapping, float scale, int window, float softcap, int chunk=0, Tensor? sinks=None, "
    "Tensor? slopes=None, Tensor? selection=None, Tensor? key_scales=None, Tensor? value_scales=None, "
    "int prefix=0, Tensor? distance_bias=None) -> Tensor",
    _run_rotary_attention,
    _fake_rotary_attention,
)
