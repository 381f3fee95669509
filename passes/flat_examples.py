"""Symbolic examples of a flat graph's placeholders, with which it is traced once more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, KeySelection, Operand
from selective_compile.passes.flat_graph import reach_of
from selective_compile.passes.normalise import Symbols
from selective_compile.passes.traced_graph import TracedGraph
from selective_compile.step import Reach

STATE_SLOTS = "state_slots"
HINT_TOKENS = 48


class FlatExamples:
    """Those of the placeholders that stay as they were, and of those that flattening has ``made``, by their names."""

    def __init__(
        self, traced: TracedGraph, symbols: Symbols, reaches: Sequence[Reach], made: Collection[fx.Node]
    ) -> None:
        self._traced, self._symbols, self._reaches, self._made = traced, symbols, reaches, made

    def of(self, node: fx.Node) -> Any:
        """A symbolic example of one placeholder of the flat graph."""
        with self._symbols.mode:
            total = self._symbols.size("token", HINT_TOKENS)
            if node in self._made:
                return self._new(node.name, total)
            value = node.meta["val"]
            if node in {given.node for given in self._traced.tokens()}:
                return torch.empty([1, total, *value.shape[2:]], dtype=value.dtype, device=value.device)
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _new(self, name: str, total: Any) -> torch.Tensor:
        device = self._traced.tokens()[0].node.meta["val"].device
        requests = self._symbols.size("requests", 6)
        if name == "positions" or name.startswith("slot_mapping"):
            return torch.empty([total], dtype=torch.int64, device=device)
        if name == "cu_seqlens_q":
            # A symbol of its own: Inductor must find each symbol as the whole size of some input.
            return torch.empty([self._symbols.size("boundaries", 7)], dtype=torch.int32, device=device)
        if name in ("context_lens", STATE_SLOTS):
            dtype = torch.int32 if name == "context_lens" else torch.int64
            return torch.empty([requests], dtype=dtype, device=device)
        if name.startswith("block_table"):
            return torch.empty([requests, self._symbols.size("max_blocks", 9)], dtype=torch.int32, device=device)
        kind, index = name.split("_pool_")
        if kind == "state":
            recurrence = self._traced.recurrences[int(index)]
            pool: list[Any] = [self._symbols.size("num_slots", 11), *recurrence.state_shape]
            return torch.empty(pool, dtype=recurrence.state_dtype, device=device)
        if kind == "index":
            selection = self._traced.selections[int(index)]
            return self._pool(selection, selection.key)
        call = self._traced.calls[int(index)]
        if call.latent is not None:
            return self._pool(call, call.latent.rows, call.latent.row_size)
        return self._pool(call, call.key if kind == "key" else call.value)

    def _pool(self, call: AttentionCall | KeySelection, operand: Operand, row_size: int | None = None) -> torch.Tensor:
        value = operand.node.meta["val"]
        group = self._group_of(call)  # whose pools have a number of blocks of their own
        blocks = self._symbols.size(f"num_blocks_{group}" if group else "num_blocks", 27 + group)
        block_size = self._symbols.size("block_size", 16)
        shape: list[Any] = [blocks, operand.heads, block_size, row_size or operand.head_size]
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _group_of(self, call: AttentionCall | KeySelection) -> int:
        return self._reaches.index(reach_of(call))
