"""Pass 4: prove what each attention's mask is.  An analysis: fills ``call.family`` or refuses.

A mask that marking (pass 2) could follow is a function of the two positions it names and of the padding input.  So it
is evaluated on probes and must equal a family on every one of them:

* the mask's own graph on short batches, dense, with random paddings;
* the same function on strips of neighbouring positions up to ``STRIPS_END``, with random paddings;
* the same function on chosen far positions: around every constant in the mask's graph, and powers of two;
* if some distance is hidden, on positions that close in on the smallest such distance, which is the window.

Only real queries (padding input not 0) need to agree.  Families: causal, causal within a window.  Refused with its
source line: what depends on token content, on a constant table, on two paddings, or equals no family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axis, is_symbolic
from selective_compile.passes.evaluate import ancestors, constants_in, evaluate
from selective_compile.passes.positional import at_positions, is_positional_root
from selective_compile.passes.rules_create import reads_own_index
from selective_compile.passes.score_chain import hidden_from
from selective_compile.passes.traced_graph import AttentionCall, MaskFamily, MaskTerm, TracedGraph

aten = torch.ops.aten
DENSE_LENGTHS = (2, 3, 5, 17, 40)
STRIP, STRIPS_END = 256, 4096
FAR_POSITIONS = tuple(range(12)) + tuple(2**k + d for k in range(4, 17) for d in (-1, 0, 1))


class Unproved(Exception):
    """The mask equals no family; ``node`` is what to report."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Allowed pairs of one request: ``allowed[i, j]`` for query position ``query[i]``, key position ``key[j]``."""

    positions: torch.Tensor
    allowed: torch.Tensor
    hidden_keys: torch.Tensor
    real_queries: torch.Tensor


def prove_masks(traced: TracedGraph) -> int:
    """Classify every call's mask; refuses what equals no family.  Returns the number proved."""
    proved: dict[Any, MaskFamily] = {}
    for call in traced.calls:
        key = (call.causal_flag, call.masks)
        try:
            if key not in proved:
                proved[key] = prove(traced, call)
            call.family = proved[key]
        except Unproved as failure:
            traced.refuse(failure.node, f"mask of {call.name}: {failure}")
    refuse_different_paddings(traced)
    return sum(call.family is not None for call in traced.calls)


def refuse_different_paddings(traced: TracedGraph) -> None:
    """Padding removed for one attention is removed for all of them."""
    proved = [call for call in traced.calls if call.family is not None]
    for call in proved:
        if call.family.padding is not proved[0].family.padding:  # type: ignore[union-attr]
            traced.refuse(
                call.output, "its keys are hidden by another input than those of other attentions, or by none"
            )


def prove(traced: TracedGraph, call: AttentionCall) -> MaskFamily:
    padding = padding_input(traced, call)
    probes = list(dense_probes(traced, call, padding))
    if call.masks:
        constants = {c for term in call.masks for c in constants_in(term.node)}
        probes += strip_probes(traced, call, padding)
        probes.append(far_probe(traced, call, padding, far_positions(constants)))
    window = close_in(traced, call, padding, probes)
    if all(agrees(probe, window) for probe in probes):
        return MaskFamily(window=window, padding=padding)
    node = made_at(traced, call.masks[0].node) if call.masks else call.output
    raise Unproved(node, f"no mask family reproduces it (causal and windows were tried); {first_difference(probes)}")


