"""What a flat graph is given beside the model's own inputs: positions, metadata of attention, pools and state slots."""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, KeySelection
from selective_compile.passes.flat_examples import STATE_SLOTS
from selective_compile.passes.flat_graph import reach_of
from selective_compile.passes.traced_graph import TracedGraph
from selective_compile.step import GENERATED, reaches

aten = torch.ops.aten
PAGED = ("cu_seqlens_q", "context_lens", "block_table", "slot_mapping")
UNPAGED = ("cu_seqlens_q",)


class FlatInputs:
    """Their placeholders, made behind those that the graph has.

    Attributes:
        reaches: of the pools' groups, each with a block table and slots of its own.
        metadata: names of what tells which token is whose, in the order of the placeholders.
        nodes: the placeholders by name.
        generated: which tokens were generated, `[T]` bool; None where no call asks.
    """

    def __init__(self, traced: TracedGraph, *, paged: bool) -> None:
        self.traced, self.graph, self.paged = traced, traced.graph, paged
        found = [*map(reach_of, traced.calls), *map(reach_of, traced.selections)]
        self.reaches = reaches(found) if paged else ()
        self.metadata = (*PAGED, *self.tables(), *([STATE_SLOTS] if traced.recurrences else [])) if paged else UNPAGED
        self.nodes = self.placeholders()
        # Called with padding, a model computes all tokens as those of a prompt.
        marked = paged and any(call.unlimited_steps for call in traced.recurrences)
        self.generated = self.mark() if marked else None

    def tables(self) -> list[str]:
        others = range(1, len(self.reaches))
        return [f"{name}_{group}" for group in others for name in ("block_table", "slot_mapping")]

    def placeholders(self) -> dict[str, fx.Node]:
        last, nodes = [node for node in self.graph.nodes if node.op == "placeholder"][-1], {}
        for name in ("positions", *self.metadata, *(self.pools() if self.paged else [])):
            with self.graph.inserting_after(last):
                last = nodes[name] = self.graph.placeholder(name)
        return nodes

    def pools(self) -> list[str]:
        names = []
        for i, call in enumerate(self.traced.calls):
            names += [f"{kind}_pool_{i}" for kind in (("key",) if call.latent else ("key", "value"))]
        names += [f"index_pool_{i}" for i in range(len(self.traced.selections))]
        return names + [f"state_pool_{i}" for i in range(len(self.traced.recurrences))]

    def mark(self) -> fx.Node:
        with self.graph.inserting_after(next(reversed(self.nodes.values()))):
            mark = self.graph.call_function(aten.bitwise_and.Scalar, (self.nodes["positions"], GENERATED))
        with self.graph.inserting_after(mark):
            return self.graph.call_function(aten.ne.Scalar, (mark, 0))

    def metadata_of(self, call: AttentionCall | KeySelection) -> list[fx.Node]:
        """What the call's operator is given behind its pools."""
        group = self.reaches.index(reach_of(call)) if self.paged else 0
        names = self.metadata[: len(PAGED)]
        if group:
            names = (*PAGED[:2], f"block_table_{group}", f"slot_mapping_{group}")
        return [self.nodes[name] for name in names]

    def keep_positions_if_used(self) -> bool:
        used = bool(self.nodes["positions"].users)
        if not used:
            self.graph.erase_node(self.nodes.pop("positions"))
        return used

    def positions(self) -> fx.Node:
        """[T], without marks."""
        if self.traced.long_numbers is None and self.generated is None:
            return self.nodes["positions"]
        return self.graph.call_function(aten.bitwise_and.Scalar, (self.nodes["positions"], GENERATED - 1))
