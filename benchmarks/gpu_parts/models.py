"""The models: random weights in the shapes of known ones, made on the device, and what a step of each costs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu_parts.floors import StepWork
from selective_compile.bench.floor import Work

ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _llama_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_parameters": _llama_rope(8.0),
        "rms_norm_eps": 1e-5,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rope_parameters": _llama_rope(32.0),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    # No model of that size is widely used: Qwen3-30B-A3B with a third of its layers and a fourth of its experts.
    "qwen3-moe-small": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
# The same kinds of layers, so small that seconds show that they run.
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
TINY_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def random_model(
    name: str, device: torch.device, *, tiny: bool, layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """On the device, without a copy on the host; `tiny`: small, in float32, for a dry run; `layers`: only so many."""
    shape = dict(SHAPES[name]) | ({"num_hidden_layers": layers} if layers else {})
    if tiny:
        shape |= TINY | (TINY_EXPERTS if "num_experts" in shape else {})
    config = AutoConfig.for_model(**shape, **ENDLESS)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if tiny else dtype)
    model = model.to(device).eval()
    _enliven(model)
    return model


@torch.no_grad()
def _enliven(model: PreTrainedModel) -> None:
    """So that greedy tokens go by the context, at any width. As initialised, a model says one token again and again,
    right or wrong: its layers drown what it reads, or add nothing to it, and where the head is the embedding, a token
    is the likeliest to follow itself."""
    model.get_input_embeddings().weight.normal_()
    for matrix in (parameter for parameter in model.base_model.layers.parameters() if parameter.ndim > 1):
        matrix.normal_(std=matrix.shape[-1] ** -0.5)
    norm = model.base_model.norm.weight
    norm.copy_(torch.randint(2, norm.shape, device=norm.device) * 2 - 1)


def step_work(model: PreTrainedModel) -> StepWork:
    """Matrices with one row for each output, and the experts that lie in one tensor [E, ...]."""
    work = Work.of(model)
    return StepWork(
        weight_bytes=work.weight_bytes + work.head_bytes,
        flops_per_token=work.flops_per_token + work.flops_per_row,
        kv_bytes_per_token=work.kv_bytes_per_token,
        expert_bytes=work.expert_bytes,
        experts=work.experts,
        chosen=work.chosen,
    )


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
