"""A graph traced once more to ATen: of pieces that come again, as layers do, a few are traced, those between copied.

Before::  embedding; layer 0; layer 1; ...; layer 31; head
Traced::  embedding; layer 0; layer 1; layer 2; layer 3; layer 31; head
After::   as traced, with copies of layer 3 for the layers 4 to 30, each on its own weights

What tracing makes of an operator depends on that operator and on what its inputs are like.  So from where two pieces
that read alike are traced alike, node by node with equal shapes, strides and dtypes, all that follow are; that is
looked at, and where it is not so the whole graph is traced.  A layer takes a quarter of a second, nearly all of it for
symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves

from selective_compile.passes.axes import size_expression
from selective_compile.passes.packed_trace import OF_SOURCE, Traces, asked_of, key_of, packed_trace, unpacked_trace
from selective_compile.passes.repeats import KEPT, Repeat, alike_from, repeats, spelled
from selective_compile.passes.vmapped import interpreter_of

COPIED = KEPT - 2  # the piece before the last that is kept is what those between are copies of


def retraced(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    decompositions: Mapping[Any, Any],
    mode: FakeTensorMode,
    traces: Traces | None = None,
) -> fx.GraphModule:
    """``module`` traced with ``fakes`` of ``mode``, keeping stack traces and composite operators.

    ``traces`` has those that were made before, and gets others.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = repeats(module.graph, dict(zip(placeholders, map(kind_of, fakes), strict=True)))
    if found:
        folded = Folded(module, found)
        unfolded = folded.unfolded(*traced(folded.module, fakes, decompositions, mode, traces))
        if unfolded is not None:
            return unfolded
    return traced(module, fakes, decompositions, mode, traces)[0]


def kind_of(fake: Any) -> Hashable:
    """What tracing can tell of an input."""
    if not isinstance(fake, torch.Tensor):
        return type(fake), str(fake)
    numbers = tuple(map(size_expression, (*fake.shape, *fake.stride(), fake.storage_offset())))
    return type(fake), fake.dtype, fake.device, fake.dim(), numbers, fake.is_conj()


