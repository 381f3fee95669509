"""Weights that lie one behind the other, so that one product reads several: the model's own, of which no copy is kept.

Joining moves weights: each keeps its identity, values, shape and strides, and lies in a part of one buffer from then
on.  What else holds their memory would not see that, so that `can_be_joined` lets weights stay where they are if
anything in this process does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selective_compile.tensor_state import Made, States, class_of, states
from selective_compile.whole_device import ALONE

logger = logging.getLogger(__name__)
# Bytes: of addresses that are a multiple of it libraries and compiled code read and write more at once.
ALIGNMENT = 16


class JoinedWeights:
    """A tensor ``[sum N, ...]`` over each of the ``groups`` of a graph's weights ``[N, ...]``, given by their places.

    Programs over one model do not fight for where its weights lie: what lies in order stays.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = tuple(map(tuple, groups))
        self._made: Made | None = None

    def of(self, tensors: Sequence[Any], seen: States) -> tuple[Tensor, ...]:
        """For each group, one tensor over those of the ``tensors`` in it; a copy where they lie apart, as weights do
        that were given other memory since `gather`. Moves nothing, so that it is for a step, too.

        Args:
            seen: the states of all ``tensors``; the same object as before where nothing has changed.
        """
        made = self._made  # looked at once: another thread may put others in its place
        if made is not None and made.seen is seen:
            return made.operands
        # Looked at once, too: another thread may give a weight other memory.
        groups = [[weight.detach() for weight in group] for group in self._of_groups(tensors)]
        return tuple(over(group) if lie_in_order(group) else torch.cat(group) for group in groups)

    def gather(self, tensors: Sequence[Any], seen: States) -> None:
        """Join those that lie apart; for when no step is on its way, which might read memory that they leave.

        Raises:
            ValueError: a weight has become one of a class of its own or of inference mode, or two have become one.
        """
        groups = self._of_groups(tensors)
        weights = tuple(weight for group in groups for weight in group)
        if (lying := self._as_they_lie(groups, weights, seen)) is not None:
            self._made = lying
            return
        with ALONE:  # several programs may be of one model
            if self._made is None or not self._made.states.hold(weights):
                wait_for(weights[0].device)  # what is on its way there reads the memory that they leave
                self._made = None  # or memory that weights have left would be held until all are joined
                self._made = Made(operands=joined(groups), weights=weights, states=states(weights), seen=seen)
            self._made = replace(self._made, seen=seen)

    def _as_they_lie(
        self, groups: Sequence[Sequence[Tensor]], weights: tuple[Tensor, ...], seen: States
    ) -> Made | None:
        """What was made, or would be, where none is to be moved: then nobody is waited for. None: some lie apart, or
        another thread has moved some meanwhile."""
        made = self._made
        if made is not None and made.states.hold(weights):
            return replace(made, seen=seen)
        before = states(weights)
        if not all(map(lie_in_order, groups)):
            return None
        made = Made(operands=over_each(groups), weights=weights, states=before, seen=seen)
        return made if before.hold(weights) else None

    def _of_groups(self, tensors: Sequence[Any]) -> list[list[Tensor]]:
        return [[tensors[place] for place in group] for group in self._groups]


@torch.inference_mode(False)  # as in `joined`
@torch.no_grad()
def over_each(groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Of weights that lie in order."""
    return tuple(map(over, groups))


@torch.inference_mode(False)  # or parameters would become tensors of that mode
@torch.no_grad()
def joined(groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor over each group; memory that weights leave is free before the next group is joined."""
    apart = [group for group in groups if not lie_in_order(group)]
    for group in apart:
        put_in_order(group)
        for weight in group:  # new memory may have an address that an engine knows from before, of other values
            torch.autograd.graph.increment_version(weight)
    if apart:
        wait_for(apart[0][0].device)  # whatever stream reads them next
        size = sum(weight.nbytes for group in apart for weight in group) / 1e6
        logger.info("%d weights of %.0f MB were moved to lie one behind the other", sum(map(len, apart)), size)
        give_back_memory(apart[0][0].device)
    return tuple(map(over, groups))


def put_in_order(group: Sequence[Tensor]) -> None:
    """
    Raises:
        ValueError: see `JoinedWeights.gather`.
    """
    plain = all(class_of(weight) is Tensor and not weight.is_inference() for weight in group)
    if not plain or len(set(map(id, group))) < len(group):
        raise ValueError(
            "weights that were joined when the model was compiled must stay plain tensors, each another one and none "
            "of inference mode (join_weights=False joins none)"
        )
    shape = (sum(weight.shape[0] for weight in group), *group[0].shape[1:])
    buffer = torch.empty(shape, dtype=group[0].dtype, device=group[0].device)
    for weight, part in zip(group, buffer.split([weight.shape[0] for weight in group]), strict=True):
        part.copy_(weight)
        weight.data = part


def over(group: Sequence[Tensor]) -> Tensor:
    """``[sum N, ...]`` of weights ``[N, ...]`` in order."""
    shape = (sum(weight.shape[0] for weight in group), *group[0].shape[1:])
    return group[0].detach().as_strided(shape, group[0].stride())


def lie_in_order(group: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends, in one storage."""
    storage = group[0].untyped_storage().data_ptr()
    ends = [weight.data_ptr() + weight.nbytes for weight in group]
    return all(weight.untyped_storage().data_ptr() == storage for weight in group) and all(
        weight.data_ptr() == end for weight, end in zip(group[1:], ends, strict=False)
    )


def can_be_joined(group: Sequence[Any]) -> bool:
    """Whether they can be one tensor, and either are already or have memory that nobody else here knows of."""
    if not all(map(is_plain, group)) or len({(w.dtype, w.device, w.shape[1:]) for w in group}) > 1:
        return False
    if lie_in_order(group):
        return bool(group[0].data_ptr() % ALIGNMENT == 0)
    return all(map(is_held_alone, group))


def is_plain(weight: Any) -> bool:
    """Of no class of its own, with elements that lie in order and versions that are counted."""
    plain = class_of(weight) is Tensor and weight.layout is torch.strided
    return plain and weight.is_contiguous() and not weight.is_inference() and weight.numel() > 0


def is_held_alone(weight: Tensor) -> bool:
    """Whether its memory is that of no other tensor: no view, no part of what was one for many, no `state_dict`."""
    if weight.untyped_storage().nbytes() != weight.nbytes or (weight.device.type == "cpu" and weight.is_shared()):
        return False  # on a GPU every tensor counts as shared
    return holders(weight) == holders(torch.empty(1, dtype=torch.float32, device="cpu"))


def holders(tensor: Tensor) -> int:
    """Of its memory, with how many there always are: to be compared with that of a new tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def give_back_memory(device: torch.device) -> None:
    """What weights have left is in pieces that the next one may not fit in, and does not count as free."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
