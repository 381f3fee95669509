"""Run a part of the graph on concrete values: what probes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.traced_graph import TracedGraph


def ancestors(node: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
    """``node`` and all it is computed from, in graph order, not looking behind sizes and the nodes in ``stop``."""
    needed, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current not in needed:
            needed.add(current)
            if current not in stop and not is_symbolic(current.meta.get("val")):
                stack.extend(current.all_input_nodes)
    return [n for n in node.graph.nodes if n in needed]


def constants_in(node: fx.Node) -> Iterator[int]:
    """Sizes of the numbers that ``node`` is computed with: where something may happen to a position."""
    for current in ancestors(node):
        numbers = list(leaves((current.args, current.kwargs)))
        if current.op == "get_attr":
            value = getattr(current.graph.owning_module, str(current.target))
            numbers += [value.item()] if value.numel() == 1 else []
        for number in numbers:
            if isinstance(number, (int, float)) and 1 < abs(number) < 2**30:
                yield abs(int(number))


def leaves(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, Mapping):
        arguments = tuple(arguments.values())
    if not isinstance(arguments, (tuple, list)):
        yield arguments
        return
    for argument in arguments:
        yield from leaves(argument)


def evaluate(
    traced: TracedGraph,
    node: fx.Node,
    *,
    batch: int,
    tokens: int,
    given: Mapping[fx.Node, Any],
    instead: Callable[[fx.Node, tuple[Any, ...]], Any] | None = None,
) -> torch.Tensor:
    """The value of ``node`` for a batch of ``batch`` requests of ``tokens`` tokens, with the values in ``given``.

    Sizes and weights come from the graph's inputs; a token input that is needed must be in ``given``.  ``instead`` may
    change the arguments that a node is run with.
    """
    symbols = {traced.sizes.token: tokens} | ({traced.sizes.batch: batch} if traced.sizes.batch is not None else {})
    examples = {item.node: item.example for item in traced.inputs if item.place == "weight"}
    values: dict[fx.Node, Any] = {}
    for current in ancestors(node, frozenset(given)):
        if current in given:
            values[current] = given[current]
        elif isinstance(current.meta.get("val"), (torch.SymInt, int)):
            values[current] = concrete(current.meta["val"], symbols)
        elif current.op == "placeholder":
            values[current] = examples[current].detach()  # type: ignore[union-attr]
        elif current.op == "get_attr":
            values[current] = getattr(traced.module, str(current.target))
        else:
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), lambda n: values[n])
            if instead is not None:
                args = instead(current, args)
            with torch.no_grad():
                values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]


def concrete(size: Any, symbols: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(symbols))
