"""Several samples of one prompt: what each of them asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from selective_compile.runtime.generation_values import integer
from selective_compile.runtime.own_code import copied

OBJECTS = ("logits_processor", "stopping_criteria")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one request asks of generation: a configuration, and single options that come before it."""

    config: GenerationConfig | None
    options: Mapping[str, Any]


def options_of_samples(options: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """For each of so many samples the options of the request: seeds that follow its own, objects copied.

    Raises:
        ValueError: an object for several cannot be copied.
    """
    if count == 1:
        return [dict(options)]
    seed = options.get("seed")
    seed = None if seed is None else integer("seed", seed, below=2**64)
    return [
        {
            **options,
            "num_return_sequences": 1,
            **{name: copied(name, options[name]) for name in OBJECTS if name in options},
            **({} if seed is None else {"seed": (seed + place) % 2**64}),
        }
        for place in range(count)
    ]
