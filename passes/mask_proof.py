"""Pass 4: prove what each attention's mask is.  An analysis: fills ``call.family`` or refuses.

A mask that marking (pass 2) could follow is a function of the two positions it names and of the padding input.  So it
is evaluated on probes (`mask_probes`) and must equal a family on every one of them:

* the mask's own graph on short batches, dense, with random paddings;
* the same function on strips of neighbouring positions up to ``STRIPS_END``, with random paddings;
* the same function on chosen far positions: around every constant in the mask's graph, and powers of two;
* on every pair of the first ``TRIANGLE`` positions, on every position up to ``FARTHEST`` with a few others, and on
  pairs of positions drawn at random, so that every distance and every key is looked at;
* if some distance is hidden, on positions that close in on the smallest such distance, which is the window;
* if a token does not see the one before it, around multiples of its position, which is the chunk;
* if a token sees a later one, on positions that close in on the first one that is hidden from those in front of it,
  which is the end of the prefix;
* if tables are read by slices of rows, as a triangle in a buffer is, every pair of positions that they have rows for;
* if it reads which keys were selected (`selections`), each of these twice, with all keys selected and with random ones:
  it must hide those that are not selected and do nothing else.

Only real queries (padding input not 0) need to agree.  Families: causal, within a window, within chunks, both, or with
a prefix, whose tokens all queries see, and with a linear bias for each head (`mask_slopes`) or a bias that is looked up
by distance (`mask_distances`).  Refused with its source
line: what depends on token content, on a weight, on a look-up in a table, on two paddings, or equals no family.  A
proof from tables bounds requests by their rows, one of a bias that overflows by where it does, and one from buffers of
the model holds as long as these stay (``traced.proved_from``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, KeySelection, MaskFamily, Operand
from selective_compile.passes.evaluate import constants_in
from selective_compile.passes.fingerprint import Fingerprints
from selective_compile.passes.mask_distances import distances_of, longest_looked_up
from selective_compile.passes.mask_probes import (
    NO_REQUEST,
    Masked,
    dense_probes,
    far_positions,
    far_probe,
    scattered_probes,
    steps_of,
    strip_probes,
    tile_probes,
    triangle_probes,
    within,
)
from selective_compile.passes.mask_reads import BeyondTable, MaskReads, Unproved, mask_reads, used_outside_masks
from selective_compile.passes.mask_slopes import longest_held, slopes_of
from selective_compile.passes.probe import Probe
from selective_compile.passes.score_chain import REPLACED
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
CHUNKS_PROBED = (1, 2, 3, 5, 8, 64, 1000)
NOWHERE = 2**62  # beyond every distance
FAINT = -100.0  # whose exponential is none of float32's normal numbers: a trial has to tell whether so little hides


def prove_masks(traced: TracedGraph) -> int:
    """Classify every call's mask; refuses what equals no family.  Returns the number proved."""
    proved: dict[Any, MaskFamily] = {}
    alike = Fingerprints(traced)
    selected_by = {mark: selection for selection in traced.selections for mark in selection.marks}
    masked: list[Masked] = [*traced.selections, *traced.calls]
    read_otherwise = used_outside_masks(traced)
    for call in masked:
        key = (
            call.causal_flag,
            call.query.heads,
            *((alike.of(t.node), t.kind, t.factor, t.fill, t.pair) for t in call.masks),
        )
        try:
            reads = mask_reads(traced, call, read_otherwise)
            if key not in proved:
                proved[key] = prove(traced, call, reads)
            call.family = proved[key]
            if isinstance(call, KeySelection) or reads.marks:
                require_whole(call, proved[key])
            if isinstance(call, AttentionCall):
                call.selection = only_one(call, [selected_by[mark] for mark in reads.marks])
                look_up(call, reads)
            traced.proved_from += [given for given in reads.buffers if given not in traced.proved_from]
            if reads.limit is not None:
                traced.bound(reads.limit)
        except Unproved as failure:
            traced.refuse(failure.node, f"mask of {call.name}: {failure}", failure.ahead)
    refuse_different_paddings(traced)
    return sum(call.family is not None for call in traced.calls)


def look_up(call: AttentionCall, reads: MaskReads) -> None:
    """Fill in what the call's biases by distance are looked up in."""
    for lookup in reads.lookups:
        call.lookup, call.lookup_factor = lookup, reads.lookup_factor


