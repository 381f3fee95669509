"""Pass 6: what the calls of isolated modules are made of, and their place in the flat graph.

Before::  selective.isolated([hidden [1, S, h], mask [1, 1, S, S], cos [1, S, d]], "layers.0.mixer", ...) -> [1, S, h]
After::   selective.isolated_rows([hidden [1, T, h], cos [1, T, d]], call 0, ...) -> [1, T, h]

A module that mixes tokens in a way that was not recognised runs for each request on the request's own rows.  Its tensor
arguments must each be token-wise, or constant, or made of the number of tokens alone, as a mask is: the latter leaves
the graph, and the runtime evaluates it at the request's length.  What only such arguments needed is no longer asked to
be token-wise.  Declines (a refusal at the call) for any other argument, and where a result that is used has not one
dimension of tokens.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from selective_compile.isolated_op import TOKENS, isolated, isolated_rows, sizes_of
from selective_compile.passes.axes import Axes, Axis
from selective_compile.passes.evaluate import ancestors, constants_in
from selective_compile.passes.isolated_call import Argument, IsolatedCall, Whole
from selective_compile.passes.refusals import source_line
from selective_compile.passes.traced_graph import TracedGraph, is_lost, is_mutable, is_random

# Up to more than the positions that bfloat16 and float16 tell apart, of which whoever compares them sees the next one.
TRIED, LONGEST_TRIED = (2, 3, 5, 17, 40, 130, 300, 2100), 2100
SHORT = 130  # what is wrong with longer requests alone may be behind the end of a table of positions
WHERE = ("stack_trace", "nn_module_stack")  # a node is told to have been made
HIDDEN = -1e4  # what is added to scores that shall not count is below; no bias is


def is_isolated(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is isolated


def result_axes(traced: TracedGraph, node: fx.Node) -> Axes | None:
    """Axes of one result of an isolated module; None if it has not tokens in exactly one dimension."""
    call, index = node.args
    assert isinstance(call, fx.Node) and isinstance(index, int)
    _, sizes = sizes_of(str(call.args[3]))[index]
    shape = node.meta["val"].shape
    if sum(n == TOKENS for n in sizes) != 1 or sum(not isinstance(n, int) for n in shape) != 1:
        return None
    dims = tuple((Axis.TOKEN,) if n == TOKENS else (n,) if n != 1 else () for n in sizes)
    return Axes(dims=dims, inputs=frozenset(given.node for given in traced.tokens()))  # type: ignore[arg-type]


def isolate(traced: TracedGraph) -> int:
    """Fill ``traced.isolated``; returns how many calls there are."""
    calls = [node for node in traced.graph.nodes if is_isolated(node)]
    if not calls:
        return 0
    kept, places = snapshot(traced)
    wholes: dict[fx.Node, Whole] = {}
    found: dict[fx.Node, tuple[Argument, ...]] = {}
    for node in calls:
        values: list[fx.Node] = []
        arguments: list[Argument] = []
        for value in node.args[0]:
            if is_handed(traced, value):
                arguments.append(Argument(kind="handed", call=calls.index(value.args[0]), value=int(value.args[1])))
                continue
            argument, reason = argument_of(traced, value, len(values)), None
            if argument is None:
                reason = "is neither token-wise nor made of the number of tokens"
                if value not in traced.axes and traced.refusals:
                    break  # what is unknown of it was reported before
            elif argument.kind == "whole":
                whole = wholes.setdefault(value, Whole(graph=kept, node=places[value]))
                argument = replace(argument, whole=whole)
                reason = why_not_causal(traced, value, whole)
            else:
                values.append(value)
            if argument is None or reason is not None:
                traced.refuse(node, f"its argument {value} {reason}")
                break
            arguments.append(argument)
        else:
            if not any(argument.kind == "rows" for argument in arguments):
                traced.refuse(node, "none of its arguments is token-wise")
                continue
            found[node] = tuple(arguments)
    for node, settled in found.items():
        settle(traced, calls, node, settled)
    forget_unused(traced)
    traced.isolated = [call_of(node, found[node]) for node in calls if node in found]
    return len(traced.isolated)


def is_handed(traced: TracedGraph, value: fx.Node) -> bool:
    """Whether a result of one isolated call goes to another as it is, since it is not one of token-wise floats."""
    if value.target is not operator.getitem or not is_isolated(value.args[0]):
        return False
    return value not in traced.axes or not value.meta["val"].is_floating_point()


def settle(traced: TracedGraph, calls: list[fx.Node], node: fx.Node, arguments: tuple[Argument, ...]) -> None:
    """What the graph need not compute for a call leaves its arguments."""
    in_graph = [a.kind in ("rows", "constant") for a in arguments]
    values = [value for value, stays in zip(node.args[0], in_graph, strict=True) if stays]  # type: ignore[arg-type]
    node.args = (values, *node.args[1:])
    before = set(ancestors(node))
    if any(argument.kind == "handed" and calls[argument.call] not in before for argument in arguments):
        traced.refuse(node, "it is given a result of an isolated module that it does not wait for")


def call_of(node: fx.Node, arguments: tuple[Argument, ...]) -> IsolatedCall:
    sizes = sizes_of(str(node.args[3]))
    used = tuple(sorted({int(user.args[1]) for user in node.users}))  # type: ignore[arg-type]
    return IsolatedCall(
        module=str(node.args[1]),
        node=node,
        structure=ast.literal_eval(str(node.args[2])),
        arguments=arguments,
        results=used,
        sizes=[sizes[index] for index in used],
        token_dims=tuple(sizes[index][1].index(TOKENS) for index in used),
        source_line=source_line(node),
    )


def argument_of(traced: TracedGraph, node: fx.Node, number: int) -> Argument | None:
    axes = traced.axes.get(node)
    if axes is not None and not axes.opaque:
        labelled = [i for i in range(len(axes.dims)) if axes.labelled(i)]
        if axes.is_constant and not axes.numbers:
            return Argument(kind="constant", value=number)
        if len(labelled) == 1 and axes.dims[labelled[0]] == (Axis.TOKEN,):
            return Argument(kind="rows", value=number, dim=labelled[0])
    return Argument(kind="whole") if made_of_length(traced, node) else None


def made_of_length(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether the value depends on the number of tokens, and constants, alone; buffers count as such."""
    given = {item.node: item for item in traced.inputs if item.place != "size"}
    for current in ancestors(node):
        if is_lost(traced, current):
            return False  # a constant that the trace does not hold
        if current in given:
            weight = given[current].place == "weight" and not isinstance(given[current].example, torch.nn.Parameter)
            if not weight:
                return False
        if is_random(current) or is_mutable(current) or is_isolated(current):
            return False
    return True


