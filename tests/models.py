"""A tiny model of each family with random weights: seconds to run, and every structure that the family has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 199
WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ALTERNATING = ["sliding_attention", "full_attention"]

OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {},
    "olmo2": {},
}
FAMILIES = tuple(OWN)


# Of those whose keys and values are made of a latent; without experts, whose choices are near ties in bfloat16.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DENSE = {"first_k_dense_replace": 9}
LATENT_OWN: dict[str, dict[str, Any]] = {"deepseek_v2": DENSE, "deepseek_v3": DENSE, "minicpm3": {}}
# Whose heads are repeated before keys are rotated; as of the larger Falcons.
REPEATED_OWN: dict[str, dict[str, Any]] = {"falcon": {"new_decoder_architecture": True, "num_kv_heads": 2}}
# With a linear bias, of slopes that are infinite at the furthest positions in float16.
BIASED_OWN: dict[str, dict[str, Any]] = {"bloom": {"num_attention_heads": 16}}
# Whose code asks a tensor how long a request is, where its rotation is that of longrope.
ASKING_OWN: dict[str, dict[str, Any]] = {"phimoe": {"num_local_experts": 4}}


def shallow(family: str) -> dict[str, Any]:
    """Of `tiny`'s changes, one layer of each kind: enough where the logits of every token are compared.

    Where only some are, such as those that an engine samples from, what attention gives for the others shows in the
    keys and values of a second layer alone.
    """
    return {"n_layer": 1} if family == "gpt2" else {} if "layer_types" in OWN[family] else {"num_hidden_layers": 1}


def tiny(family: str, *, seed: int = 0, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """The model of a name in one of the tables above, in evaluation mode, float32.

    ``attention`` is ``"sdpa"``, ``"eager"`` or its own; ``changes`` go over its configuration.  It has no
    end-of-sequence token: requests run to their length.
    """
    given = {"vocab_size": VOCABULARY} if family == "gpt2" else dict(COMMON)
    latents = {name: {**LATENT, **own} for name, own in LATENT_OWN.items()}
    own = {**OWN, **latents, **REPEATED_OWN, **BIASED_OWN, **ASKING_OWN}[family]
    config = AutoConfig.for_model(family, **{**given, **own, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
