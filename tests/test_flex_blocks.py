"""Decoders of `flex_attention`: ragged where their functions of indices are proved, and refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, Gemma2Config

import selective_compile as sc
from selective_compile.flex_blocks import blocks_unread
from tests.decoders import HEADS, VOCABULARY, Decoder, no_mask
from tests.exactness import TOLERANCE, engine_error, step_program

SLOPES = 0.5 ** torch.arange(1.0, HEADS + 1)


def attention(shown: Any, score: Any = None) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        length = query.shape[1]
        blocks = None if shown is None else create_block_mask(shown, None, None, length, length, device=query.device)
        return flex_attention(q, k, v, score, blocks, enable_gqa=True).transpose(1, 2).flatten(2)

    return attend


def is_before(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


RAGGED: dict[str, tuple[Any, ...]] = {
    "causal": (is_before,),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 5),),
    "slopes": (is_before, lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "softcap": (is_before, lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "mask in the scores": (None, lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_is_ragged(name: str) -> None:
    model = Decoder(layers=1, attend=attention(*RAGGED[name]), mask=no_mask, kv_heads=2)
    assert step_program(model).max_positions == 256  # those of its table, and no block
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE


REFUSED: dict[str, tuple[Any, ...]] = {
    "no mask": (None,),
    "keys behind": (lambda b, h, q, k: q <= k,),
    "one token ahead": (lambda b, h, q, k: q >= k - 1,),
    "one token ahead from far on": (lambda b, h, q, k: q >= k - (q > 200).int(),),
    "every second key": (lambda b, h, q, k: (q >= k) & ((q - k) % 2 == 0),),
    "scores by distance": (is_before, lambda s, b, h, q, k: s * (1 + q - k)),
    "a bias that is no line": (is_before, lambda s, b, h, q, k: s - SLOPES[h] * (q - k) ** 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    with pytest.raises(sc.RefusedError):
        engine_error(Decoder(layers=1, attend=attention(*REFUSED[name]), mask=no_mask), vocabulary=VOCABULARY)


KEPT = create_block_mask(is_before, None, None, 256, 256, device="cpu")


def of_kept_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """That were made for one length, and are cut to this."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    blocks = KEPT._adjust(query.shape[1], query.shape[1])
    return flex_attention(q, k, v, None, blocks).transpose(1, 2).flatten(2)


def test_blocks_that_are_not_made_in_the_forward_are_refused() -> None:
    """What is computed of them under `vmap`, and was lost in tracing, ended an engine with an error of PyTorch's."""
    with pytest.raises(sc.RefusedError):
        engine_error(Decoder(layers=1, attend=of_kept_blocks, mask=no_mask), vocabulary=VOCABULARY)


def test_a_model_of_transformers_is_what_it_is_with_other_attention() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(
        vocab_size=99, num_hidden_layers=2, head_dim=8, sliding_window=5, attn_logit_softcapping=3.0, **sizes
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention").eval()
    report = sc.explain(model)
    assert report.verdict == "ragged"
    assert {call.mask for call in report.calls} == {"causal, window 5", "causal"}
    assert engine_error(model, vocabulary=99) < TOLERANCE


def test_what_others_run_while_a_model_is_traced_has_its_blocks() -> None:
    with blocks_unread():
        blocks = create_block_mask(is_before, None, None, 300, 300, device="cpu", BLOCK_SIZE=100)
    assert blocks.kv_num_blocks.flatten().tolist() == [1, 1, 1]
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_num_blocks.flatten().tolist() == [0, 1, 2]