def why_not_causal(traced: TracedGraph, node: fx.Node, whole: Whole) -> str | None:
    """What is wrong with a value that must be the beginning of that of a longer request, and hide later tokens; where
    that is so of long requests alone, from which token on is noted.

    Tried on short requests, and around the constants that it is computed with, up to the end of tables that it reads.
    """
    token = traced.sizes.token
    if any(node.meta["val"].shape[dim].node.expr != token for dim in whole.token_dims):
        return f"has a size that is not the number of tokens: {list(node.meta['val'].shape)}"
    near = {c + d for c in constants_in(node) for d in (-1, 0, 1, 2)}
    lengths = sorted({*TRIED, *(n for n in near if 1 < n <= LONGEST_TRIED)})
    held: torch.Tensor | None = None
    for length in lengths:
        value = of_length(whole, length)
        if value is None:
            break
        reason = wrong_with(value, held, whole.token_dims)
        if reason is not None and (held is None or length <= SHORT):
            return reason
        if reason is not None:
            traced.ahead.append(first_wrong(whole, held, length) - 2)
            break
        held = value
    return None


def first_wrong(whole: Whole, held: torch.Tensor | None, wrong: int) -> int:
    """The shortest request, of up to ``wrong`` tokens, with a token that is told of later ones; ``held``: the value of
    one that has none."""
    dims, last = whole.token_dims, 0 if held is None else held.shape[whole.token_dims[0]]
    while wrong - last > 1:
        middle = (last + wrong) // 2
        value = of_length(whole, middle)
        if value is None or wrong_with(value, held, dims) is None:
            last = middle
        else:
            wrong = middle
    return wrong