def made_at(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """Where a mask was put together, not where it was negated, cast or expanded: the line to look at."""
    while True:
        parents = [parent for parent in node.all_input_nodes if parent in traced.axes]
        if len(parents) != 1 or not traced.axes[parents[0]].is_pair:
            return node
        (node,) = parents


def padding_input(traced: TracedGraph, call: AttentionCall) -> fx.Node | None:
    """The one token input that the masks depend on; refuses masks that read anything but positions and that input."""
    found: set[fx.Node] = set()
    tokens = {given.node for given in traced.tokens()}
    for term in call.masks:
        if term.node not in traced.axes:
            raise Unproved(term.node, "its mask could not be followed back to positions")
        for node in ancestors(term.node):
            if node in tokens:
                found.add(node)
            elif reads_table(node):
                raise Unproved(term.node, f"its mask reads the table, weight or buffer {node.name}")
            elif node in traced.sequence_nodes or node.target is aten.embedding.default:
                raise Unproved(node, "its mask depends on what the tokens are")
    if len(found) > 1:
        raise Unproved(call.masks[0].node, f"its masks depend on several inputs: {sorted(n.name for n in found)}")
    if found & used_outside_masks(traced):
        raise Unproved(call.masks[0].node, "the input that hides keys is used outside of masks as well")
    return found.pop() if found else None


def used_outside_masks(traced: TracedGraph) -> set[fx.Node]:
    """Inputs whose values reach an output by a way that leads through no mask."""
    masks = {term.node for call in traced.calls for term in call.masks}
    sizes = {node for node in traced.graph.nodes if is_symbolic(node.meta.get("val"))}
    reached = ancestors(traced.output_node, frozenset(masks | sizes))
    return {node for node in reached if node.op == "placeholder"} - masks


def reads_table(node: fx.Node) -> bool:
    """A weight or buffer, which may change, or a constant of more than one element."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        node.op == "placeholder" or (node.op == "get_attr" and value.numel() > 1)
    )


def dense_probes(traced: TracedGraph, call: AttentionCall, padding: fx.Node | None) -> Iterator[Probe]:
    generator = torch.Generator().manual_seed(0)
    batch = 3 if traced.sizes.batch is not None else 1
    for length in DENSE_LENGTHS:
        for round_ in range(1 if padding is None else 3):
            real = torch.ones(batch, length, dtype=torch.int64)
            if round_:
                real = torch.randint(0, 2, (batch, length), generator=generator)
                real[:, length // 2] = 1
            given = {} if padding is None else {padding: real.to(padding.meta["val"].dtype)}
            allowed = combined(traced, call, batch, length, given)
            for row in range(batch):
                yield Probe(
                    positions=torch.arange(length),
                    allowed=allowed[row],
                    hidden_keys=real[row] == 0,
                    real_queries=real[row] != 0,
                )


def strip_probes(traced: TracedGraph, call: AttentionCall, padding: fx.Node | None) -> Iterator[Probe]:
    generator = torch.Generator().manual_seed(1)
    for start in range(0, STRIPS_END, STRIP):
        positions = torch.cat([torch.arange(min(start, 4)), torch.arange(start, start + STRIP)])
        real = torch.rand(len(positions), generator=generator) < 0.9
        yield far_probe(traced, call, padding, positions, real)


def far_probe(
    traced: TracedGraph,
    call: AttentionCall,
    padding: fx.Node | None,
    positions: torch.Tensor,
    real: torch.Tensor | None = None,
) -> Probe:
    """The mask at chosen positions, in order; reads at a token's own index are then reads at its place here."""
    length = len(positions)
    if padding is None or real is None:
        real = torch.ones(length, dtype=torch.bool)
    given: dict[fx.Node, Any] = {}
    for node in {n for term in call.masks for n in ancestors(term.node)}:
        if node in traced.axes and is_positional_root(traced.axes[node], node):
            given[node] = at_positions(traced, node, positions)
    if padding is not None:
        given[padding] = real[None].to(padding.meta["val"].dtype)

    def own_index(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not reads_own_index(node, traced.axes):
            return args
        nodes: Any = node.args[1]
        return (
            args[0],
            [i if i is None else places_of(traced.axes[n], i) for n, i in zip(nodes, args[1], strict=True)],
        )

    allowed = combined(traced, call, 1, length, given, own_index)
    return Probe(positions=positions, allowed=allowed[0], hidden_keys=~real, real_queries=real)


def places_of(axes: Any, index: torch.Tensor) -> torch.Tensor:
    """An index that numbers tokens or requests, counted from 0 instead of by position."""
    return index if axes.iota is None else torch.arange(index.numel()).reshape(index.shape)


def far_positions(constants: Iterable[int]) -> torch.Tensor:
    near = [c * k + d for c in constants for k in (1, 2) for d in (-2, -1, 0, 1, 2)]
    chosen = sorted({p for p in (*FAR_POSITIONS, *near) if p >= 0})
    return torch.tensor(chosen, dtype=torch.int64)


def combined(
    traced: TracedGraph, call: AttentionCall, batch: int, length: int, given: dict[fx.Node, Any], instead: Any = None
) -> torch.Tensor:
    """``[batch, length, length]``: the pairs that the causal flag and every mask of the call allow, for all heads."""
    allowed = torch.ones(batch, length, length, dtype=torch.bool)
    if call.causal_flag:
        allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    for term in call.masks:
        try:
            value = evaluate(traced, term.node, batch=batch, tokens=length, given=given, instead=instead)
        except IndexError as error:
            raise Unproved(term.node, "its mask reads a table beyond its end") from error
        allowed &= one_for_all_heads(traced, term, kept(term, value))
    return allowed


def one_for_all_heads(traced: TracedGraph, term: MaskTerm, value: torch.Tensor) -> torch.Tensor:
    """``[batch or 1, length or 1, length or 1]`` of a mask ``[..., length, length]`` that is the same for all heads."""
    leading = traced.axes[term.node].dims[:-2]
    batch = [dim for dim, factors in enumerate(leading) if Axis.BATCH in factors]
    if len(batch) > 1 or any(leading[dim] != (Axis.BATCH,) for dim in batch):
        raise Unproved(term.node, "its mask must have requests in a dimension of their own")
    rows = value.movedim(batch[0], 0) if batch else value[None]
    rows = rows.reshape(rows.shape[0], -1, *((1, 1) + tuple(value.shape))[-2:])
    if not bool((rows == rows[:, :1]).all()):
        raise Unproved(term.node, "its mask differs between heads")
    return rows[:, 0]


def kept(term: MaskTerm, value: torch.Tensor) -> torch.Tensor:
    if term.kind == "add":
        hidden = value <= hidden_from(value.dtype)
        if not bool((hidden | (value == 0)).all()):
            raise Unproved(term.node, "it adds numbers to the scores that are neither 0 nor hide a key")
        return ~hidden
    return value if term.kind == "keep" else ~value


def close_in(traced: TracedGraph, call: AttentionCall, padding: fx.Node | None, probes: list[Probe]) -> int:
    """The smallest distance that the mask hides, 0 if it hides none; adds the probes that it takes to find it."""
    while True:
        seen = max(int(distances(probe, probe.allowed).max()) for probe in probes)
        found = torch.cat([distances(probe, ~probe.allowed) for probe in probes])
        hidden = found[found > seen]
        if not hidden.numel():
            return 0
        nearest = int(hidden.min())
        if nearest == seen + 1:
            return nearest
        probes.append(far_probe(traced, call, padding, far_positions([(seen + nearest) // 2])))


def distances(probe: Probe, pairs: torch.Tensor) -> torch.Tensor:
    """How far back the keys of ``pairs`` lie, of those that are not padding; 0 is always among them."""
    distance = probe.positions[:, None] - probe.positions[None, :]
    real = probe.real_queries[:, None] & ~probe.hidden_keys[None, :]
    return torch.cat([distance[pairs & real & (distance > 0)], torch.zeros(1, dtype=torch.int64)])


def agrees(probe: Probe, window: int) -> bool:
    distance = probe.positions[:, None] - probe.positions[None, :]
    family = (distance >= 0) & ((distance < window) if window else True) & ~probe.hidden_keys[None, :]
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