def require_whole(call: Masked, family: MaskFamily) -> None:
    """A query's selected keys are among all those in front of it, so all of these must be there to attend to."""
    node = call.masks[0].node if call.masks else call.output
    biased = family.distances or (family.slopes and isinstance(call, KeySelection))
    if isinstance(call, AttentionCall) and isinstance(call.sinks, Operand):
        raise Unproved(node, "no kernel has sinks of each token beside a selection of keys")
    if family.window or family.chunk or family.prefix or biased:
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
    """Raises `Unproved`."""
    try:
        return proved_on_probes(traced, call, reads)
    except BeyondTable:
        end = longest_looked_up(traced, reads)
        if end is None:
            raise
    traced.bound(end)
    return proved_on_probes(traced, call, replace(reads, end=end))


def proved_on_probes(traced: TracedGraph, call: Masked, reads: MaskReads) -> MaskFamily:
    reads = replace(reads, steps=steps_of(traced, call, reads))
    probes = list(dense_probes(traced, call, reads))
    if call.masks:
        values: Any = {given.node: given.example for given in reads.buffers}
        constants = {c for term in call.masks for c in constants_in(term.node, values, reads.behind(term.node))}
        if max(constants, default=0) >= NO_REQUEST:  # as a number that hides is, or a window that hides nothing
            traced.bound(NO_REQUEST)
        probes += strip_probes(traced, call, reads, max(probe.heads for probe in probes) or 1)
        probes.append(far_probe(traced, call, reads, within(reads, far_positions(constants))))
        heads = max(probe.heads for probe in probes) or 1
        if reads.rows:
            probes += tile_probes(traced, call, reads, heads)
        else:
            probes += triangle_probes(traced, call, reads, heads)
            probes += scattered_probes(traced, call, reads, heads)
    try:
        return judged(traced, call, reads, probes)
    except Unproved as failure:
        failure.ahead = first_ahead(probes)
        raise


def judged(traced: TracedGraph, call: Masked, reads: MaskReads, probes: list[Probe]) -> MaskFamily:
    """The family that the mask is on all ``probes``, and on those that this adds.  Raises `Unproved`."""
    chunk = chunk_of(probes)
    if chunk:
        multiples = [chunk * k for k in CHUNKS_PROBED]
        probes.append(far_probe(traced, call, reads, within(reads, far_positions(multiples))))
    window = prefix = 0
    if not reproduces(probes, window, chunk, prefix):  # as most masks are
        window = close_in(traced, call, reads, probes, chunk)
        prefix = prefix_of(traced, call, reads, probes)
        if not reproduces(probes, window, chunk, prefix):
            node = made_at(traced, call.masks[0].node) if call.masks else call.output
            tried = "causal, windows, chunks and prefixes were tried"
            raise Unproved(node, f"no mask family reproduces it ({tried}); {first_difference(probes)}")
    held = longest_held(probes)
    if held is not None:
        traced.bound(held)
    found = MaskFamily(window=window, padding=reads.padding, chunk=chunk, prefix=prefix)
    if reads.lookups:
        found = replace(found, distances=distances_of(call, reads, probes, found))
    else:
        found = replace(found, slopes=slopes_of(call, probes))
    if prefix and (window or chunk):
        raise Unproved(made_at(traced, call.masks[0].node), f"no kernel has a prefix beside windows or chunks: {found}")
    return found


def chunk_of(probes: list[Probe]) -> int:
    """The first position from which the token before is not seen, though it is no padding; 0 if there is none."""
    found = []
    for probe in probes:
        queries, keys = probe.positions[:, 1:], probe.positions[:, :-1]
        cut = (queries - keys == 1) & probe.real_queries[:, 1:] & ~probe.hidden_keys[:, :-1]
        found += queries[cut & ~probe.allowed.diagonal(-1, 1, 2)].tolist()
    first = min(found, default=0)
    return 0 if first == 1 else first  # a window of 1 hides the token before from every token


def first_ahead(probes: list[Probe]) -> int | None:
    """The first position that sees a later one, but for what is added to its score; None if none does."""
    found = []
    for probe in probes:
        seen = between_real(probe) & (probe.distance < 0) & probe.allowed
        if probe.heads:
            seen &= probe.bias.amax(1) > FAINT
        found += probe.positions[seen.any(2)].tolist()
    return min(found, default=None)


