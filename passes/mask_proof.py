"""Pass 4: prove what each attention's mask is.  An analysis: fills ``call.family`` or refuses.

A mask that marking (pass 2) could follow is a function of the two positions it names and of the padding input.  So it
is evaluated on probes (`mask_probes`) and must equal a family on every one of them:

* the mask's own graph on short batches, dense, with random paddings;
* the same function on strips of neighbouring positions up to ``STRIPS_END``, with random paddings;
* the same function on chosen far positions: around every constant in the mask's graph, and powers of two;
* if some distance is hidden, on positions that close in on the smallest such distance, which is the window;
* if a token does not see the one before it, around multiples of its position, which is the chunk;
* if tables are read by slices of rows, as a triangle in a buffer is, every pair of positions that they have rows for;
* if it reads which keys were selected (`selections`), each of these twice, with all keys selected and with random ones:
  it must hide those that are not selected and do nothing else.

Only real queries (padding input not 0) need to agree.  Families: causal, within a window, within chunks, both, and with
a linear bias for each head.  Refused with its source line: what depends on token content, on a weight, on a look-up in
a table, on two paddings, or equals no family.  A proof from tables bounds requests by their rows, and one from buffers
of the model holds as long as these stay (``traced.proved_from``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.evaluate import constants_in
from selective_compile.passes.fingerprint import Fingerprints
from selective_compile.passes.mask_probes import (
    Masked,
    Probe,
    dense_probes,
    far_positions,
    far_probe,
    strip_probes,
    tile_probes,
    within,
)
from selective_compile.passes.mask_reads import MaskReads, Unproved, mask_reads
from selective_compile.passes.traced_graph import AttentionCall, KeySelection, MaskFamily, TracedGraph

aten = torch.ops.aten
# By how much a bias may depart from a straight line, in units of the rounding of its largest value.
ROUNDINGS = 4
CHUNKS_PROBED = (1, 2, 3, 5, 8, 64, 1000)


def prove_masks(traced: TracedGraph) -> int:
    """Classify every call's mask; refuses what equals no family.  Returns the number proved."""
    proved: dict[Any, MaskFamily] = {}
    alike = Fingerprints(traced)
    selected_by = {mark: selection for selection in traced.selections for mark in selection.marks}
    masked: list[Masked] = [*traced.selections, *traced.calls]
    for call in masked:
        key = (call.causal_flag, call.query.heads, *((alike.of(t.node), t.kind, t.factor) for t in call.masks))
        try:
            reads = mask_reads(traced, call)
            if key not in proved:
                proved[key] = prove(traced, call, reads)
            call.family = proved[key]
            if isinstance(call, KeySelection) or reads.marks:
                require_whole(call, proved[key])
            if isinstance(call, AttentionCall):
                call.selection = only_one(call, [selected_by[mark] for mark in reads.marks])
            traced.proved_from += [given for given in reads.buffers if given not in traced.proved_from]
            if reads.limit is not None:
                traced.bound(reads.limit)
        except Unproved as failure:
            traced.refuse(failure.node, f"mask of {call.name}: {failure}")
    refuse_different_paddings(traced)
    return sum(call.family is not None for call in traced.calls)


def require_whole(call: Masked, family: MaskFamily) -> None:
    """A query's selected keys are among all those in front of it, so all of these must be there to attend to."""
    node = call.masks[0].node if call.masks else call.output
    if family.window or family.chunk or (family.slopes and isinstance(call, KeySelection)):
        raise Unproved(node, f"what is selected among and what is attended to must be all keys, got {family}")


def only_one(call: AttentionCall, found: list[KeySelection]) -> KeySelection | None:
    """The selection whose marks a call's masks read; None if they read none."""
    if any(selection is not found[0] for selection in found):
        raise Unproved(call.masks[0].node, "its masks read several selections of keys")
    return found[0] if found else None


def refuse_different_paddings(traced: TracedGraph) -> None:
    """Padding removed for one attention is removed for all of them."""
    masked: list[Masked] = [*traced.calls, *traced.selections]
    proved = [call for call in masked if call.family is not None]
    for call in proved:
        if call.family.padding is not proved[0].family.padding:  # type: ignore[union-attr]
            traced.refuse(
                call.output, "its keys are hidden by another input than those of other attentions, or by none"
            )


def prove(traced: TracedGraph, call: Masked, reads: MaskReads) -> MaskFamily:
    probes = list(dense_probes(traced, call, reads))
    if call.masks:
        values: Any = {given.node: given.example for given in reads.buffers}
        constants = {c for term in call.masks for c in constants_in(term.node, values, reads.behind(term.node))}
        probes += strip_probes(traced, call, reads)
        probes.append(far_probe(traced, call, reads, within(reads, far_positions(constants))))
    if reads.rows:
        probes += tile_probes(traced, call, reads, max(len(probe.bias) for probe in probes) or 1)
    chunk = chunk_of(probes)
    if chunk:
        multiples = [chunk * k for k in CHUNKS_PROBED]
        probes.append(far_probe(traced, call, reads, within(reads, far_positions(multiples))))
    window = close_in(traced, call, reads, probes, chunk)
    if not all(agrees(probe, window, chunk) for probe in probes):
        node = made_at(traced, call.masks[0].node) if call.masks else call.output
        tried = "causal, windows and chunks were tried"
        raise Unproved(node, f"no mask family reproduces it ({tried}); {first_difference(probes)}")
    return MaskFamily(window=window, padding=reads.padding, chunk=chunk, slopes=slopes_of(call, probes))


