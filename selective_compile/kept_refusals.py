"""Which models were refused: to find that out takes seconds, in each of the calls that the model then serves itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from selective_compile.autocast import autocast_of
from selective_compile.kept_engines import ByModel, layout_of
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of
from selective_compile.options import EngineConfig


class KeptRefusals:
    """Why a model was refused, in words, for as long as it looks the same.

    Only for calls that can be the model's own, which are as exact: what makes a model another one is not all told here.
    """

    def __init__(self) -> None:
        self._kept = ByModel[tuple[Any, str]]()

    def of(self, model: nn.Module, config: EngineConfig, *kind: Any) -> str | None:
        """``kind``: what else decides whether a call is refused, as whether its prompts are embeddings."""
        kept = self._kept.of(model)
        return kept[1] if kept is not None and kept[0] == (config, kind, looks_of(model)) else None

    def keep(self, model: nn.Module, config: EngineConfig, *kind: Any, reason: str) -> None:
        self._kept.keep(model, ((config, kind, looks_of(model)), reason))


def looks_of(model: nn.Module) -> tuple[Any, ...]:
    """Its weights but for their numbers, classes, forwards and hooks of its modules, how it attends, and autocast."""
    with lock_of(model):
        layout = layout_of(model)
    modules = [(type(module), id(vars(module).get("forward")), hooks_of(module)) for module in model.modules()]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return layout, modules, attention, autocast_of(device_of(model))


def hooks_of(module: nn.Module) -> list[int]:
    return [id(hook) for name, hooks in vars(module).items() if "hooks" in name and hooks for hook in hooks.values()]