def traced(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    decompositions: Mapping[Any, Any],
    mode: FakeTensorMode,
    traces: Traces | None = None,
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """And of each of its nodes, by name, the node of ``module`` that it was made for."""
    key = None if traces is None else key_of(module, fakes, decompositions, mode)
    if traces is None or key is None:
        return traced_now(module, fakes, decompositions, mode)
    found = traces.get(key)
    if found is None:
        result, sources = traced_now(module, fakes, decompositions, mode)
        if asked_of(mode):
            return result, sources
        try:
            found = packed_trace(result, sources, module, fakes)
        except ValueError:
            return result, sources
        traces.keep(key, found)
    # Unpacked at once, too: what is compiled from it has the same digest then as in a start that finds the trace.
    return unpacked_trace(found, module, fakes, mode)


def traced_now(
    module: fx.GraphModule, fakes: Sequence[Any], decompositions: Mapping[Any, Any], mode: FakeTensorMode
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    sources: dict[str, fx.Node] = {}
    interpreter = interpreter_of(module)
    run_node = interpreter.run_node

    def noted(node: fx.Node) -> Any:
        tracing = get_proxy_mode()
        assert tracing is not None
        graph: fx.Graph = tracing.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        result = run_node(node)
        for made in reversed(graph.nodes):
            if made is last:
                break
            sources[made.name] = node
        return result

    def run(*arguments: Any) -> Any:
        with fx_traceback.preserve_node_meta():
            return interpreter.run(*arguments)

    interpreter.run_node = noted  # type: ignore[assignment, method-assign]
    # Passes change the graph many times before anything runs its code, which takes long to write for many layers.
    with mode, torch.no_grad(), _use_lazy_graph_module(True):
        return make_fx(run, dict(decompositions), tracing_mode="real", pre_dispatch=True)(*fakes), sources


class Folded:
    """A graph without the pieces between."""

    def __init__(self, module: fx.GraphModule, found: Sequence[Repeat]) -> None:
        self._repeats = found
        self._inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        left_out = {node for repeat in found for piece in repeat.folded for node in piece}
        # What read the piece before the last reads the one that is before it now.
        instead = {
            old: kept for repeat in found for old, kept in zip(repeat.pieces[-2], repeat.pieces[COPIED], strict=True)
        }
        for node in module.graph.nodes:
            if node not in left_out:
                copies[node] = graph.node_copy(node, lambda given: copies[instead.get(given, given)])
        self._of = {copy: node for node, copy in copies.items()}
        self.module = _LazyGraphModule(module, graph)

    def unfolded(self, result: fx.GraphModule, sources: Mapping[str, fx.Node]) -> fx.GraphModule | None:
        """The trace of the folded graph with all pieces; None where pieces were not traced alike."""
        made: dict[fx.Node, list[fx.Node]] = {}
        traced_nodes = [node for node in result.graph.nodes if node.op not in ("placeholder", "output")]
        if not all(node.name in sources for node in traced_nodes):
            return None
        for node in traced_nodes:
            made.setdefault(self._of[sources[node.name]], []).append(node)
        inputs = dict(zip(self._inputs, (n for n in result.graph.nodes if n.op == "placeholder"), strict=True))
        runs = [TracedPieces(repeat, made, inputs) for repeat in self._repeats]
        if not all(run.are_alike() for run in runs):
            return None
        for run in runs:
            run.copy()
        result.graph.lint()
        result.recompile()
        return result


class TracedPieces:
    """What became of the pieces of a run that were kept."""

    def __init__(
        self, repeat: Repeat, made: Mapping[fx.Node, list[fx.Node]], inputs: Mapping[fx.Node, fx.Node]
    ) -> None:
        self._repeat = repeat
        self._inputs = [[inputs[given] for given in own] for own in repeat.inputs]
        self._before, self._earlier, self._copied, self._last = (
            [new for node in repeat.pieces[place] for new in made.get(node, [])]
            for place in (COPIED - 2, COPIED - 1, COPIED, -1)
        )
        self._sources = [i for i, node in enumerate(repeat.pieces[COPIED]) for _ in made.get(node, [])]

    def are_alike(self) -> bool:
        """Whether the piece that is copied is to the one before it as that is to its own."""
        pieces = [self._before, self._earlier, self._copied]
        if not self._copied or any([*map(as_traced, piece)] != [*map(as_traced, self._copied)] for piece in pieces):
            return False
        following = zip(pieces, [*pieces[1:], self._last], strict=True)
        if not all(are_read_by(piece, {*piece, *behind}) for piece, behind in following):
            return False
        placeholders = (node for node in self._copied[0].graph.nodes if node.op == "placeholder")
        found = alike_from(pieces, {given: kind_of(given.meta["val"]) for given in placeholders})
        if len(found.pieces) < len(pieces):
            return False
        own = dict(zip(self._inputs[COPIED - 1], self._inputs[COPIED], strict=True))
        return all(own.get(one, one) is other for one, other in found.input_map(1, 2).items())

    def copy(self) -> None:
        """Put the pieces between in front of the last one."""
        graph, behind, latest = self._copied[0].graph, self._copied[-1].next, self._copied
        for piece in range(COPIED + 1, len(self._repeat.pieces) - 1):
            instead = dict(zip(self._inputs[COPIED], self._inputs[piece], strict=True))
            instead |= dict(zip(self._earlier, latest, strict=True))
            latest = []
            for node, source in zip(self._copied, self._sources, strict=True):
                with graph.inserting_before(behind):
                    copied = graph.node_copy(node, replaced_by(instead))
                known = self._repeat.pieces[piece][source].meta
                copied.meta = {**node.meta, **{name: known[name] for name in OF_SOURCE if name in known}}
                instead[node] = copied
                latest.append(copied)
        instead = dict(zip(self._copied, latest, strict=True))
        for node in self._last:
            for given in node.all_input_nodes:
                node.replace_input_with(given, instead.get(given, given))


def replaced_by(instead: Mapping[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
    return lambda given: instead.get(given, given)


def are_read_by(nodes: Sequence[fx.Node], readers: set[fx.Node]) -> bool:
    """By no others: what a later piece only hands on is read in the piece that it comes from."""
    return all(user in readers for node in nodes for user in node.users)


def as_traced(node: fx.Node) -> Hashable:
    """What is called on which constants, and what results are like."""
    return spelled(node), results_of(node)


def results_of(node: fx.Node) -> Hashable:
    return tuple(map(kind_of, tree_leaves(node.meta.get("val"))))