def chunk_of(probes: list[Probe]) -> int:
    """The first position from which the token before is not seen, though it is no padding; 0 if there is none."""
    found = []
    for probe in probes:
        next_to = (probe.positions[1:] - probe.positions[:-1] == 1) & probe.real_queries[1:] & ~probe.hidden_keys[:-1]
        cut = next_to & ~probe.allowed.diagonal(-1)
        found += probe.positions[1:][cut].tolist()
    first = min(found, default=0)
    return 0 if first == 1 else first  # a window of 1 hides the token before from every token


def slopes_of(call: Masked, probes: list[Probe]) -> tuple[float, ...]:
    """For each query head, the slope of the bias over keys; empty without one.

    A constant for all keys of a query changes none of its weights.
    """
    heads = max(len(probe.bias) for probe in probes)
    if not heads:
        return ()
    slopes = max((slope_on(probe) for probe in probes if len(probe.bias)), key=lambda found: found[0])[1]
    node = call.masks[0].node
    added = [term.node.meta["val"].dtype for term in call.masks if term.kind == "add"]
    rounding = max(torch.finfo(dtype).eps for dtype in (torch.float32, *added) if dtype.is_floating_point)
    for probe in probes:
        line = slopes[:, None, None] * (probe.positions[None, :] - probe.positions[:, None])
        bias = probe.bias if len(probe.bias) else torch.zeros_like(line)
        apart = ((bias - bias.diagonal(dim1=1, dim2=2)[:, :, None]) - line)[:, counted(probe)]
        if apart.numel() and float(apart.abs().max()) > ROUNDINGS * rounding * max(1e-30, float(bias.abs().max())):
            raise Unproved(node, "it adds numbers to the scores that are no linear function of the distance")
    if len(slopes) not in (1, call.query.heads):
        raise Unproved(node, f"it adds {len(slopes)} biases to the scores of {call.query.heads} heads")
    return tuple(slopes.expand(call.query.heads).tolist()) if bool(slopes.any()) else ()


def slope_on(probe: Probe) -> tuple[int, torch.Tensor]:
    """The distance of the furthest pair of a probe, and the slope of each head between its ends."""
    distance = (probe.positions[:, None] - probe.positions[None, :]).masked_fill(~counted(probe), 0)
    i, j = divmod(int(distance.argmax()), len(probe.positions))
    far = int(distance[i, j])
    return far, (probe.bias[:, i, j] - probe.bias[:, i, i]) / -max(far, 1)


def counted(probe: Probe) -> torch.Tensor:
    """Pairs whose scores matter."""
    return probe.allowed & probe.real_queries[:, None]


def made_at(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """Where a mask was put together, not where it was negated, cast or expanded: the line to look at."""
    while True:
        parents = [parent for parent in node.all_input_nodes if parent in traced.axes]
        if len(parents) != 1 or not traced.axes[parents[0]].is_pair:
            return node
        (node,) = parents


def close_in(traced: TracedGraph, call: Masked, reads: MaskReads, probes: list[Probe], chunk: int) -> int:
    """The smallest distance that the mask hides within a chunk, 0 if it hides none; adds the probes that it takes."""
    while True:
        seen = max(int(distances(probe, probe.allowed, chunk).max()) for probe in probes)
        found = torch.cat([distances(probe, ~probe.allowed, chunk) for probe in probes])
        hidden = found[found > seen]
        if not hidden.numel():
            return 0
        nearest = int(hidden.min())
        if nearest == seen + 1:
            return nearest
        probes.append(far_probe(traced, call, reads, within(reads, far_positions([(seen + nearest) // 2]))))


def distances(probe: Probe, pairs: torch.Tensor, chunk: int) -> torch.Tensor:
    """How far back the keys of ``pairs`` lie, of those that are not padding; 0 is always among them."""
    distance = probe.positions[:, None] - probe.positions[None, :]
    real = probe.real_queries[:, None] & ~probe.hidden_keys[None, :] & same_chunk(probe, chunk)
    return torch.cat([distance[pairs & real & (distance > 0)], torch.zeros(1, dtype=torch.int64)])


def same_chunk(probe: Probe, chunk: int) -> torch.Tensor:
    number = probe.positions // chunk if chunk else torch.zeros_like(probe.positions)
    return number[:, None] == number[None, :]


def agrees(probe: Probe, window: int, chunk: int) -> bool:
    distance = probe.positions[:, None] - probe.positions[None, :]
    family = (distance >= 0) & ((distance < window) if window else True) & ~probe.hidden_keys[None, :]
    family &= same_chunk(probe, chunk)
    return torch.equal(probe.allowed[probe.real_queries], family[probe.real_queries])


def first_difference(probes: list[Probe]) -> str:
    """Where the mask departs from plain causal, in words."""
    for probe in probes:
        distance = probe.positions[:, None] - probe.positions[None, :]
        wrong = (probe.allowed != ((distance >= 0) & ~probe.hidden_keys[None, :])) & probe.real_queries[:, None]
        if bool(wrong.any()):
            i, j = wrong.nonzero()[0].tolist()
            verb = "sees" if bool(probe.allowed[i, j]) else "does not see"
            return f"the token at position {int(probe.positions[i])} {verb} the one at {int(probe.positions[j])}"
    return "they agree on no probe"
