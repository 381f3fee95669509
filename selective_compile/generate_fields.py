"""The fields of generation that a call asks for, put together as `model.generate` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from selective_compile.runtime.generation import DEFAULT_NEW_TOKENS
from selective_compile.runtime.generation_fields import FIELDS
from selective_compile.runtime.generation_values import count, integer, token_ids

GENERATION_FIELDS = FIELDS

# What only the model's own loop over the finished sequences gives.
STATES = ("output_hidden_states", "output_attentions")


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
        return [] if value is None else list(token_ids("eos_token_id", value))

    @property
    def pad_token_id(self) -> int | None:
        """The first end-of-sequence id where none is set, as for `model.generate`; -1 is one that no token has."""
        if self["pad_token_id"] is not None:
            return integer("pad_token_id", self["pad_token_id"], at_least=-1)
        return next(iter(self.eos_token_ids), None)

    def new_tokens(self, columns: int, max_positions: int | None) -> int:
        """How many tokens to generate after so many columns, which `max_length` counts in, padding included.

        Raises:
            ValueError: `max_length` leaves no room, or `max_new_tokens` is none.
        """
        asked = self["max_new_tokens"]
        if asked is not None:
            return count("max_new_tokens", asked)
        max_length = self["max_length"]
        if max_length is None:
            max_length = columns + DEFAULT_NEW_TOKENS
            max_length = max_length if max_positions is None else min(max_length, max_positions)
        length = integer("max_length", max_length)
        if length <= columns:
            raise ValueError(
                f"max_length must be an integer above the {columns} columns of input_ids, got {max_length!r}"
            )
        return length - columns

    @property
    def samples(self) -> int:
        """How many requests to make of the prompt; those that a search with beams returns are of one.

        Raises:
            ValueError: several of greedy decoding, which would all be the same.
        """
        asked = self["num_return_sequences"]
        found = 1 if asked is None else count("num_return_sequences", asked)
        if self.num_beams > 1:
            return 1
        if found > 1 and not self["do_sample"]:
            raise ValueError(f"num_return_sequences must be 1 for greedy decoding, got {found}")
        return found

    @property
    def num_beams(self) -> int:
        """1 where it is not set.

        Raises:
            ValueError: it is no number of beams.
        """
        asked = self["num_beams"]
        return 1 if asked is None else count("num_beams", asked)

    def kept(self) -> dict[str, bool]:
        """What a request keeps of its steps; as for `model.generate`, only where a dictionary is returned."""
        wanted = bool(self["return_dict_in_generate"])
        return {name: wanted and bool(self[name]) for name in ("output_scores", "output_logits")}

    def returns_cache(self, *, of_embeddings: bool) -> bool:
        """Whether the call itself asks for the cache: it takes a run of the model's own loop, which is no default.

        With embeddings there is a cache in any case, since `model.generate` does not go on without one.
        """
        asked = of_embeddings or self._arguments.get("use_cache") is True
        return bool(self["return_dict_in_generate"]) and asked

    def states(self) -> dict[str, bool]:
        """Which states of the model are returned with it; likewise."""
        wanted = bool(self["return_dict_in_generate"])
        return {name: wanted and bool(self[name]) for name in STATES}

    def options(self, padding: int, *, of_embeddings: bool) -> dict[str, Any]:
        """The call's own fields as options of `Engine.submit`; lengths count `padding` columns that it does not see."""
        found = {**self._arguments, **self.kept(), **dict.fromkeys(STATES)}
        if self.num_beams == 1:
            found["num_return_sequences"] = 1  # of each of its requests
        elif any(self.states().values()) or self.returns_cache(of_embeddings=of_embeddings):
            found["output_beams"] = True
        if padding and self["min_length"] is not None:
            found["min_length"] = max(0, integer("min_length", self["min_length"]) - padding)
        return found


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