def wrong_with(value: torch.Tensor, before: torch.Tensor | None, dims: tuple[int, ...]) -> str | None:
    """``before``: the value of a shorter request."""
    if before is not None and not torch.equal(before, beginning_of(value, dims, before)):
        return "changes for earlier tokens as a request grows"
    if len(dims) == 2 and not hides_later(value.movedim(dims, (-2, -1))):
        return "does not hide later tokens"
    return None


def of_length(whole: Whole, length: int) -> torch.Tensor | None:
    """The value for so many tokens; None where a table that it reads has no rows for them."""
    try:
        value = whole(length)
    except (IndexError, RuntimeError):
        return None
    return value if all(value.shape[dim] == length for dim in whole.token_dims) else None


def beginning_of(value: torch.Tensor, dims: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    for dim in dims:
        value = value.narrow(dim, 0, like.shape[dim])
    return value


def hides_later(pairs: torch.Tensor) -> bool:
    """Whether ``pairs`` ``[..., queries, keys]`` have one value of all later keys if they are booleans, hide all alike,
    or none, if they are added, and tell of the distance alone if they are integers: those are no masks."""
    places = torch.arange(pairs.shape[-1], device=pairs.device)
    later = places[None, :] > places[:, None]
    if pairs.is_floating_point() or pairs.dtype == torch.bool:
        values = pairs[..., later] if pairs.dtype == torch.bool else pairs[..., later] < HIDDEN
        return values.numel() == 0 or bool((values == values.flatten()[0]).all())
    of_next = pairs[..., 1:, 1:] == pairs[..., :-1, :-1]
    return bool(of_next[..., later[1:, 1:]].all())


def snapshot(traced: TracedGraph) -> tuple[TracedGraph, dict[fx.Node, fx.Node]]:
    """The graph as it is now, for evaluation alone, and where its nodes are in it."""
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        places[node] = graph.node_copy(node, lambda source: places[source])
    kept = TracedGraph(
        module=fx.GraphModule(traced.module, graph),
        inputs=[replace(item, node=places[item.node]) for item in traced.inputs],
        sizes=traced.sizes,
    )
    return kept, places


def forget_unused(traced: TracedGraph) -> None:
    """Take out of the graph, and of what was found in it, all that nothing needs any more."""
    traced.graph.eliminate_dead_code()
    left = set(traced.graph.nodes)
    names = {node.name for node in left}
    traced.axes = {node: axes for node, axes in traced.axes.items() if node in left}
    traced.sequence_nodes = {node: kind for node, kind in traced.sequence_nodes.items() if node in left}
    traced.refusals = [refusal for refusal in traced.refusals if refusal.node in names]
    traced.module.recompile()


def replace_isolated(traced: TracedGraph) -> int:
    """In the graph that is being flattened: calls over the rows of all requests."""
    for number, call in enumerate(traced.isolated):
        first = next(argument for argument in call.arguments if argument.kind == "rows")
        sizes = repr(call.sizes)
        with traced.graph.inserting_before(call.node):
            arguments = (call.node.args[0], number, first.value, first.dim, sizes)
            rows = traced.graph.call_function(isolated_rows, arguments)
        rows.meta.update({name: call.node.meta[name] for name in WHERE if name in call.node.meta})
        for user in list(call.node.users):
            assert user.target is operator.getitem
            user.args = (rows, call.results.index(user.args[1]))
        traced.graph.erase_node(call.node)
        traced.isolated[number] = replace(call, node=rows)
    return len(traced.isolated)
