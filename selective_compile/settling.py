"""A model is traced as calls leave it, in which there is nothing left to be set."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from selective_compile.captured import Captured
from selective_compile.first_call import set_for_good
from selective_compile.long_tables import made_long


def settled(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    """What ``capture`` gives once nothing is left to be set: a trace that has read what there was before would not be
    of the model any more when somebody has called it."""
    captured = capture()
    return capture() if captured.sets and set_up(model) else captured


def set_up(model: nn.Module) -> bool:
    """Sets the flags that a first call sets, and makes tables as long as they come to be; whether there are any."""
    flags = set_for_good(model, bool)
    return made_long(model) or flags
