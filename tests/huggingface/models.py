"""Tiny models, prompts and a streamer for the tests of `generate` and `wrap`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation import BaseStreamer

import selective_compile as sc
from selective_compile.generate_requests import ENGINES
from selective_compile.options import EngineConfig

ROOT = Path(__file__).parents[2]
CONFIG = EngineConfig(compile=False, block_size=4)
PAD, EOS = 0, 7
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 512},
}


def tiny(family: str = "llama", layers: int = 1, **options: Any) -> Any:
    """Random weights, wide enough that logits are rarely close; no special tokens but those of a test."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if family == "gpt2":
        sizes = {}
    none = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    settings = {"vocab_size": 199, "initializer_range": 0.2, **sizes, **none, **FAMILIES[family], **options}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.generation_config = GenerationConfig()
    return model.eval()


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(10, 199, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch() -> tuple[Tensor, Tensor]:
    """Ids and mask [4, 13]: padding on the left, on the right, on both sides, and none."""
    ids = random_ids(4, 13)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, 9:] = 0
    mask[2, :3] = 0
    mask[2, 11:] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def left_padded() -> tuple[Tensor, Tensor]:
    ids, mask = random_ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :5] = 0
    mask[1, :2] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def some_generated_token(model: Any, ids: Tensor, step: int = 2) -> int:
    """One that ends row 0 after `step` tokens or before, if it is taken for an end-of-sequence id."""
    return int(sc.generate(model, ids[:1], max_new_tokens=step, engine_config=CONFIG)[0, -1])


def assert_idle(model: nn.Module, config: EngineConfig = CONFIG) -> None:
    stats = ENGINES.engine_for(model, config, [1]).stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append((value.tolist(), value.dtype, value.device.type))

    def end(self) -> None:
        self.seen.append("end")
