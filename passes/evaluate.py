"""Run a part of the graph on concrete values: what probes are made of.

Proofs run on the CPU, wherever the model is: probes are small, and what compares them reads every result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from selective_compile.passes.axes import is_symbolic

if TYPE_CHECKING:
    from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
CPU = torch.device("cpu")
# Of their first argument they read the shape and the type, and no value.
SHAPED_LIKE = (
    *(aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full),
)


def ancestors(node: fx.Node, stop: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
    """``node`` and all it is computed from, in graph order, not looking behind sizes and the nodes in ``stop``.

    What gives a new tensor nothing but its shape is not among them.
    """
    needed, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current not in needed:
            needed.add(current)
            if current not in stop and not is_symbolic(current.meta.get("val")):
                shape_of = shaped_like(current)
                stack.extend(parent for parent in current.all_input_nodes if parent is not shape_of)
    if len(needed) * 8 < len(node.graph.nodes):  # to sort so few is faster than to look at all
        return sorted(needed)
    return [n for n in node.graph.nodes if n in needed]


def shaped_like(node: fx.Node) -> Any:
    """The tensor that gives the new one of ``node`` its shape, where it is read for nothing else; or None."""
    if getattr(node.target, "overloadpacket", None) not in SHAPED_LIKE:
        return None
    return None if node.args[0] in node.args[1:] else node.args[0]


FEW = 64  # A buffer of more numbers is a table, whose every row a mask's proof looks at.


def constants_in(
    node: fx.Node, values: Mapping[fx.Node, torch.Tensor] | None = None, behind: Iterable[fx.Node] | None = None
) -> Iterator[int]:
    """Sizes of the numbers that ``node`` is computed with: where something may happen to a position.

    Of the inputs with ``values``, those of few numbers count.  ``behind``: what to look through, if not all.
    """
    for current in ancestors(node) if behind is None else behind:
        numbers = list(leaves((current.args, current.kwargs)))
        if current.op == "get_attr":
            value = getattr(current.graph.owning_module, str(current.target))
            numbers += [value.item()] if value.numel() == 1 else []
        elif values is not None and current in values and values[current].numel() <= FEW:
            numbers += values[current].reshape(-1).tolist()
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


NUMBERS: dict[Any, Any] = {torch.SymFloat: float, torch.SymBool: bool}  # that are made of sizes


class MarkedError(Exception):
    """What is to be evaluated depends on which requests are long: a value for short ones alone would prove nothing."""


def evaluate(
    traced: TracedGraph,
    node: fx.Node,
    *,
    batch: int,
    tokens: int,
    given: Mapping[fx.Node, Any],
    instead: Callable[[fx.Node, tuple[Any, ...]], torch.Tensor | None] | None = None,
    device: torch.device = CPU,
) -> torch.Tensor:
    """The value of ``node`` for a batch of ``batch`` requests of ``tokens`` tokens, with the values in ``given``.

    Sizes and weights come from the graph's inputs; a token input that is needed must be in ``given``.  ``instead`` may
    give another value than a node has with its arguments.  All of them are on ``device``.
    """
    symbols = {traced.sizes.token: tokens} | ({traced.sizes.batch: batch} if traced.sizes.batch is not None else {})
    examples = {item.node: item.example for item in traced.inputs if item.place == "weight"}
    values: dict[fx.Node, Any] = {}
    for current in ancestors(node, frozenset(given)):
        if current in given:
            values[current] = given[current]
        elif current is traced.long_numbers:
            raise MarkedError(node.name)
        elif isinstance(current.meta.get("val"), (torch.SymFloat, torch.SymBool)):
            values[current] = NUMBERS[type(current.meta["val"])](current.meta["val"].node.expr.subs(symbols))
        elif isinstance(current.meta.get("val"), (torch.SymInt, int)):
            values[current] = concrete(current.meta["val"], symbols)
        elif current.op == "placeholder":
            values[current] = examples[current].detach().to(device)  # type: ignore[union-attr]
        elif current.op == "get_attr":
            values[current] = getattr(traced.module, str(current.target)).to(device)
        else:
            shape_of = shaped_like(current)
            if shape_of is not None and shape_of not in values:
                values[shape_of] = of_shape(shape_of, symbols, device)
            args, kwargs = moved_to(device, current, values)
            with torch.no_grad():
                value = None if instead is None else instead(current, args)
                values[current] = current.target(*args, **kwargs) if value is None else value  # type: ignore[operator]
    return values[node]


def traced_value(node: fx.Node, mode: FakeTensorMode, value_of: Callable[[fx.Node], Any]) -> Any:
    """What ``node`` gives for such values, which have sizes and no numbers."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    # Some operators are made of others in C++, which in torch 2.11 has no sizes that are symbols.
    with mode, enable_python_dispatcher(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def moved_to(
    device: torch.device, node: fx.Node, values: Mapping[fx.Node, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``node`` is called with where its parents have these ``values``: where it names a device, that one."""

    def argument(each: Any) -> Any:
        if isinstance(each, fx.Node):
            return values[each]
        return device if isinstance(each, torch.device) else each

    return fx.node.map_aggregate((node.args, node.kwargs), argument)


def of_shape(node: fx.Node, symbols: Mapping[sympy.Symbol, int], device: torch.device) -> torch.Tensor:
    """A tensor of the shape and type of ``node``, that takes no memory."""
    like = node.meta["val"]
    shape = [concrete(size, symbols) for size in like.shape]
    return torch.zeros((), dtype=like.dtype, device=device).expand(shape)


def concrete(size: Any, symbols: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(symbols))
