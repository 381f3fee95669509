"""Part of pass 1: layers of ``torch.nn`` that PyTorch runs as one operator are traced as what that operator computes.

Before::  out = aten._transformer_encoder_layer_fwd(x, embed_dim, num_heads, qkv_weight, ..., mask, mask_type)
After::   layer_norm, linear, scaled_dot_product_attention, linear, add, ... as the layer's slow path has them

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` take such a fast path in evaluation without gradients.
Both hide where a mask is not 0, also of a mask of numbers that the slow path adds (`masked_softmax` in PyTorch's
``aten/src/ATen/native/transformers``): what is computed here is what the operator computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OF_QUERIES, OF_KEYS = 0, 1  # a mask's kind: one for all requests [S, S], or the hidden keys of each [B, S]


def shown(mask: Tensor | None, kind: int | None) -> Tensor | None:
    """Where a query may look, as ``scaled_dot_product_attention`` has it: to be broadcast to ``[B, H, S, S]``."""
    if mask is None:
        return None
    visible = mask == 0
    return visible[:, None, None, :] if kind == OF_KEYS else visible


def split_heads(x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, heads: int) -> list[Tensor]:
    """Queries, keys and values, ``[B, H, S, D]`` each, of ``x`` ``[B, S, H * D]``."""
    parts = F.linear(x, qkv_weight, qkv_bias).chunk(3, dim=-1)
    return [part.unflatten(-1, (heads, part.shape[-1] // heads)).transpose(1, 2) for part in parts]


def multi_head_attention(
    query: Tensor,  # [B, S, E]
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,  # [3 * E, E]
    qkv_bias: Tensor,
    proj_weight: Tensor,  # [E, E]
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    if query is not key or key is not value or query.is_nested:
        return NotImplemented
    q, k, v = split_heads(query, qkv_weight, qkv_bias, num_head)
    visible = shown(mask, mask_type)
    if not need_weights:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), query.new_empty(0)
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)
    weights = torch.softmax(scores if visible is None else scores.masked_fill(~visible, -math.inf), dim=-1)
    out = F.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return out, weights.mean(1) if average_attn_weights else weights


def transformer_encoder_layer(
    src: Tensor,  # [B, S, E]
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    if src.is_nested:
        return NotImplemented

    def attended(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def fed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        # The product that has the activation within, on CUDA, has its approximation.
        gelu = F.gelu(inner, approximate="tanh" if x.is_cuda else "none") if use_gelu else F.relu(inner)
        return F.linear(gelu, ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    if norm_first:
        src = src + attended(norm(src, *first))
        return src + fed_forward(norm(src, *second))
    src = norm(src + attended(src), *first)
    return norm(src + fed_forward(src), *second)
