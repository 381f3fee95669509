"""What a model object says of itself: its device, its ids, how far it reaches; and whether it can be served so."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule


def check(model: object) -> None:
    """Raises ValueError for what is no model, or one without its weights or in training mode."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if (empty := next((name for name, weight in model.named_parameters() if weight.is_meta), None)) is not None:
        raise ValueError(f"model must hold its weights, got {empty!r} on the device meta; load them first")
    if model.training:
        raise ValueError("model must be in evaluation mode, got training mode; call model.eval()")


def why_no_head(model: Any) -> str | None:
    """Why nothing can be generated with it, as with what `AutoModel` makes; of another class than transformers',
    nothing tells.

    Code for versions before 4.50 has a head and no `GenerationMixin`, which `PreTrainedModel` was then; the auto
    classes put it there, and who makes the model by its class is without.
    """
    if getattr(model, "can_generate", lambda: True)() or has_head(model):
        return None
    got = type(model).__name__
    return f"model must have a language model's head, as AutoModelForCausalLM gives it, got {got}"


def has_head(model: Any) -> bool:
    """Whether it says which of its layers gives logits of token ids."""
    with suppress(AttributeError, NotImplementedError):
        return model.get_output_embeddings() is not None
    return False


def known_ids(model: Any) -> int | None:
    """How many ids the table of a model has rows for, if it says which it is and all that it does is to look them up:
    the head of some gives more."""
    with suppress(AttributeError, NotImplementedError):
        table = model.get_input_embeddings()
        plain = getattr(type(table), "forward", None) is nn.Embedding.forward and "forward" not in vars(table)
        if plain and not table._forward_pre_hooks:
            return int(table.num_embeddings)
    return None


def declared_positions(model: nn.Module) -> int | None:
    """How far the configuration of a Hugging Face model says that it reaches; None if it does not, or says -1."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def undeclared_end(model: nn.Module, longest: int | None) -> int | None:
    """How long a request may be, where that is less than the configuration says, or where it says nothing."""
    declared = declared_positions(model)
    return longest if longest is not None and (declared is None or longest < declared) else None


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile` gave, which has no state of its own: its `generate` is the model's."""
    return uncompiled(model._orig_mod) if isinstance(model, OptimizedModule) else model


def device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
