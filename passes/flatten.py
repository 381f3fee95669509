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

from selective_compile.passes.axes import Axes, Axis
from selective_compile.passes.flat_calls import replace_calls
from selective_compile.passes.flat_examples import FlatExamples
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.flat_inputs import FlatInputs
from selective_compile.passes.flat_numbers import replace_numbers
from selective_compile.passes.isolate import replace_isolated
from selective_compile.passes.normalise import Symbols, retrace, tidy
from selective_compile.passes.own_reads import replace_own_reads
from selective_compile.passes.packed_trace import Traces
from selective_compile.passes.refusals import RefusedError
from selective_compile.passes.survivors import refuse_survivors
from selective_compile.passes.traced_graph import Input, TracedGraph

aten = torch.ops.aten


class Flattener:
    """Builds the flat graph in place of the ``[B, S]`` one."""

    def __init__(self, traced: TracedGraph, *, paged: bool, traces: Traces | None) -> None:
        self.traced, self.paged, self.traces = traced, paged, traces
        self.graph = traced.graph
        self.symbols = Symbols()

    def run(self) -> FlatGraph:
        outputs = self.output_axes()
        inputs = FlatInputs(self.traced, paged=self.paged)
        replace_calls(inputs)
        replace_isolated(self.traced)
        self.graph.eliminate_dead_code()
        replace_own_reads(self.traced)
        replace_numbers(inputs)
        refuse_survivors(self.traced)
        self.replace_sizes()
        return self.finish(inputs, outputs)

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

    def finish(self, inputs: FlatInputs, outputs: tuple[Any, ...]) -> FlatGraph:
        weights, tokens = self.ordered_inputs(inputs)
        uses_positions = inputs.keep_positions_if_used()
        self.graph.lint()
        self.traced.module.recompile()
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        examples = FlatExamples(self.traced, self.symbols, inputs.reaches, frozenset(inputs.nodes.values()))
        fakes = tuple(map(examples.of, placeholders))
        module = retrace(self.traced.module, self.symbols, fakes, self.traces)
        tidy(module)
        self.check_generality()
        return FlatGraph(
            module=module,
            weights=weights,
            tokens=tokens,
            uses_positions=uses_positions,
            metadata=inputs.metadata,
            calls=tuple(self.traced.calls),
            selections=tuple(self.traced.selections),
            recurrences=tuple(self.traced.recurrences),
            reaches=inputs.reaches,
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

    def ordered_inputs(self, inputs: FlatInputs) -> tuple[tuple[Input, ...], tuple[Input, ...]]:
        """Weights still used, then token inputs; sizes and unused weights leave the graph."""
        kept: dict[str, list[Input]] = {"weight": [], "tokens": []}
        anchor = next(iter(inputs.nodes.values()))
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
