"""The first layers of a model as a model of its own, which drafts for it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationConfig

from selective_compile.skeleton import skeleton

INSTEAD = "prompt_lookup_num_tokens drafts without layers"


class EarlyLayers:
    """Copies of a model that share its weights and end after some of its layers, kept from one request to the next."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}  # by the number of layers

    def of(self, model: Any, count: int) -> Any:
        """The model with so many of its layers, before the norm and the head that come after them all.

        Raises:
            ValueError: it has fewer layers, or they are not one list of as many as its configuration says.
        """
        if count not in self._kept:
            path, layers = _layers_of(model)
            if count > len(layers):
                raise ValueError(f"assistant_early_exit must be at most {len(layers)}, the model's layers, got {count}")
            copy = skeleton(model, {})
            modules = copy.get_submodule(path).__dict__
            modules["_modules"] = dict(list(modules["_modules"].items())[:count])
            # What the model's own asks for is not meant for drafts.
            copy.__dict__["generation_config"] = GenerationConfig()
            self._kept[count] = copy
        return self._kept[count]


def _layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The list that is not within another one, as long as the configuration says that there are layers."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    number = getattr(text, "num_hidden_layers", None)
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    lists = [(path, each) for path, each in named if isinstance(each, nn.ModuleList) and len(each) == number]
    outer = [(path, each) for path, each in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise ValueError(
            f"assistant_early_exit must be None for {type(model).__name__}, which has {len(outer)} lists of "
            f"num_hidden_layers modules where one is looked for: {INSTEAD}"
        )
    return outer[0]
