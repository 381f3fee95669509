"""Whether a run of a model has changed its weights, also where PyTorch does not count that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selective_compile.tensor_memory import as_it_is, memory_of, words_of
from selective_compile.tensor_state import address_of, version_of

Told = tuple[int, int, int]
# Words in a row of those that are added up, row by row and column by column; odd, or the signs of all of them together
# would add up to nothing.
CHUNK = 2047


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A weight, what tells of it without a look at its numbers, and sums of these, where it has plain ones."""

    weight: Tensor
    told: Told
    sums: Tensor | None


_SUMMED = threading.local()


@contextmanager
def summed_weights(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Within, it is known what the weights of modules hold: `Weights` made there go by that, too.

    They are read once, and again where a run has left something else in the model.
    """
    known = summed()
    new = [weight for weight in weights_of(parts) if id(weight) not in known]
    try:
        known.update((id(weight), sums_of(weight)) for weight in new)
        yield
    finally:
        for weight in new:
            known.pop(id(weight), None)


class Weights:
    """Those of modules, as they are now."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts, known = parts, summed()
        self._told = [told(weight) for weight in weights_of(parts)]
        for own in self._told:
            if own[0] in known and known[own[0]].told != own:  # written since, as was counted
                known[own[0]] = sums_of(known[own[0]].weight)
        self._summed = [known.get(number) for number, *_ in self._told]

    def are_others(self) -> bool:
        """Whether they hold other numbers, where they are summed; elsewhere, whether there are others, or these were
        written or given other memory."""
        now = weights_of(self._parts)
        if len(now) != len(self._told):
            return True
        changed = [self._is_other(*each) for each in zip(now, self._told, self._summed, strict=True)]
        return any(changed)

    def _is_other(self, weight: Tensor, before: Told, was: Summed | None) -> bool:
        if was is None or was.sums is None:
            return told(weight) != before
        found = sums_of(weight)
        if id(weight) in summed():
            summed()[id(weight)] = found  # later contexts are to know it as it is now
        with as_it_is():
            return found.sums is None or not torch.equal(found.sums, was.sums)


def summed() -> dict[int, Summed]:
    found: dict[int, Summed] = vars(_SUMMED).setdefault("weights", {})
    return found


def weights_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [weight for part in parts for weight in part._parameters.values() if weight is not None]


def told(weight: Tensor) -> Told:
    return id(weight), address_of(weight), version_of(weight)


def sums_of(weight: Tensor) -> Summed:
    """Numbers that change places change a row's sum or a column's.  What is left of whole rows, as all of a small
    weight, is kept as it is."""
    sums = None
    if memory_of(weight) is not None:
        with as_it_is(), torch.inference_mode(weight.is_inference()):
            words, rest = words_of(weight)
            whole = len(words) // CHUNK * CHUNK
            rows = words[:whole].view(-1, CHUNK)
            sums = torch.cat([rows.sum(1), rows.sum(0), words[whole:], rest.long()])
    return Summed(weight=weight, told=told(weight), sums=sums)
