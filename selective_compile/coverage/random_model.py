"""A tiny model with random weights that make every part of it matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from selective_compile.coverage.tiny_config import tiny_config

SMALL = 0.1  # initial weights are drawn with less spread than this; what a class sets to values of its own is not


def random_model(model_type: str, *, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """In evaluation mode, float32, without an end-of-sequence token; the same weights for the same seed.

    ``attention`` as for `from_pretrained`; None: the class's own choice.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind._from_config(part_for(kind, config), attn_implementation=attention, dtype=torch.float32).eval()
    enliven(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def part_for(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration itself, or that part of a composite one which describes ``kind``."""
    wanted = kind.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in vars(config).values() if isinstance(part, wanted)), config)


@torch.no_grad()
def enliven(model: nn.Module, seed: int) -> None:
    """Give weights a spread at which layers matter: as drawn for large models, tiny ones are nearly linear.

    Matrices that were drawn at random around zero are scaled to a spread of 1 / sqrt(fan-in), the rest (norms, biases,
    decay rates) is shaken a little, so that leaving one out shows.
    """
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for tensor in model.state_dict(keep_vars=True).values():
        if not tensor.is_floating_point() or tensor.data_ptr() in seen or tensor.numel() == 0:
            continue
        seen.add(tensor.data_ptr())
        if is_drawn(tensor):
            tensor.mul_(tensor.shape[-1] ** -0.5 / tensor.std())
        elif tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu") * 0.05)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            fill_padding(module.weight[module.padding_idx], seed)


def fill_padding(row: Tensor, seed: int) -> None:
    """A padding token is embedded as zeros, for which all keys score alike: a sparse indexer would choose any."""
    if not bool(row.any()):
        generator = torch.Generator().manual_seed(seed)
        row.copy_(torch.randn(row.shape, generator=generator, dtype=torch.float32, device="cpu") * row.numel() ** -0.5)


def is_drawn(tensor: Tensor) -> bool:
    if tensor.dim() < 2 or tensor.numel() < 8:
        return False
    spread = float(tensor.std())
    return 0 < spread < SMALL and abs(float(tensor.mean())) < spread / 2


def vocabulary_of(model: Any) -> int:
    """Ids that a prompt may be made of; those that stand for images and the like are at the end."""
    return int(model.config.get_text_config(decoder=True).vocab_size)
