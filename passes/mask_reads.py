"""What an attention's masks are computed from: positions, one input that hides keys, and tables that can be checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, BiasLookup, KeyMarks, KeySelection
from selective_compile.passes.bias_lookups import is_read_behind, lookups_behind, reads_otherwise
from selective_compile.passes.evaluate import ancestors
from selective_compile.passes.rules_lookup import LOOKUPS
from selective_compile.passes.table_rows import TableRows, rows_at_positions, table_rows
from selective_compile.passes.traced_graph import Input, TracedGraph, is_lost

aten = torch.ops.aten


class Unproved(Exception):
    """The mask equals no family; ``node`` is what to report, and ``ahead`` as of `Refusal`."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.ahead: int | None = None


class BeyondTable(Unproved):
    """A table has no rows for some of the positions that a proof looks at."""


@dataclass(frozen=True, kw_only=True)
class MaskReads:
    """The one token input that hides keys, if any; the slices of tables; the model's buffers; the marks of selected
    keys; what biases are looked up in, of which there is one at most, and what their mask is multiplied by: all of one
    call's masks.

    ``limit``: the longest request that the tables have rows for; None without tables.  ``end``: the longest that biases
    can be looked up for, if there is one.  ``steps``: masks that add nothing, or numbers far below
    (`mask_probes.steps_of`).  ``numbers``: what proofs look biases up in, for requests of that length.
    """

    padding: fx.Node | None = None
    rows: dict[fx.Node, TableRows] = field(default_factory=dict)
    buffers: tuple[Input, ...] = ()
    marks: tuple[KeyMarks, ...] = ()
    lookups: tuple[BiasLookup, ...] = ()
    lookup_factor: float = 1.0
    end: int | None = None
    steps: frozenset[fx.Node] = frozenset()
    numbers: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def limit(self) -> int | None:
        ends = () if self.end is None else (self.end,)
        return min((*ends, *(rows.limit for rows in self.rows.values())), default=None)

    def behind(self, node: fx.Node) -> list[fx.Node]:
        """What a mask is computed from, not looking behind the marks of selected keys and what biases are made of."""
        return ancestors(node, self.stood_in_for)

    @property
    def stood_in_for(self) -> frozenset[fx.Node]:
        """What proofs have values of their own for."""
        return frozenset({*(mark.node for mark in self.marks), *(lookup.source for lookup in self.lookups)})


def mask_reads(traced: TracedGraph, call: AttentionCall | KeySelection, read_otherwise: set[fx.Node]) -> MaskReads:
    """``read_otherwise``: `used_outside_masks`.

    Raises `Unproved` where a mask depends on what the tokens are, on two inputs, on a weight, or on a look-up.
    """
    found: set[fx.Node] = set()
    rows: dict[fx.Node, TableRows] = {}
    buffers: list[Input] = []
    tokens = {given.node for given in traced.tokens()}
    kept = {given.node: given for given in traced.inputs if given.is_buffer}
    marks = {mark.node: mark for selection in traced.selections for mark in selection.marks}
    marked: list[KeyMarks] = []
    lookups = lookups_behind(traced, [term.node for term in call.masks])
    if len(lookups) > 1 or (lookups and isinstance(call, KeySelection)):
        raise Unproved(lookups[0].node, "its masks look biases up in several places, or those of a selection of keys")
    for lookup in lookups:
        others = (reads_otherwise(lookup, term.node) for term in call.masks)
        if (other := next(filter(None, others), None)) is not None:
            raise Unproved(other, "it does more with a bias that is looked up, or what it is looked up in, than add it")
    looked_up_in = {lookup.source for lookup in lookups}
    known = looked_up_in | {lookup.node for lookup in lookups}
    for term in call.masks:
        if term.node not in traced.axes:
            raise Unproved(term.node, "its mask could not be followed back to positions")
        for node in ancestors(term.node, frozenset(marks) | looked_up_in):
            if node in known:
                continue
            if node in marks:
                marked.append(marks[node])
            elif node in tokens:
                found.add(node)
            elif is_lost(traced, node):
                raise Unproved(term.node, f"its mask reads a constant that the trace does not hold ({node.name})")
            elif node in kept:
                buffers.append(kept[node])
            elif (read := rows_read(traced, node)) is not None:
                rows[node] = read
            elif reads_table(traced, node):
                raise Unproved(term.node, f"its mask reads a table or a weight ({node.name})")
            elif node in traced.sequence_nodes or node.target is aten.embedding.default:
                raise Unproved(node, "its mask depends on what the tokens are")
    if len(found) > 1:
        raise Unproved(call.masks[0].node, f"its masks depend on several inputs: {sorted(n.name for n in found)}")
    if found & read_otherwise:
        raise Unproved(call.masks[0].node, "the input that hides keys is used outside of masks as well")
    return MaskReads(
        padding=found.pop() if found else None,
        rows=rows,
        buffers=tuple(dict.fromkeys(buffers)),
        marks=tuple(dict.fromkeys(marked)),
        lookups=lookups,
        lookup_factor=next((term.factor for term in call.masks if is_read_behind(lookups, term.node)), 1.0),
    )


def rows_read(traced: TracedGraph, node: fx.Node) -> TableRows | None:
    sliced = table_rows(node, traced.axes, traced.sizes)
    return rows_at_positions(node, traced.axes) if sliced is None else sliced


def used_outside_masks(traced: TracedGraph) -> set[fx.Node]:
    """Inputs whose values reach an output by a way that leads through no mask."""
    masks = {term.node for call in traced.calls for term in call.masks}
    reached = ancestors(traced.output_node, frozenset(masks))
    return {node for node in reached if node.op == "placeholder"} - masks


def reads_table(traced: TracedGraph, node: fx.Node) -> bool:
    """A parameter, which training changes, or a look-up in a constant: what it holds elsewhere no probe may see, unless
    all requests look up the same, as each head its slope."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("val"), torch.Tensor)
    if node in traced.axes and traced.axes[node].is_constant:
        return False
    by_slice = node.target is aten.slice.Tensor and not traced.axes[node].is_constant
    if getattr(node.target, "overloadpacket", None) not in LOOKUPS and not by_slice:
        return False
    table = node.args[0]
    return isinstance(table, fx.Node) and table.meta["val"].numel() > 1 and traced.axes[table].is_constant
