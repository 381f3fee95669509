"""What the first call of a model sets in it for good, as a flag or a table: set before the model is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.captured import Captured
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import Place, attributes, lock_of, own_attributes, put, same_buffers


def settled(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    """What ``capture`` gives once the flags are set that a first call sets: a trace that has read them would not be of
    the model any more when somebody has called it."""
    captured = capture()
    return capture() if captured.sets and set_for_good(model, bool) else captured


@torch.no_grad()
def set_for_good(model: nn.Module, kind: type[bool] | type[Tensor]) -> bool:
    """Gives ``model`` the flags, or the tensors where there are none, that its first call sets and a second, with other
    tokens, leaves as they are.

    Any call of the user's would: they are not taken back. Returns whether anything is set.
    """
    try:
        with lock_of(model), same_buffers(model):
            before = attributes(model.modules())
            left = left_by_call(model, 2)
            own = attributes(model.modules())  # where that changes weights, its flags have stayed
            found = {place: value for place, value in left.items() if is_set(place, value, own, kind)}
            put({**own, **found}, own)
            stay = False
            try:
                again = left_by_call(model, 3) if found else {}
                stay = all(equal(again.get(place, value), value) for place, value in found.items())
            finally:
                if not stay:
                    put(own, {**own, **found})
            return (stay and bool(found)) or any(before.get(place) is not value for place, value in own.items())
    except CANNOT:  # the model cannot be called so, as those that know only some lengths
        return False


def left_by_call(model: nn.Module, count: int) -> dict[Place, Any]:
    call, arguments = logits_call(model, torch.zeros(1, count, dtype=torch.int64, device=device_of(model)) + count % 2)
    with own_attributes(model, {}) as left:
        call(*arguments)
    return left


def is_set(place: Place, value: Any, own: dict[Place, Any], kind: type[bool] | type[Tensor]) -> bool:
    """Whether it is a tensor where there was none, or a flag that was another."""
    module, _, name = place
    before = own.get(place, getattr(type(module), name, None))
    return isinstance(value, kind) and before is not value and (kind is bool or before is None)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other
