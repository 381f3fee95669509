"""What the first call of a model makes for good, as a table: made before the model is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.capture import CANNOT, device_of, logits_call
from selective_compile.module_state import Place, attributes, lock_of, own_attributes, put, same_buffers


@torch.no_grad()
def make_for_good(model: nn.Module) -> bool:
    """Gives ``model`` the tensors that its first call makes and a second, with other tokens, leaves as they are.

    Any call of the user's would: they are not taken back. Returns whether there are any.
    """
    try:
        with lock_of(model), same_buffers(model):
            own = attributes(model.modules())
            made = {place: value for place, value in left_by_call(model, 2).items() if is_made(place, value, own)}
            if not made:
                return False
            put({**own, **made}, own)
            stay = False
            try:
                again = left_by_call(model, 3)
                stay = all(equal(again.get(place, value), value) for place, value in made.items())
            finally:
                if not stay:
                    put(own, {**own, **made})
            return stay
    except CANNOT:  # the model cannot be called so, as those that know only some lengths
        return False


def left_by_call(model: nn.Module, count: int) -> dict[Place, Any]:
    call, arguments = logits_call(model, torch.arange(count, device=device_of(model))[None])
    with own_attributes(model, {}) as left:
        call(*arguments)
    return left


def is_made(place: Place, value: Any, own: Mapping[Place, Any]) -> bool:
    """Whether it is a tensor where there was none."""
    module, _, name = place
    return isinstance(value, Tensor) and own.get(place, getattr(type(module), name, None)) is None


def equal(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
