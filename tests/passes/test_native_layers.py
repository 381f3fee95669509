"""Part of pass 1: PyTorch's own layers of one operator are traced as what that operator computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from selective_compile.passes.spellings import SPELT_OUT

B, S, E, H = 2, 5, 12, 2
LAYER, ATTENTION = torch.ops.aten._transformer_encoder_layer_fwd, torch.ops.aten._native_multi_head_attention
CAUSAL = torch.full((S, S), -math.inf).triu(1)
HIDDEN_KEYS = torch.arange(S) > torch.tensor([[4], [2]])
MASKS: dict[str, tuple[Tensor | None, int | None]] = {
    "none": (None, None),
    "minus infinity": (CAUSAL, 0),
    "yes and no": (CAUSAL < 0, 0),
    "numbers": (-torch.arange(S).float().expand(S, S), 0),
    "of keys": (HIDDEN_KEYS, 1),
    "of heads": ((CAUSAL < 0) | HIDDEN_KEYS[:, None, None, :].expand(B, H, S, S), 2),
}


def written_out(function: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.no_grad():
        module = make_fx(function, SPELT_OUT, tracing_mode="real", pre_dispatch=True)(*tensors)
    targets = {getattr(node.target, "overloadpacket", None) for node in module.graph.nodes}
    assert not targets & {LAYER, ATTENTION}
    return module(*tensors)


def fast_path(layer: nn.TransformerEncoderLayer, x: Tensor, mask: Tensor | None, kind: int | None) -> Any:
    mix = layer.self_attn
    return LAYER(
        x, mix.embed_dim, mix.num_heads, mix.in_proj_weight, mix.in_proj_bias, mix.out_proj.weight, mix.out_proj.bias,
        layer.activation_relu_or_gelu == 2, layer.norm_first, layer.norm1.eps,
        layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias,
        layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias, mask, kind,
    )  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm_first", (True, False))
@torch.no_grad()
def test_a_layer_is_written_out(mask: str, norm_first: bool) -> None:
    made = nn.TransformerEncoderLayer(E, H, 7, activation="gelu", batch_first=True, norm_first=norm_first)
    layer, x = made.double().eval(), torch.randn(B, S, E, dtype=torch.float64)
    run = lambda x: fast_path(layer, x, *MASKS[mask])  # noqa: E731
    torch.testing.assert_close(written_out(run, x), run(x))


@torch.no_grad()
def test_a_layer_of_relu_is_written_out() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 7, batch_first=True, layer_norm_eps=0.1).double().eval()
    x = torch.randn(B, S, E, dtype=torch.float64)
    torch.testing.assert_close(written_out(layer, x), layer(x))
    torch.testing.assert_close(layer(x), fast_path(layer, x, None, None), atol=0, rtol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", ((False, True), (True, True), (True, False)))
@torch.no_grad()
def test_attention_is_written_out(mask: str, weights: tuple[bool, bool]) -> None:
    mix = nn.MultiheadAttention(E, H, batch_first=True).double().eval()
    own = (mix.in_proj_weight, mix.in_proj_bias, mix.out_proj.weight, mix.out_proj.bias)
    hidden, kind = MASKS[mask]
    run = lambda x: ATTENTION(x, x, x, E, H, *own, hidden, *weights, kind)[: 1 + weights[0]]  # noqa: E731
    x = torch.randn(B, S, E, dtype=torch.float64)
    torch.testing.assert_close(written_out(run, x), run(x))


@torch.no_grad()
def test_attention_to_other_tokens_stays_one_operator() -> None:
    weight, bias = torch.randn(3 * E, E), torch.randn(3 * E)
    run = lambda x, y: ATTENTION(x, y, y, E, H, weight, bias, weight[:E], bias[:E])[0]  # noqa: E731
    module = make_fx(run, SPELT_OUT, tracing_mode="real", pre_dispatch=True)(torch.randn(B, S, E), torch.randn(B, S, E))
    assert ATTENTION in {getattr(node.target, "overloadpacket", None) for node in module.graph.nodes}
