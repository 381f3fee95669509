"""Which request's recurrent states lie in which slot of the state pools, and the pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selective_compile.backend import StateSite
from selective_compile.options import EngineConfig
from selective_compile.runtime.kv_cache import memory_for_pools
from selective_compile.runtime.request_state import RequestState

# Of the memory for pools: what is kept of requests in slots, where keys and values need room too.
SHARE = 0.5


def num_slots(sites: Sequence[StateSite], config: EngineConfig, *, device: torch.device) -> int:
    """How many requests can have their states kept at once: all that may run, or as many as memory allows.

    Raises:
        ValueError: not one request's states fit.
    """
    size = sum(site.num_bytes for site in sites)
    if not size:
        return config.max_requests
    memory = int(SHARE * memory_for_pools(config, device))
    if memory < size:
        raise ValueError(f"the free memory of {device} must hold the states of a request, {size} bytes, got {memory}")
    return min(config.max_requests, memory // size)


def allocate_states(sites: Sequence[StateSite], slots: int) -> tuple[Tensor, ...]:
    """A pool [slots, ...] for each recurrence."""
    return tuple(torch.zeros(slots, *site.shape, dtype=site.dtype, device=site.device) for site in sites)


class StateSlots:
    """A slot for each request that has computed tokens; one that was paused gives its slot up when another needs it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._slots: dict[RequestState, int] = {}

    def of(self, requests: Sequence[RequestState]) -> list[int]:
        """The slots of the requests of a step."""
        for request in requests:
            if request not in self._slots:
                if not self._free:
                    self._take_from_paused(requests)
                self._slots[request] = self._free.pop()
        return [self._slots[request] for request in requests]

    def forget(self, request: RequestState) -> None:
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def _take_from_paused(self, needed: Sequence[RequestState]) -> None:
        # Paused requests are computed anew from their first token on: what their slots hold is of no use.
        for request in [request for request in self._slots if not request.computed and request not in needed]:
            self.forget(request)
        assert self._free, "as many requests run as there are slots"