def made_at(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """Where a mask was put together, not where it was negated, cast or expanded: the line to look at."""
    while True:
        parents = [parent for parent in node.all_input_nodes if parent in traced.axes]
        if len(parents) != 1 or not traced.axes[parents[0]].is_pair:
            return node
        (node,) = parents


def close_in(traced: TracedGraph, call: Masked, reads: MaskReads, probes: list[Probe], chunk: int) -> int:
    """The smallest distance that the mask hides within a chunk, 0 if it hides none; adds the probes that it takes."""
    found = [seen_and_hidden(probe, chunk) for probe in probes]
    while True:
        seen, hidden = max(far for far, _ in found), min(near for _, near in found)
        if hidden == NOWHERE or hidden <= seen + 1:
            return hidden % NOWHERE
        probes.append(far_probe(traced, call, reads, within(reads, far_positions([(seen + hidden) // 2]))))
        found.append(seen_and_hidden(probes[-1], chunk))


def prefix_of(traced: TracedGraph, call: Masked, reads: MaskReads, probes: list[Probe]) -> int:
    """The first position that the mask hides from those in front of it, 0 if it hides all such or none; adds the probes
    that it takes."""
    if not any(bool((probe.allowed & between_real(probe) & (probe.distance < 0)).any()) for probe in probes):
        return 0
    found = [seen_and_hidden_behind(probe) for probe in probes]
    while True:
        seen, hidden = max(last for last, _ in found), min(first for _, first in found)
        if hidden == NOWHERE or hidden <= seen + 1:
            break
        probes.append(far_probe(traced, call, reads, within(reads, far_positions([(seen + hidden) // 2]))))
        found.append(seen_and_hidden_behind(probes[-1]))
    if hidden == NOWHERE:
        return 0
    probes.append(far_probe(traced, call, reads, within(reads, far_positions([hidden]))))
    return hidden


def seen_and_hidden_behind(probe: Probe) -> tuple[int, int]:
    """The last position that a real token in front of it sees, 0 if none does, and the first that is hidden from one,
    `NOWHERE` if none is; of real tokens."""
    behind = between_real(probe) & (probe.distance < 0)
    keys = probe.positions[:, None, :].expand_as(behind)
    return last_and_first(keys, behind, probe.allowed)


def seen_and_hidden(probe: Probe, chunk: int) -> tuple[int, int]:
    """The largest distance back that is seen, 0 if none, and the smallest that is hidden, `NOWHERE` if none is; of
    real tokens in a chunk."""
    back = between_real(probe) & same_chunk(probe, chunk) & (probe.distance > 0)
    return last_and_first(probe.distance, back, probe.allowed)


def between_real(probe: Probe) -> torch.Tensor:
    """[G, L, L]: neither the query nor the key is padding."""
    return probe.real_queries[:, :, None] & ~probe.hidden_keys[:, None, :]


def last_and_first(numbers: torch.Tensor, counted: torch.Tensor, allowed: torch.Tensor) -> tuple[int, int]:
    """The largest number that is allowed and the smallest that is not, of those that are counted."""
    seen, hidden = counted & allowed, counted & ~allowed
    last = int(numbers.masked_fill(~seen, 0).max()) if seen.any() else 0
    return last, int(numbers.masked_fill(~hidden, NOWHERE).min()) if hidden.any() else NOWHERE


def same_chunk(probe: Probe, chunk: int) -> torch.Tensor:
    if not chunk:
        return torch.ones((), dtype=torch.bool, device="cpu")
    number = probe.positions // chunk
    return number[:, :, None] == number[:, None, :]


def reproduces(probes: list[Probe], window: int, chunk: int, prefix: int) -> bool:
    """Whether that family is what the mask is, on every probe."""
    return all(agrees(probe, window, chunk, prefix) for probe in probes)


def agrees(probe: Probe, window: int, chunk: int, prefix: int) -> bool:
    distance = probe.distance
    family = distance >= 0
    if window:
        family &= distance < window
    if chunk:
        family &= same_chunk(probe, chunk)
    if prefix:
        family |= (probe.positions < prefix)[:, None, :]
    family &= ~probe.hidden_keys[:, None, :]
    return not bool(((probe.allowed != family) & probe.real_queries[:, :, None]).any())


def first_difference(probes: list[Probe]) -> str:
    """Where the mask departs from plain causal, in words."""
    for probe in probes:
        wrong = probe.allowed != ((probe.distance >= 0) & ~probe.hidden_keys[:, None, :])
        wrong &= probe.real_queries[:, :, None]
        if bool(wrong.any()):
            g, i, j = wrong.nonzero()[0].tolist()
            verb = "sees" if bool(probe.allowed[g, i, j]) else "does not see"
            added = float(probe.bias[g, :, i, j].min()) if probe.heads else 0.0
            by = f", to whose score {added:g} is added, where at most {REPLACED:g} hides it" if added < 0 else ""
            first, second = int(probe.positions[g, i]), int(probe.positions[g, j])
            return f"the token at position {first} {verb} the one at {second}{by}"
    return "they agree on no probe"
