"""Pass 5: the graph over ``[B, S]`` becomes a graph over the ragged batch ``[1, T]``.

Before::  linear(x [B, S, h]); sdpa(q [B, H, S, D], k, v, mask [B, 1, S, S]); arange(S)
After::   linear(x [1, T, h]); selective.ragged_attention(q [T, H, D], k [T, K, D], v, pools, metadata); positions [T]

Everything that pass 2 proved token-wise is left as it is: the captured graph is symbolic in batch and tokens, and a
ragged batch is one request of T tokens to it.  Only three things know better: attention (replaced by the ragged op),
token numbers (replaced by the positions input), and the outputs.  Declines when something is left that is refused, or
when a node that survives reads tokens by their own index.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from selective_compile.passes.attention_calls import AttentionCall, BiasLookup, KeySelection, Latent, Operand
from selective_compile.passes.axes import Axes, Axis
from selective_compile.passes.flat_examples import STATE_SLOTS, FlatExamples
from selective_compile.passes.flat_graph import FlatGraph, reach_of
from selective_compile.passes.isolate import replace_isolated
from selective_compile.passes.latent_rows import latent_query, latent_row, latent_value
from selective_compile.passes.mask_distances import NOTHING, heads_of
from selective_compile.passes.normalise import Symbols, retrace, tidy
from selective_compile.passes.own_reads import replace_own_reads
from selective_compile.passes.packed_trace import Traces
from selective_compile.passes.positional import is_positional_root, straight_line
from selective_compile.passes.refusals import RefusedError
from selective_compile.passes.rules_order import is_inverse
from selective_compile.passes.survivors import refuse_survivors
from selective_compile.passes.table_rows import table_rows
from selective_compile.passes.traced_graph import Input, RecurrentCall, TokenTensor, TracedGraph
from selective_compile.step import GENERATED, reaches

aten = torch.ops.aten
PAGED = ("cu_seqlens_q", "context_lens", "block_table", "slot_mapping")
UNPAGED = ("cu_seqlens_q",)


class Flattener:
    """Builds the flat graph in place of the ``[B, S]`` one."""

    def __init__(self, traced: TracedGraph, *, paged: bool, traces: Traces | None) -> None:
        self.traced, self.paged, self.traces = traced, paged, traces
        self.graph = traced.graph
        found = [*map(reach_of, traced.calls), *map(reach_of, traced.selections)]
        self.reaches = reaches(found) if paged else ()
        others = range(1, len(self.reaches))
        tables = [f"{name}_{group}" for group in others for name in ("block_table", "slot_mapping")]
        slots = [STATE_SLOTS] if traced.recurrences else []
        self.metadata = (*PAGED, *tables, *slots) if paged else UNPAGED
        self.new: dict[str, fx.Node] = {}
        self.symbols = Symbols()
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.selected: dict[fx.Node, fx.Node] = {}
        # Called with padding, a model computes all tokens as those of a prompt.
        self.marks_generated = paged and any(call.unlimited_steps for call in traced.recurrences)
        self.generated: fx.Node | None = None  # [T] bool

    def run(self) -> FlatGraph:
        outputs = self.output_axes()
        self.add_placeholders()
        for index, selection in enumerate(self.traced.selections):
            self.select_keys(index, selection)
        for index, call in enumerate(self.traced.calls):
            self.replace_attention(index, call)
        for index, recurrence in enumerate(self.traced.recurrences):
            self.replace_recurrence(index, recurrence)
        replace_isolated(self.traced)
        self.graph.eliminate_dead_code()
        replace_own_reads(self.traced)
        self.replace_rows()
        self.replace_positions()
        refuse_survivors(self.traced)
        self.replace_sizes()
        return self.finish(outputs)

    def output_axes(self) -> tuple[Axes | int | sympy.Expr, ...]:
        """What each output is in the ``[B, S]`` graph; sizes leave the graph, the caller knows them."""
        output = self.traced.output_node
        results = list(output.args[0])  # type: ignore[arg-type]
        found: list[Axes | int | sympy.Expr] = []
        for place, result in enumerate(results):
            value = result.meta.get("val") if isinstance(result, fx.Node) else result
            if isinstance(value, (int, torch.SymInt)):
                found.append(value if isinstance(value, int) else value.node.expr)
                results[place] = None
            elif isinstance(result, fx.Node) and self.can_be_put_back(result):
                found.append(self.traced.axes[result])
            else:
                self.traced.refuse(output, f"its output {result} must be a tensor with tokens in one dimension")
                raise RefusedError(self.traced.refusals)
        output.args = (tuple(results),)
        return tuple(found)

    def can_be_put_back(self, result: fx.Node) -> bool:
        """Whether rows of the ragged result have one place each in the padded one, or it has no rows."""
        axes = self.traced.axes.get(result)
        if axes is None or axes.is_constant:
            return axes is not None
        labelled = [dim for i, dim in enumerate(axes.dims) if axes.labelled(i)]
        if self.traced.sizes.batch is None:
            return labelled == [(Axis.TOKEN,)]
        return sorted(labelled, key=str) == [(Axis.BATCH,), (Axis.TOKEN,)] or labelled == [(Axis.BATCH, Axis.TOKEN)]

    def add_placeholders(self) -> None:
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        names = ["positions", *self.metadata]
        if self.paged:
            for i, call in enumerate(self.traced.calls):
                names += [f"{kind}_pool_{i}" for kind in (("key",) if call.latent else ("key", "value"))]
            names += [f"index_pool_{i}" for i in range(len(self.traced.selections))]
            names += [f"state_pool_{i}" for i in range(len(self.traced.recurrences))]
        for name in names:
            with self.graph.inserting_after(last):
                last = self.new[name] = self.graph.placeholder(name)
        if self.marks_generated:
            with self.graph.inserting_after(last):
                mark = self.graph.call_function(aten.bitwise_and.Scalar, (self.new["positions"], GENERATED))
            with self.graph.inserting_after(mark):
                self.generated = self.graph.call_function(aten.ne.Scalar, (mark, 0))

    def select_keys(self, index: int, call: KeySelection) -> None:
        """What marks hold for the masks, as positions; the marks leave the graph with the masks."""
        with self.graph.inserting_before(call.output):
            query, key, weights = (self.arranged(x) for x in (call.query, call.key, call.weights))
            of_heads = self.graph.call_function(aten.squeeze.dim, (weights, 2))
            metadata = [self.new[name] for name in self.metadata_of(call)]
            pools = (self.new[f"index_pool_{index}"],) if self.paged else ()
            ops = torch.ops.selective
            op = ops.ragged_top_keys.default if self.paged else ops.varlen_top_keys.default
            arguments = (query, key, of_heads, *pools, *metadata, call.scale, call.count)
            selected = self.graph.call_function(op, arguments)
            selected.meta["stack_trace"] = call.output.meta.get("stack_trace")
            self.selected[call.output] = selected

    def replace_attention(self, index: int, call: AttentionCall) -> None:
        with self.graph.inserting_before(call.output):
            assert call.family is not None
            options = (call.scale, call.family.window, call.softcap)
            others = self.options_of(index, call)
            metadata = [self.new[name] for name in self.metadata_of(call)]
            query = self.arranged(call.query)
            if call.latent is not None:
                query = latent_query(self.graph, call.latent, query, call.query.heads, call.query.head_size)
                row, pool = self.latent_row(call.latent), self.new[f"key_pool_{index}"]
                op = torch.ops.selective.latent_attention.default
                arguments: tuple[Any, ...] = (query, row, pool, *metadata, call.latent.size, *options)
            elif self.paged:
                key, value = self.arranged(call.key), self.arranged(call.value)
                pools = (self.new[f"key_pool_{index}"], self.new[f"value_pool_{index}"])
                op = torch.ops.selective.ragged_attention.default
                arguments = (query, key, value, *pools, *metadata, *options)
            else:
                key, value = self.arranged(call.key), self.arranged(call.value)
                op = torch.ops.selective.varlen_attention.default
                arguments = (query, key, value, *metadata, *options)
            mixed = self.graph.call_function(op, arguments, others)
            mixed.meta["stack_trace"] = call.output.meta.get("stack_trace")
            if call.latent is not None:
                mixed = latent_value(self.graph, call.latent, mixed, call.value.heads)
            result = self.shaped_as_output(call, mixed)
        call.output.replace_all_uses_with(result)
        self.replaced[call.output] = result
        self.graph.erase_node(call.output)  # dead code elimination keeps it: with dropout it would be random

    def latent_row(self, latent: Latent) -> fx.Node:
        shared = [self.arranged(columns.operand) for columns in latent.shared]
        return latent_row(self.graph, latent, self.arranged(latent.rows), shared)

    def replace_recurrence(self, index: int, call: RecurrentCall) -> None:
        def own(name: str) -> fx.Node | None:
            return self.new[name] if self.paged else None  # without a pool every request begins and ends in the step

        with self.graph.inserting_before(call.output):
            mixed = self.graph.call_function(
                call.run,
                (),
                {
                    **{role: self.rows_of(tensor) for role, tensor in call.tensors.items()},
                    **call.options,
                    **({"unlimited": self.generated} if self.generated and call.unlimited_steps else {}),
                    "state_pool": own(f"state_pool_{index}"),
                    "cu_seqlens_q": self.new["cu_seqlens_q"],
                    "context_lens": own("context_lens"),
                    "state_slots": own(STATE_SLOTS),
                },
            )
            mixed.meta["stack_trace"] = call.output.meta.get("stack_trace")
            cast = self.graph.call_function(aten.to.dtype, (mixed, call.output.meta["val"].dtype))
            moved = self.graph.call_function(aten.movedim.int, (cast, 0, call.output_token_dim - 1))
            result = self.graph.call_function(aten.unsqueeze.default, (moved, 0))
        call.output.replace_all_uses_with(result)
        self.replaced[call.output] = result
        self.graph.erase_node(call.output)

    def rows_of(self, tensor: TokenTensor) -> fx.Node:
        """``[T, ...]`` of a value of tokens ``[1, ..., T, ...]``; a weight as it is."""
        source = self.replaced.get(tensor.node, tensor.node)
        if tensor.token_dim is None:
            return source
        rows = self.graph.call_function(aten.squeeze.dim, (source, 0))
        return self.graph.call_function(aten.movedim.int, (rows, tensor.token_dim - 1, 0))

    def metadata_of(self, call: AttentionCall | KeySelection) -> tuple[str, ...]:
        group = self.group_of(call)
        return (*PAGED[:2], f"block_table_{group}", f"slot_mapping_{group}") if group else self.metadata[: len(PAGED)]

    def group_of(self, call: AttentionCall | KeySelection) -> int:
        return self.reaches.index(reach_of(call)) if self.paged else 0

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
        shape = self.sizes_of(call.output)
        places = dict(enumerate(call.output_order))
        last = len(shape) - 1
        depth = next(d for d, source in places.items() if source == last)
        token = next(d for d, source in places.items() if source == last - 1)
        heads = sorted((d for d in places if d not in (depth, token)), key=lambda d: places[d])
        order = [token, *heads, depth]
        spread = self.graph.call_function(aten.reshape.default, (mixed, [shape[d] for d in order]))
        back = [order.index(d) for d in range(len(shape))]
        return self.graph.call_function(aten.permute.default, (spread, back))

    def sizes_of(self, node: fx.Node) -> list[int]:
        """Sizes in the flat graph, -1 for the tokens; a batch, alone or merged with heads, counts 1."""
        sizes: list[int] = []
        for dim in self.traced.axes[node].dims:
            plain = [f for f in dim if isinstance(f, int)]
            product = 1
            for factor in plain:
                product *= factor
            sizes.append(-1 if Axis.TOKEN in dim else product)
        return sizes

    def replace_rows(self) -> None:
        """A table's rows read in the order of a request's tokens are read at their positions."""
        for node in [node for node in self.graph.nodes if node in self.traced.axes]:  # others were made here
            rows = table_rows(node, self.traced.axes, self.traced.sizes)
            if rows is None or rows.from_end or self.traced.axes[node].is_pair:
                continue
            with self.graph.inserting_before(node):
                index = self.graph.call_function(aten.add.Tensor, (self.positions(), rows.start))
                chosen = self.graph.call_function(aten.index_select.default, (node.args[0], rows.dim, index))
            node.replace_all_uses_with(chosen)
            self.graph.erase_node(node)

    def replace_positions(self) -> None:
        """Whatever numbers tokens and is still needed becomes ``first + step * positions``."""
        for node in reversed(list(self.graph.nodes)):
            axes = self.traced.axes.get(node)
            if axes is None or not node.users or not is_positional_root(axes, node):
                continue
            line = (0, 1) if node is self.traced.long_numbers else straight_line(self.traced, node)
            if line is None:
                self.traced.refuse(node, "its values by position are no straight line, and no table of them is kept")
                continue
            with self.graph.inserting_before(node):
                new = self.numbered(node, *line)
            node.replace_all_uses_with(new, delete_user_cb=lambda user: not is_inverse(self.traced.axes, user))
        self.graph.eliminate_dead_code()

    def numbered(self, node: fx.Node, first: int, step: int) -> fx.Node:
        call = self.graph.call_function
        numbers = self.new["positions"] if node is self.traced.long_numbers else self.positions()
        scaled = call(aten.mul.Tensor, (numbers, step)) if step != 1 else numbers
        moved = call(aten.add.Tensor, (scaled, first)) if first else scaled
        cast = call(aten.to.dtype, (moved, node.meta["val"].dtype))
        sizes = self.sizes_of(node)
        column = call(aten.reshape.default, (cast, [size if size == -1 else 1 for size in sizes]))
        if all(abs(size) == 1 for size in sizes):
            return column
        return call(aten.expand.default, (column, sizes))

    def positions(self) -> fx.Node:
        """[T], without marks."""
        if self.traced.long_numbers is None and not self.marks_generated:
            return self.new["positions"]
        return self.graph.call_function(aten.bitwise_and.Scalar, (self.new["positions"], GENERATED - 1))

    def replace_sizes(self) -> None:
        """Batch sizes become 1, token counts the size of the first token input."""
        first = next((given.node for given in self.traced.tokens() if given.node.users), None)
        if first is None:
            self.traced.refuse(self.traced.output_node, "it depends on no token")
            raise RefusedError(self.traced.refusals)
        after = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(after):
            total = self.graph.call_function(aten.sym_size.int, (first, 1))
        for given in self.traced.inputs:
            if given.place == "size" and given.node.users:
                is_tokens = given.node.meta["val"].node.expr == self.traced.sizes.token
                given.node.replace_all_uses_with(total if is_tokens else 1)  # type: ignore[arg-type]

    def finish(self, outputs: tuple[Any, ...]) -> FlatGraph:
        weights, tokens = self.ordered_inputs()
        uses_positions = bool(self.new["positions"].users)
        if not uses_positions:
            self.graph.erase_node(self.new.pop("positions"))
        self.graph.lint()
        self.traced.module.recompile()
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        examples = FlatExamples(self.traced, self.symbols, self.reaches, frozenset(self.new.values()))
        fakes = tuple(map(examples.of, placeholders))
        module = retrace(self.traced.module, self.symbols, fakes, self.traces)
        tidy(module)
        self.check_generality()
        return FlatGraph(
            module=module,
            weights=weights,
            tokens=tokens,
            uses_positions=uses_positions,
            metadata=self.metadata,
            calls=tuple(self.traced.calls),
            selections=tuple(self.traced.selections),
            recurrences=tuple(self.traced.recurrences),
            reaches=self.reaches,
            symbols=self.symbols,
            example_inputs=list(fakes),
            sizes=self.traced.sizes,
            outputs=outputs,
            proved_from=tuple(self.traced.proved_from),
        )

    def check_generality(self) -> None:
        """The flat graph must hold for every number of tokens, requests and blocks."""
        for guard in self.symbols.env.guards:
            self.traced.refuse(self.traced.output_node, f"the ragged graph holds only where {guard.expr}")
        if self.traced.refusals:
            raise RefusedError(self.traced.refusals)

    def ordered_inputs(self) -> tuple[tuple[Input, ...], tuple[Input, ...]]:
        """Weights still used, then token inputs; sizes and unused weights leave the graph."""
        kept: dict[str, list[Input]] = {"weight": [], "tokens": []}
        anchor = next(iter(self.new.values()))
        for given in self.traced.inputs:
            if given.place in kept and given.node.users:
                kept[given.place].append(given)
                if given.place == "tokens":
                    anchor.prepend(given.node)
            else:
                self.graph.erase_node(given.node)
        return tuple(kept["weight"]), tuple(kept["tokens"])


def flatten(traced: TracedGraph, *, paged: bool, traces: Traces | None = None) -> FlatGraph:
    """``traces``: as in `retraced`.  Raises `RefusedError` with everything that was refused so far and in this pass."""
    if traced.refusals:
        raise RefusedError(traced.refusals)
    return Flattener(traced, paged=paged, traces=traces).run()
