"""Autocast around whoever makes an engine: its model computes as under it, its steps run without it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from selective_compile.passes.refusals import Refusal

Autocast = tuple[str, torch.dtype, bool, bool]  # as `torch.autocast` takes it


def autocast_of(device: torch.device) -> Autocast | None:
    """What this thread computes in on a device like this; None: in the types of what it is given."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """For graphs, in which all casts are written."""
    return torch.autocast(device.type, enabled=False)


def own_calls_refusal(modules: Iterable[str]) -> Refusal:
    """What to say where steps would call modules of the model, by their paths."""
    paths = ", ".join(dict.fromkeys(modules))
    return Refusal(
        node="autocast",
        operator="autocast",
        reason=f"it is on, and the engine's steps, which are not under it, would call {paths}",
        source_line="source line unknown",
        module="",
    )
