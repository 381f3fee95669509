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
CHUNK = 2048  # words that have a sum


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A weight, what tells of it without a look at its numbers, and sums of these."""

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
        self._parts = parts
        self._told = [told(weight) for weight in weights_of(parts)]
        known = summed()
        for own in self._told:
            if own[0] in known and known[own[0]].told != own:  # written since, as was counted
                known[own[0]] = sums_of(known[own[0]].weight)
        self._summed = {number: known[number] for number, *_ in self._told if number in known}

    def are_others(self) -> bool:
        """Whether there are other ones, or these were written or given other memory; where they are summed, whether
        they hold other numbers, but for such as are the same, in another order, within `CHUNK`."""
        if [told(weight) for weight in weights_of(self._parts)] != self._told:
            return True
        now = {number: sums_of(each.weight) for number, each in self._summed.items()}
        others = {n: each for n, each in now.items() if not alike(each.sums, self._summed[n].sums)}
        summed().update(others)
        return bool(others)


def summed() -> dict[int, Summed]:
    found: dict[int, Summed] = vars(_SUMMED).setdefault("weights", {})
    return found


def weights_of(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [weight for part in parts for weight in part._parameters.values() if weight is not None]


def told(weight: Tensor) -> Told:
    return id(weight), address_of(weight), version_of(weight)


def sums_of(weight: Tensor) -> Summed:
    """One that is made of others has none."""
    sums = None
    if memory_of(weight) is not None:
        with as_it_is(), torch.inference_mode(weight.is_inference()):
            words, rest = words_of(weight)
            whole = len(words) // CHUNK * CHUNK
            sums = torch.cat([words[:whole].view(-1, CHUNK).sum(-1), words[None, whole:].sum(-1), rest.long()])
    return Summed(weight=weight, told=told(weight), sums=sums)


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
