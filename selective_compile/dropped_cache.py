"""What `generate` does where a request comes to be so long that the model computes it in another way.

Phi-3's `prepare_inputs_for_generation` drops the cache there, so that all is computed again (or, of transformers 5.17,
and of Phi-4-multimodal's, nothing is but the last token, which sees no other then); other models go on from what they
have.  Which it is, is asked of it, with a cache that says it has as many tokens.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import torch
from torch import nn
from transformers import Cache, GenerationMixin

from selective_compile.given_rows import BUFFER
from selective_compile.model_call import CANNOT
from selective_compile.model_facts import device_of
from selective_compile.module_state import own_attributes, unchanged
from selective_compile.sequential_program import OneRequest, step_arguments, why_not_run
from selective_compile.step import LongForm


@torch.no_grad()
def long_form_of(model: nn.Module, beyond: int) -> LongForm | None:
    """None where it is not known, or drops its cache at any other length than where it has ``beyond`` tokens."""
    if why_not_run(model):  # nothing but its forward says what it computes
        return LongForm(beyond=beyond, anew=True)
    lengths = sorted({1, beyond // 2, beyond - 1, beyond, beyond + 1, *near(model, beyond)} - {0})
    if any(BUFFER in module._buffers for module in model.modules()):  # `generate` counts what it generates alone
        lengths = [1]
    with unchanged(model), own_attributes(model, {}):
        try:
            dropped = {length: how for length in lengths if (how := drops_its_cache(model, length)) is not None}
        except CANNOT:
            return None
    if dropped.keys() - {beyond}:
        return None
    how = dropped.get(beyond)
    return LongForm(beyond=beyond, anew=how == "anew", grows=how != "lost")


@torch.no_grad()
def lost_beyond(model: nn.Module) -> int | None:
    """Behind how many tokens `generate` loses what it has of a request, of a model that computes all lengths alike.

    None where it has no cache of transformers' behind one token either: then it keeps something else.  Asked about
    where the configuration names a number of positions, of models that prepare steps in their own way.
    """
    if why_not_run(model) or prepares_as_all(model):
        return None
    named = {value for name, value in configured_numbers(model).items() if "position" in name and value > 1}
    lengths = sorted({length + d for length in {2, *named} for d in (-1, 0, 1)})  # of a single token, too
    with unchanged(model), own_attributes(model, {}):
        first = next((length for length in lengths if loses_its_cache(model, length)), 1)
    return None if first == 1 else first


def loses_its_cache(model: nn.Module, length: int) -> bool:
    """As far as that can be asked."""
    with suppress(*CANNOT):
        return drops_its_cache(model, length) == "lost"
    return False


def prepares_as_all(model: Any) -> bool:
    """Whether its steps are prepared by transformers' own method."""
    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return prepare is GenerationMixin.prepare_inputs_for_generation


def near(model: nn.Module, beyond: int) -> list[int]:
    """Lengths that the configuration names, at which something else may happen, and twice the one that is known."""
    numbers = configured_numbers(model).values()
    return [length + d for length in {*numbers, 2 * beyond} for d in (-1, 0, 1) if 1 < length <= 2 * beyond]


def configured_numbers(model: nn.Module) -> dict[str, int]:
    """By name, the integers of its configuration, and of that of its text if it is a model of several."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return {}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {name: value for name, value in (vars(text) | vars(config)).items() if type(value) is int}


def drops_its_cache(model: Any, length: int) -> Literal["anew", "lost"] | None:
    """Whether the step behind ``length`` tokens that are in the cache begins without it, and with which tokens.

    Raises:
        ValueError: it begins with neither the last token nor all of them.
    """
    ids = torch.zeros(1, length + 1, dtype=torch.int64, device=device_of(model))
    one = OneRequest(tokens=ids[:, :length])
    step_arguments(model, one)
    caches = [each for each in one.kwargs.values() if isinstance(each, Cache)]
    for cache in caches:
        vars(cache)["get_seq_length"] = lambda *layer: length
    one.tokens, one.seen = ids, length
    arguments = step_arguments(model, one)
    kept = any(each is cache for each in arguments.values() for cache in caches)
    handed = arguments["input_ids"].shape[1]
    if handed != 1 and (kept or handed != length + 1):
        raise ValueError(f"a step must be handed its last token, or all {length + 1}, got {handed}")
    return None if kept else "lost" if handed == 1 else "anew"
