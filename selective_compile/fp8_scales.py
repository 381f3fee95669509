"""The scales of keys and values that are kept as e4m3, found in first steps of a program, of nobody's tokens.

A step computes two requests of `TOKENS` tokens together, or as many as the model has positions, whose ids lie evenly
over the vocabulary, into pools of their own. What these hold then tells the scales (`fp8_rows.scales_for`). As long as
a scale changes, the step is run again: numbers that were too large or too small are known by that alone, and wrong ones
reach the layers behind.

Other weights have other scales: those of before could be too small for them, and cut their keys and values off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selective_compile import fp8_rows
from selective_compile.forks import lock_of_any_process
from selective_compile.step import StepInputs

TOKENS = 256
# The first ones bring numbers that are out of range nearer, by 2**10 each.
MOST_STEPS = 6
BLOCK = 64
# Slots that the two requests take together at most.
SLOTS = 2 * BLOCK * -(-TOKENS // (2 * BLOCK))


class KvScales:
    """Scales [K] float32 of the pools that are kept as e4m3, and of which weights they are.

    They stay where they are, as captured steps read them there. Engines in several threads may share them: measuring
    has numbers of its own, and nothing is written where they come out as they were.
    """

    def __init__(self, heads: Sequence[int], device: torch.device) -> None:
        """Args: heads: K of each of the pools."""
        self.current = tuple(torch.ones(count, dtype=torch.float32, device=device) for count in heads)
        self._of: object = None
        self._lock = lock_of_any_process()

    def are_of(self, version: object) -> bool:
        return not self.current or self._of == version

    def drop(self) -> None:
        """Measure them before the next step, whatever the weights' version tells."""
        with self._lock:  # not while they are measured, perhaps of what was there before
            self._of = None

    def measure(self, version: object, measure: Callable[[Sequence[Tensor]], None]) -> None:
        """Make them those that `measure` finds, from scales of 1: the same for the same weights, whatever was before.

        Args:
            version: of the weights.
        """
        with self._lock:
            if self.are_of(version):
                return
            found = tuple(torch.ones_like(scales) for scales in self.current)
            measure(found)
            self._of = version
            for new, old in zip(found, self.current, strict=True):
                if not torch.equal(new, old):
                    old.copy_(new)


def measure_scales(
    run: Callable[[StepInputs, Sequence[tuple[Tensor, Tensor]]], Tensor],
    pools: Sequence[tuple[Tensor, Tensor]],
    scales: Sequence[Tensor],
    ids: Tensor,
    *,
    num_tables: int,
) -> None:
    """Write the scales [K] of each pool, which are read by `run`.

    Args:
        pools: a key and a value pool for each call; those of e4m3 have scales, in the same order.
        ids: [T] int64 of the step's tokens, for which there is room in the pools.
        num_tables: block tables of a request.
    """
    kept = [pool for pair in pools for pool in pair if pool.dtype == fp8_rows.DTYPE and pool.shape[-1]]
    for _ in range(MOST_STEPS):
        run(_inputs(ids, num_tables), pools)
        found = [fp8_rows.scales_for(pool, old) for pool, old in zip(kept, scales, strict=True)]
        settled = all(torch.equal(new, old) for new, old in zip(found, scales, strict=True))
        for new, old in zip(found, scales, strict=True):
            old.copy_(new)
        if settled:
            break
    for pool, scale in zip(kept, scales, strict=True):
        scale.copy_(torch.where(fp8_rows.largest_of(pool) == 0, 1.0, scale))  # there was nothing to go by


def spread_ids(num_ids: int, max_positions: int | None, device: torch.device) -> Tensor:
    """[T] int64, the ids of the step's tokens."""
    count = min(TOKENS, 2 * (max_positions or TOKENS))
    # Any two neighbours are far apart in the vocabulary.
    return torch.arange(count, device=device) * max(1, int(0.618 * num_ids)) % num_ids


def _inputs(ids: Tensor, num_tables: int) -> StepInputs:
    """Two requests, as one would be a size of its own; each in as many blocks of `BLOCK` slots as it takes."""
    device, half = ids.device, -(-len(ids) // 2)
    places = torch.arange(half, device=device)
    slots = torch.cat([places, -(-half // BLOCK) * BLOCK + places])[: len(ids)]
    table = torch.arange(2 * -(-half // BLOCK), dtype=torch.int32, device=device).view(2, -1)
    ends = torch.tensor([0, half, len(ids)], dtype=torch.int32, device=device)
    return StepInputs(
        input_ids=ids,
        positions=torch.cat([places, places])[: len(ids)],
        cu_seqlens_q=ends,
        context_lens=ends[1:] - ends[:-1],
        block_table=table,
        slot_mapping=slots,
        other_tables=((table, slots),) * (num_tables - 1),
        state_slots=torch.arange(2, device=device),
        logit_rows=ends[1:].long() - 1,
        requests=(0, 1),
    )
