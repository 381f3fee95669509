"""Pass 5 for what mixes tokens: ragged operators in place of attention, of selections of keys and of recurrences."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, BiasLookup, KeySelection, Latent, Operand
from selective_compile.passes.flat_examples import STATE_SLOTS
from selective_compile.passes.flat_inputs import FlatInputs
from selective_compile.passes.latent_rows import latent_query, latent_row, latent_value
from selective_compile.passes.mask_distances import NOTHING, heads_of
from selective_compile.passes.traced_graph import RecurrentCall, TokenTensor

aten, ops = torch.ops.aten, torch.ops.selective


def replace_calls(inputs: FlatInputs) -> None:
    calls = FlatCalls(inputs)
    for index, selection in enumerate(inputs.traced.selections):
        calls.select_keys(index, selection)
    for index, call in enumerate(inputs.traced.calls):
        calls.replace_attention(index, call)
    for index, recurrence in enumerate(inputs.traced.recurrences):
        calls.replace_recurrence(index, recurrence)


class FlatCalls:
    """Replaces the calls in the graph of ``inputs``.

    Attributes:
        replaced: what an attention or recurrence gave, which may feed the next one directly, by what gives it now.
        selected: the positions of selected keys by the marks that they were.
    """

    def __init__(self, inputs: FlatInputs) -> None:
        self.inputs, self.traced, self.graph = inputs, inputs.traced, inputs.graph
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.selected: dict[fx.Node, fx.Node] = {}

    def select_keys(self, index: int, call: KeySelection) -> None:
        """What marks hold for the masks, as positions; the marks leave the graph with the masks."""
        with self.graph.inserting_before(call.output):
            query, key, weights = (self.arranged(x) for x in (call.query, call.key, call.weights))
            of_heads = self.graph.call_function(aten.squeeze.dim, (weights, 2))
            pools = self.pools(f"index_pool_{index}")
            op = ops.ragged_top_keys.default if pools else ops.varlen_top_keys.default
            arguments = (query, key, of_heads, *pools, *self.inputs.metadata_of(call), call.scale, call.count)
            self.selected[call.output] = self.in_place_of(call.output, op, arguments)

    def replace_attention(self, index: int, call: AttentionCall) -> None:
        with self.graph.inserting_before(call.output):
            mixed = self.attention(index, call) if call.latent is None else self.latent(index, call, call.latent)
            self.replace(call.output, self.shaped_as_output(call, mixed))

    def attention(self, index: int, call: AttentionCall) -> fx.Node:
        """``[T, H, Dv]`` of queries, keys and values."""
        assert call.family is not None
        options, others = (call.scale, call.family.window, call.softcap), self.options_of(index, call)
        query, key, value = (self.arranged(x) for x in (call.query, call.key, call.value))
        pools = self.pools(f"key_pool_{index}", f"value_pool_{index}")
        op = ops.ragged_attention.default if pools else ops.varlen_attention.default
        arguments = (query, key, value, *pools, *self.inputs.metadata_of(call), *options)
        return self.in_place_of(call.output, op, arguments, others)

    def latent(self, index: int, call: AttentionCall, latent: Latent) -> fx.Node:
        """``[T, H, Dv]`` of queries and of what keys and values are made of."""
        assert call.family is not None
        options, others = (call.scale, call.family.window, call.softcap), self.options_of(index, call)
        query = latent_query(self.graph, latent, self.arranged(call.query), call.query.heads, call.query.head_size)
        shared = [self.arranged(columns.operand) for columns in latent.shared]
        row = latent_row(self.graph, latent, self.arranged(latent.rows), shared)
        pools = self.pools(f"key_pool_{index}")
        arguments = (query, row, *pools, *self.inputs.metadata_of(call), latent.size, *options)
        mixed = self.in_place_of(call.output, ops.latent_attention.default, arguments, others)
        return latent_value(self.graph, latent, mixed, call.value.heads)

    def replace_recurrence(self, index: int, call: RecurrentCall) -> None:
        paged = self.inputs.paged  # else every request begins and ends in the step, and there is no state to keep
        with self.graph.inserting_before(call.output):
            others: dict[str, Any] = {
                **{role: self.rows_of(tensor) for role, tensor in call.tensors.items()},
                **call.options,
                **({"unlimited": self.inputs.generated} if self.inputs.generated and call.unlimited_steps else {}),
                "state_pool": self.inputs.nodes[f"state_pool_{index}"] if paged else None,
                "cu_seqlens_q": self.inputs.nodes["cu_seqlens_q"],
                "context_lens": self.inputs.nodes["context_lens"] if paged else None,
                "state_slots": self.inputs.nodes[STATE_SLOTS] if paged else None,
            }
            mixed = self.in_place_of(call.output, call.run, (), others)
            cast = self.graph.call_function(aten.to.dtype, (mixed, call.output.meta["val"].dtype))
            moved = self.graph.call_function(aten.movedim.int, (cast, 0, call.output_token_dim - 1))
            self.replace(call.output, self.graph.call_function(aten.unsqueeze.default, (moved, 0)))

    def pools(self, *names: str) -> list[fx.Node]:
        return [self.inputs.nodes[name] for name in names] if self.inputs.paged else []

    def in_place_of(self, output: fx.Node, op: Any, arguments: tuple[Any, ...], others: Any = None) -> fx.Node:
        """A call that is told of by the source line of ``output``."""
        made = self.graph.call_function(op, arguments, others)
        made.meta["stack_trace"] = output.meta.get("stack_trace")
        return made

    def replace(self, output: fx.Node, result: fx.Node) -> None:
        output.replace_all_uses_with(result)
        self.replaced[output] = result
        self.graph.erase_node(output)  # dead code elimination keeps it: with dropout it would be random

    def rows_of(self, tensor: TokenTensor) -> fx.Node:
        """``[T, ...]`` of a value of tokens ``[1, ..., T, ...]``; a weight as it is."""
        source = self.replaced.get(tensor.node, tensor.node)
        if tensor.token_dim is None:
            return source
        rows = self.graph.call_function(aten.squeeze.dim, (source, 0))
        return self.graph.call_function(aten.movedim.int, (rows, tensor.token_dim - 1, 0))

    def options_of(self, index: int, call: AttentionCall) -> dict[str, Any]:
        """What few attentions have."""
        others: dict[str, Any] = {}
        assert call.family is not None
        if call.family.chunk:
            others["chunk"] = call.family.chunk
        if call.family.prefix:
            others["prefix"] = call.family.prefix
        if call.family.slopes:
            name = f"slopes_{index}"
            slopes = torch.tensor(call.family.slopes, dtype=torch.float32, device=call.output.meta["val"].device)
            self.traced.module.register_buffer(name, slopes)
            others["slopes"] = self.graph.get_attr(name)
        if isinstance(call.sinks, Operand):
            others["sinks"] = self.graph.call_function(aten.squeeze.dim, (self.arranged(call.sinks), 2))
        elif call.sinks is not None:
            others["sinks"] = self.graph.call_function(aten.reshape.default, (call.sinks, [-1]))
        if call.lookup is not None:
            others["distance_bias"] = self.distance_bias(index, call, call.lookup)
        if call.selection is not None:
            others["selection"] = self.selected[call.selection.output]
        return others

    def distance_bias(self, index: int, call: AttentionCall, lookup: BiasLookup) -> fx.Node:
        """``[T, heads, distances]`` of what is looked up, or ``[1, heads, distances]``."""
        assert call.family is not None
        apply, rows = self.graph.call_function, call.family.distances
        source = self.replaced.get(lookup.source, lookup.source)
        heads = call.query.heads if heads_of(lookup) > 1 else 1
        moved = apply(aten.permute.default, (source, list(lookup.order)))
        bias = apply(aten.reshape.default, (moved, [-1 if lookup.per_query else 1, heads, lookup.rows]))
        if call.lookup_factor != 1:
            bias = apply(aten.mul.Tensor, (apply(aten.to.dtype, (bias, torch.float32)), call.lookup_factor))
        if NOTHING in rows:
            bias = apply(aten.constant_pad_nd.default, (bias, [0, 1], 0.0))
        places = [lookup.rows if row == NOTHING else row for row in rows]
        if places != list(range(lookup.rows + (NOTHING in rows))):
            name = f"distances_{index}"
            device = call.output.meta["val"].device
            self.traced.module.register_buffer(name, torch.tensor(places, dtype=torch.int64, device=device))
            bias = apply(aten.index_select.default, (bias, 2, self.graph.get_attr(name)))
        return apply(aten.expand.default, (bias, [-1, call.query.heads, -1])) if heads == 1 else bias

    def arranged(self, operand: Operand) -> fx.Node:
        """``[T, heads, head size]``: a permutation and a reshape (a view wherever the strides allow it)."""
        source = self.replaced.get(operand.node, operand.node)  # an attention may feed the next one directly
        moved = self.graph.call_function(aten.permute.default, (source, list(operand.order)))
        heads = operand.heads * operand.every
        arranged = self.graph.call_function(aten.reshape.default, (moved, [-1, heads, operand.head_size]))
        if operand.every == 1:
            return arranged
        return self.graph.call_function(aten.slice.Tensor, (arranged, 1, 0, heads, operand.every))

    def shaped_as_output(self, call: AttentionCall, mixed: fx.Node) -> fx.Node:
        """``[T, H, Dv]`` brought to the shape of the node it replaces, its batch being 1."""
        shape = self.traced.axes[call.output].flat_sizes
        places = dict(enumerate(call.output_order))
        last = len(shape) - 1
        depth = next(d for d, source in places.items() if source == last)
        token = next(d for d, source in places.items() if source == last - 1)
        heads = sorted((d for d in places if d not in (depth, token)), key=lambda d: places[d])
        order = [token, *heads, depth]
        spread = self.graph.call_function(aten.reshape.default, (mixed, [shape[d] for d in order]))
        back = [order.index(d) for d in range(len(shape))]
        return self.graph.call_function(aten.permute.default, (spread, back))
