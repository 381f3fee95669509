"""What the first call of a model sets in it for good, as a flag or a table: set before the model is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.kept_weights import Weights, summed_weights
from selective_compile.model_call import CANNOT, logits_call
from selective_compile.model_facts import device_of
from selective_compile.module_state import FLAGS, Place, attributes, lock_of, own_attributes, put, same_buffers
from selective_compile.tensor_memory import same_bytes


@torch.no_grad()
def set_for_good(model: nn.Module, kind: type[bool] | type[Tensor], *, instead_of: Sequence[Tensor] = ()) -> bool:
    """Gives ``model`` the flags, with all else that it sets beside them, or the tensors where there are none, or in the
    place of some, ``instead_of``, that its first call sets and a second, with other tokens, leaves as they are.

    Any call of the user's would: they are not taken back. Returns whether anything is set.
    """
    try:
        with lock_of(model), same_buffers(model):
            return leave_for_good(model, kind, instead_of)
    except CANNOT:  # the model cannot be called so, as those that know only some lengths
        return False


@torch.no_grad()
def changes_weights(model: nn.Module) -> bool:
    """Whether a call does, as one that takes adapters out of them: then what it leaves stays, as `own_attributes` and
    `same_buffers` have it, and else nothing does."""
    parts = list(model.modules())
    try:
        with lock_of(model), summed_weights(parts), same_buffers(model):
            weights = Weights(parts)
            call, arguments = logits_call(model, torch.zeros(1, 2, dtype=torch.int64, device=device_of(model)))
            with own_attributes(model, {}):
                call(*arguments)
            return weights.are_others()
    except CANNOT:
        return False


def leave_for_good(model: nn.Module, kind: type[bool] | type[Tensor], instead_of: Sequence[Tensor] = ()) -> bool:
    """A buffer that is written in place becomes another, as who watches buffers would take back what is written."""
    before = attributes(model.modules())
    left = left_by_call(model, 2)
    own = attributes(model.modules())  # where that changes weights, its flags have stayed
    found = {place: value for place, value in left.items() if is_set(place, value, before, kind, instead_of)}
    flags = set(found) if kind is bool else set()
    if flags:  # which say that all the rest is there
        found = {place: value for place, value in left.items() if not same(value, own.get(place))}
    own_already = {place for place in flags if own.get(place) is left[place]}
    put({**own, **found}, own)
    staying: dict[Place, Any] = {}
    try:
        again = left_by_call(model, 3) if found else {}
        staying = {place: value for place, value in found.items() if same(again.get(place, value), value)}
        if not flags - own_already <= staying.keys() or (not flags and len(staying) < len(found)):
            staying = {}
    finally:
        put({**own, **staying}, {**own, **found})
    return bool(staying) or any(before.get(place) is not value for place, value in own.items())


def left_by_call(model: nn.Module, count: int) -> dict[Place, Any]:
    """What a call leaves, buffers that it may have written among it."""
    call, arguments = logits_call(model, torch.zeros(1, count, dtype=torch.int64, device=device_of(model)) + count % 2)
    buffers = [place for place, value in attributes(model.modules()).items() if place[1] == "buffer"]
    with own_attributes(model, {}, buffers) as left:
        call(*arguments)
    return left


def is_set(
    place: Place,
    value: Any,
    before: dict[Place, Any],
    kind: type[bool] | type[Tensor],
    instead_of: Sequence[Tensor],
) -> bool:
    """Whether it is a tensor, or some in a row, where there was none or one of ``instead_of``; or a flag that was
    another."""
    module, _, name = place
    was = before.get(place, getattr(type(module), name, None))
    if kind is bool:
        return isinstance(value, bool) and was is not value
    parts = value if isinstance(value, (tuple, list)) else (value,)
    free = was is None or any(was is each for each in instead_of)
    return free and len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)


def same(one: Any, other: Any) -> bool:
    """Of what a model holds: tensors and containers by what is in them."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(same_bytes(one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, FLAGS) and type(one) is type(other) and one == other)
