"""Whether the cache of `generate` keeps all keys that attention sees.

What a cache keeps transformers tells by the configuration, what attention sees the forward: a Llama whose configuration
has a ``sliding_window`` sees all tokens of a prompt, and in the steps behind it the last few.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache

from selective_compile.passes import Refusal
from selective_compile.passes.traced_graph import AttentionCall

# Of a configuration, by which `transformers.cache_utils.get_layer_types_and_kwargs` chooses layers of a cache.
FIELDS = (
    *("layer_types", "sliding_window", "attention_chunk_size", "num_hidden_layers"),
    *("num_kv_shared_layers", "kv_sharing_modes", "use_cache"),
)
MISSING = "none"


def cache_refusal(model: nn.Module, calls: Sequence[AttentionCall]) -> Refusal | None:
    """What to say of ``model`` if that cache drops keys that its ``calls``, which are in their order, see."""
    kept = kept_keys(model)
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
    forward = inspect.unwrap(type(model).forward).__code__
    return Refusal(
        node="past_key_values",
        operator="cache of generate",
        reason=f"it keeps the last {few} keys, and attention sees {f'the last {far}' if far else 'all'}",
        source_line=f"{forward.co_filename}:{forward.co_firstlineno}  def {forward.co_name}",
        module="",
    )


def kept_keys(model: nn.Module) -> list[int]:
    """Of each layer of attention in the cache how many of the last keys a token finds there, with its own; 0: all."""
    try:
        config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        layers: Any = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a model of one's own, which makes a cache of its own
        return []
    return [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers if hasattr(layer, "keys")]


def told_by(attributes: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What the configuration among a model's ``attributes`` has of it, as it is now."""
    config = attributes.get("config")
    own = [config, getattr(config, "text_config", None)]
    return tuple(hashable(getattr(each, name, MISSING)) for each in own if each is not None for name in FIELDS)


def hashable(value: Any) -> Hashable:
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else str(value)
