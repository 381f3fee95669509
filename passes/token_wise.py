"""After pass 6: which isolated modules treat tokens independently, and so run once, on the rows of all requests.

Capture leaves a module whole where its Python depends on values of tokens, as a loop over the experts that were hit
does.  Here that Python is traced by itself (`group_loops`), shown to be one graph whatever the values
(`group_proof`), and every value in it is followed by the transfer rules of pass 2.  Declines, with a reason, where one
of them mixes, where a value depends on where a token stands or on how many there are, or where something is changed
in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Mixes, Sizes
from selective_compile.passes.evaluate import ancestors
from selective_compile.passes.group_loops import Given, GroupTrace
from selective_compile.passes.group_proof import Run, prove_any_groups, trace_all
from selective_compile.passes.isolated_call import IsolatedCall
from selective_compile.passes.table_rows import table_rows
from selective_compile.passes.token_axes import SequenceNode, has_tensor, transfer
from selective_compile.passes.traced_graph import TracedGraph, is_mutable

ATTENTIONS = (torch.ops.aten.scaled_dot_product_attention.default,)
# What tracing code raises that cannot be traced so.
UNTRACEABLE = (
    *(RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError),
    AssertionError,
)


def call_once(traced: TracedGraph) -> int:
    """Mark the calls of ``traced.isolated`` that were proved to be token-wise; returns how many."""
    if traced.modules is None:
        return 0
    known: dict[Any, bool] = {}  # by what can differ without another answer: the values of weights
    for place, call in enumerate(traced.isolated):
        given = given_to(call)
        if given is None:
            continue
        shapes = tuple((one.value.dtype, str(one.value.shape), one.token_dim) for one in given)
        alike = (traced.modules.likeness(call.module), repr(call.structure), shapes, call.results)
        if alike not in known:
            run = partial(traced.modules.run, call.module, call.structure)
            dims = dict(zip(call.results, call.token_dims, strict=True))
            known[alike] = why_not_token_wise(run, given, dims) is None
            if not known[alike] and traced.modules.let_store(call.module):
                known[alike] = why_not_token_wise(run, given, dims) is None
        traced.isolated[place] = replace(call, token_wise=known[alike])
    return sum(call.token_wise for call in traced.isolated)


def given_to(call: IsolatedCall) -> list[Given] | None:
    """None if it is given more than rows of tokens and constants."""
    if not all(argument.kind in ("rows", "constant") for argument in call.arguments):
        return None
    values: Any = call.node.args[0]
    dims = [argument.dim if argument.kind == "rows" else None for argument in call.arguments]
    tensors = [values[argument.value].meta["val"] for argument in call.arguments]
    return [Given(value=value, token_dim=dim) for value, dim in zip(tensors, dims, strict=True)]


def why_not_token_wise(run: Run, given: Sequence[Given], token_dims: dict[int, int]) -> str | None:
    """None if each result of ``run`` in ``token_dims`` has, along that dimension, what depends on that token alone."""
    try:
        trace = trace_all(run, given)
        axes = axes_of_values(trace, given)
        prove_any_groups(run, given, trace, axes)
    except Mixes as reason:
        return str(reason)
    except UNTRACEABLE as error:
        return f"its code cannot be traced: {str(error).strip().partition(chr(10))[0]}"
    output = next(node for node in reversed(trace.module.graph.nodes) if node.op == "output")
    for index, dim in token_dims.items():
        found = axes[output.args[0][index]]
        if found.opaque or [i for i in range(len(found.dims)) if found.labelled(i)] != [dim]:
            return f"its result {index} does not have tokens in dimension {dim} alone"
        if found.dims[dim] != (Axis.TOKEN,):
            return f"dimension {dim} of its result {index} is not the tokens"
    return None


def axes_of_values(trace: GroupTrace, given: Sequence[Given]) -> dict[fx.Node, Axes]:
    """Of all values that results depend on, and of those that the host reads as far as they are known.

    Raises `Mixes`.
    """
    graph, sizes = trace.module.graph, trace.symbols.sizes()
    if trace.symbols.env.guards or not sizes.token.free_symbols:
        raise Mixes("is another computation for other numbers of tokens")
    if any(is_mutable(node) for node in graph.nodes if node.op == "call_function"):
        raise Mixes("changes a tensor in place")
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    left = iter(given)
    axes: dict[fx.Node, Axes] = {}
    needed = set(ancestors(output))
    asked = {node for counts, _ in trace.read.values() for node in ancestors(counts)} - needed
    for node in graph.nodes:
        if node.op == "placeholder":
            axes[node] = axes_of_input(node, next(left))
        elif node.op == "get_attr":
            value = getattr(trace.module, str(node.target))
            axes[node] = Axes(dims=tuple((size,) if size != 1 else () for size in value.shape))
        elif node.op == "call_function" and has_tensor(node.meta.get("val")):
            if node in needed:
                axes[node] = axes_of_node(node, axes, sizes)
            elif node in asked and all(given in axes for given in node.all_input_nodes):
                with suppress(Mixes):  # what is asked of it is then not known
                    axes[node] = axes_of_node(node, axes, sizes)
    return axes


def axes_of_input(node: fx.Node, given: Given) -> Axes:
    shape = given.value.shape
    tokens = {given.token_dim: (Axis.TOKEN,)}
    dims: Any = tuple(tokens.get(dim, (size,) if size != 1 else ()) for dim, size in enumerate(shape))
    return Axes(dims=dims, inputs=frozenset({node}) if given.token_dim is not None else frozenset())


def axes_of_node(node: fx.Node, axes: dict[fx.Node, Axes], sizes: Sizes) -> Axes:
    def axes_of(value: Any) -> Axes:
        return axes[value] if isinstance(value, fx.Node) else Axes(dims=())

    try:
        found = transfer(node, axes_of, sizes)
    except SequenceNode as mixing:
        raise Mixes(mixing.kind) from mixing
    if node.target in ATTENTIONS:  # the rule of pass 2 leaves it to passes 3 and 4
        raise Mixes("attends to the tokens of all requests")
    if found.is_pair:
        raise Mixes("holds a value for each pair of tokens")
    if found.numbers and not found.opaque:
        raise Mixes("numbers the tokens of all requests")
    if table_rows(node, {**axes, node: found}, sizes) is not None:
        raise Mixes("reads a table by the number of tokens")
    return found
