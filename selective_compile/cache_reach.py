"""Whether the cache of `generate` keeps all keys that attention sees.

What a cache keeps transformers tells by the configuration, what attention sees the forward: a Llama whose configuration
has a ``sliding_window`` sees all tokens of a prompt, and in the steps behind it the last few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache

from selective_compile.passes import Refusal
from selective_compile.passes.attention_calls import AttentionCall
from selective_compile.where_refused import begin_of


def cache_refusal(model: nn.Module, calls: Sequence[AttentionCall]) -> Refusal | None:
    """What to say of ``model`` if that cache drops keys that its ``calls``, which are in their order, see."""
    kept = kept_keys(getattr(model, "config", None))
    seen = [family.window or family.chunk for family in (call.family for call in calls) if family is not None]
    if not seen or not any(kept):
        return None
    if len(kept) == len(seen):
        dropped = [(few, far) for few, far in zip(kept, seen, strict=True) if few and not 0 < far <= few]
    else:  # layers that share keys, or have none: which layer is whose is not known
        dropped = [(few, max(seen)) for few in kept if few and not any(0 < far <= few for far in seen)]
    if not dropped:
        return None
    few, far = dropped[0]
    return Refusal(
        node="past_key_values",
        operator="cache of generate",
        reason=f"it keeps the last {few} keys, and attention sees {f'the last {far}' if far else 'all'}",
        source_line=begin_of(type(model).forward),
        module="",
    )


def kept_keys(config: Any) -> list[int]:
    """Of each layer of attention in the cache how many of the last keys a token finds there, with its own; 0: all."""
    try:
        layers: Any = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a model of one's own, which makes a cache of its own
        return []
    return [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers if hasattr(layer, "keys")]
