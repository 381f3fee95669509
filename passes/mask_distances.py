"""The bias by distance that masks add to scores, read off the probes of a mask's proof (`bias_lookups`).

What is looked up has been given numbers for the proof that no two entries share, so that what a mask adds to a score
tells which of them it is.  For pairs that are seen it must be the entry that one and the same table names for every
pair of that distance, or 0, and beyond some distance the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selective_compile.passes.attention_calls import BiasLookup, MaskFamily
from selective_compile.passes.evaluate import evaluate
from selective_compile.passes.mask_probes import STRIPS_END, Masked
from selective_compile.passes.mask_reads import MaskReads, Unproved
from selective_compile.passes.probe import Probe
from selective_compile.passes.traced_graph import TracedGraph

NOTHING, UNSEEN = -1, -2


def distances_of(call: Masked, reads: MaskReads, probes: Sequence[Probe], family: MaskFamily) -> tuple[int, ...]:
    """For each distance the entry of what is looked up, -1 for 0; the last holds for all farther ones.

    Raises `Unproved`.
    """
    (lookup,) = reads.lookups
    node = lookup.node
    heads = heads_of(lookup)
    if heads not in (1, call.query.heads):
        raise Unproved(node, f"it adds {heads} biases by distance to the scores of {call.query.heads} heads")
    found = torch.full((1 + max(int(probe.distance.max()) for probe in probes),), UNSEEN, device="cpu")
    for probe in probes:
        seen = probe.counted
        distance, entry = probe.distance[seen], entries(reads, probe)[seen]
        if bool((distance < 0).any()):
            raise Unproved(node, "it adds a bias by distance to scores of keys that are behind their query")
        found[distance] = entry
        if not torch.equal(found[distance], entry):
            raise Unproved(node, "what it adds to scores differs between pairs of the same distance")
    return closed(reads, found, bounded=bool(family.window or family.chunk or reads.limit))


def longest_looked_up(traced: TracedGraph, reads: MaskReads) -> int | None:
    """The longest request for all pairs of which there is something to be looked up.

    None if there is none, or it is longer than `STRIPS_END`, up to where a proof looks at all distances.
    """

    def is_within(tokens: int) -> bool:
        real = torch.ones(1, tokens, dtype=torch.int64, device="cpu")
        given = {} if reads.padding is None else {reads.padding: real.to(reads.padding.meta["val"].dtype)}
        index = evaluate(traced, lookup.index, batch=1, tokens=tokens, given=given)
        least = -lookup.rows if lookup.counts_from_end else 0
        return bool(((index >= least) & (index < lookup.rows)).all())

    if not reads.lookups:
        return None
    (lookup,) = reads.lookups
    within, beyond = 1, 2
    while is_within(beyond):
        if beyond > STRIPS_END:
            return None
        within, beyond = beyond, min(beyond * 2, STRIPS_END + 1)
    while beyond - within > 1:
        middle = (within + beyond) // 2
        within, beyond = (middle, beyond) if is_within(middle) else (within, middle)
    return within if within > 1 else None


def heads_of(lookup: BiasLookup) -> int:
    shape = lookup.source.meta["val"].shape
    heads = 1
    for dim in lookup.order[1 if lookup.per_query else 0 : -1]:
        heads *= int(shape[dim]) if isinstance(shape[dim], int) else 1
    return heads


def entries(reads: MaskReads, probe: Probe) -> Tensor:
    """[G, L, L]: the entry whose number is added to the scores of a pair, `NOTHING` where none is."""
    assert probe.looked_up is not None and probe.table is not None
    (lookup,) = reads.lookups
    index, seen = probe.looked_up, probe.counted
    if bool(((index < 0) | (index >= lookup.rows))[seen].any()):
        raise Unproved(lookup.node, "it looks a bias up beyond the end of its table")
    groups, length, _ = index.shape
    index = index.clamp(0, lookup.rows - 1)
    table = probe.table.transpose(0, 1).expand(-1, length, -1)
    number = table.expand(groups, *table.shape).gather(3, index[:, None].expand(-1, len(table), -1, -1)).double()
    number *= reads.lookup_factor
    added = probe.bias if probe.heads else torch.zeros_like(number)
    is_entry, is_nothing = (added == number).all(1), (added == 0).all(1)
    if bool((seen & ~(is_entry | is_nothing)).any()):
        raise Unproved(lookup.node, "it adds more to scores than what it looks up by distance")
    return torch.where(is_entry, index, NOTHING)


def closed(reads: MaskReads, found: Tensor, *, bounded: bool) -> tuple[int, ...]:
    """``found`` up to where it stays the same; ``bounded``: farther pairs than were seen there are none."""
    (lookup,) = reads.lookups
    known = int((found == UNSEEN).int().argmax()) if bool((found == UNSEEN).any()) else len(found)
    near, far = found[:known], found[known:]
    changes = (near != near[-1]).nonzero()
    last = int(changes[-1]) + 1 if len(changes) else 0  # from here on, all are the same
    if bool((far[far != UNSEEN] != near[-1]).any()) or (last >= known - 1 > 0 and not bounded):
        raise Unproved(lookup.node, "what it adds to scores goes on to change with the distance")
    return tuple(near[: last + 1].tolist())
