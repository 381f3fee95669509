"""A model is traced as calls leave it, in which there is nothing left to be set."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from selective_compile.captured import Captured
from selective_compile.first_call import set_for_good
from selective_compile.long_tables import made_long
from selective_compile.model_call import CANNOT
from selective_compile.module_state import lock_of
from selective_compile.passes.refusals import Refusal, RefusedError
from selective_compile.remade_tables import made_anew, same_in_turn
from selective_compile.unread_stores import without_unread

LONG = 512  # tokens that a model is called with to look for tables that are longer than those of a call before


def settled(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    """What ``capture`` gives once nothing is left to be set: a trace that has read what there was before would not be
    of the model any more when somebody has called it.

    Where calls leave tables for their number of tokens alone, it is as if none had been (`remade_tables`).

    Raises:
        RefusedError: as ``capture``, also then.
    """
    try:
        captured = as_calls_leave_it(model, capture)
    except RefusedError:
        anew = made_anew(model, capture)
        if anew is None:
            raise
        return anew
    if not captured.sets:
        return captured
    found = without_unread(model, captured) or made_anew(model, capture)
    # Tensors that are stored are refused where they are computed.
    if found is None and not captured.stored and not is_same_in_turn(model):
        raise RefusedError([of_calls_before(stored) for stored in captured.sets])
    return found or captured


def is_same_in_turn(model: nn.Module) -> bool:
    try:
        with lock_of(model):
            return same_in_turn(model, {})
    except CANNOT:  # what it is called with, or how often, may tell
        return False


def of_calls_before(stored: str) -> Refusal:
    reason = f"its forward stores in {stored}, and gives other logits behind other calls"
    module = stored.rpartition(".")[0]
    return Refusal(node="output", operator="calls", reason=reason, source_line="source line unknown", module=module)


def as_calls_leave_it(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    try:
        captured = capture()
    except RefusedError:  # as it branches where a table ends, say, or cannot be traced at all
        if not set_up(model):
            raise
        return capture()
    if captured.sets:
        return capture() if set_up(model) else captured
    end = captured.max_tokens  # of tables that are as long as the longest call before, say
    return capture() if end is not None and end < LONG and made_long(model, end + 1) else captured


def set_up(model: nn.Module) -> bool:
    """Sets the flags that a first call sets, and makes tables as long as they come to be; whether there are any."""
    flags = set_for_good(model, bool)
    return made_long(model) or made_long(model, LONG) or flags
