"""The fields of generation that a call asks for, put together as `model.generate` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from selective_compile.runtime.generation import (
    DEFAULT_NEW_TOKENS,
    KNOWN,
    NEUTRAL,
    OWN_OPTIONS,
    WITHOUT_EFFECT,
)

GENERATION_FIELDS = KNOWN - OWN_OPTIONS

# What `model.generate` does where one of these is None because the call says so. A None that comes from a
# configuration means that the field is not set.
OFF: Mapping[str, Any] = {
    **{name: values[0] for name, values in NEUTRAL.items()},
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "eos_token_id": (),
}


class Fields:
    """The generation fields of one request: the call's, then its configuration's, then the model's."""

    def __init__(
        self, arguments: Mapping[str, Any], config: GenerationConfig | None, of_model: GenerationConfig | None
    ) -> None:
        if config is not None and not isinstance(config, GenerationConfig):
            raise ValueError(f"generation_config must be a transformers.GenerationConfig, got {config!r}")
        self._arguments = arguments
        self._configs = (config, of_model)
        self.config = config

    def __getitem__(self, name: str) -> Any:
        if name in self._arguments:
            return self._arguments[name]
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)

    @property
    def eos_token_ids(self) -> list[int]:
        value = self["eos_token_id"]
        return [] if value is None else torch.as_tensor(value, device="cpu").reshape(-1).tolist()

    @property
    def pad_token_id(self) -> int | None:
        """The first end-of-sequence id where none is set, as for `model.generate`."""
        if self["pad_token_id"] is not None:
            return int(self["pad_token_id"])
        return next(iter(self.eos_token_ids), None)

    def new_tokens(self, columns: int, max_positions: int | None) -> int:
        """How many tokens to generate after so many columns, which `max_length` counts in, padding included.

        Raises:
            ValueError: `max_length` leaves no room, or `max_new_tokens` is none.
        """
        count = self["max_new_tokens"]
        if count is not None:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"max_new_tokens must be an integer of at least 1, got {count!r}")
            return count
        max_length = self["max_length"]
        if max_length is None:
            max_length = columns + DEFAULT_NEW_TOKENS
            max_length = max_length if max_positions is None else min(max_length, max_positions)
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length <= columns:
            raise ValueError(
                f"max_length must be an integer above the {columns} columns of input_ids, got {max_length!r}"
            )
        return max_length - columns

    def options(self) -> dict[str, Any]:
        """The call's own fields as options of `Engine.submit`, where None would mean not set."""
        given = {name: OFF.get(name) if value is None else value for name, value in self._arguments.items()}
        return {name: value for name, value in given.items() if value is not None and name not in WITHOUT_EFFECT}


def fields_of(
    arguments: Mapping[str, Any], generation_config: Any, of_model: GenerationConfig | None, inputs: Any
) -> list[Fields]:
    """The fields of each prompt of a list; a single entry where one configuration is for all.

    Raises:
        ValueError: a list of configurations without as many prompts in a list.
    """
    if not isinstance(generation_config, (list, tuple)):
        return [Fields(arguments, generation_config, of_model)]
    if not isinstance(inputs, (list, tuple)) or len(inputs) != len(generation_config):
        found = f"{len(inputs)} prompts" if isinstance(inputs, (list, tuple)) else described(inputs)
        raise ValueError(
            f"generation_config must be one, or a list with one for each of a list of prompts, "
            f"got {len(generation_config)} for {found}"
        )
    return [Fields(arguments, config, of_model) for config in generation_config]


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:80]}"
