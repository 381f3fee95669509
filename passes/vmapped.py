"""A function of indices under `torch.vmap`, as transformers makes masks of it, run on indices that are broadcast.

Before::  q = _add_batch_dim(arange_q, 0, 1);  k = _add_batch_dim(arange_k, 0, 2);  le = k.le(q)
          rows = _remove_batch_dim(le, 2, S, 0);  mask = _remove_batch_dim(rows, 1, S, 0)
After::   q = arange_q.reshape(S, 1);  k = arange_k.reshape(1, S);  le = k.le(q);  mask = le.expand(S, S)

Tracing with composite operators kept loses what is computed under `vmap`.  Precondition: there, all values are numbers,
and each operator takes numbers to a number, or looks numbers up in a tensor from outside: then it is all the same
whether it is called for each index or for all of them at once.  Declines otherwise: the graph is run as it is; where
that fails between the beginning of a `vmap` and its end, it ends all the same, since it holds for all of the process.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx

ADD, REMOVE, NESTING = "_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting"
BOOKKEEPING = ("lazy_load_decompositions", NESTING, "_vmap_decrement_nesting")
METHODS = frozenset(
    "le lt ge gt eq ne add sub mul div floor_divide remainder abs neg logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not bitwise_xor minimum maximum clamp where masked_fill "
    "__le__ __lt__ __ge__ __gt__ __eq__ __ne__ __and__ __or__ __xor__ __invert__ __add__ __sub__ __mul__ __floordiv__ "
    "__mod__ __neg__ __rsub__ __radd__ __rmul__ __rand__ __ror__ __truediv__ __rtruediv__ __pow__ __rpow__ "
    "div pow exp exp2 log log2 sqrt rsqrt tanh sigmoid floor round sign to bool int long float double".split()
)
FUNCTIONS = frozenset(
    (
        *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
        *(operator.and_, operator.or_, operator.xor, operator.invert, operator.neg),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
        *(torch.logical_and, torch.logical_or, torch.logical_not, torch.bitwise_and, torch.bitwise_or),
        *(torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne, torch.logical_xor, torch.bitwise_xor),
        *(torch.add, torch.sub, torch.mul, torch.floor_divide, torch.remainder, torch.neg, torch.bitwise_not),
        *(torch.where, torch.minimum, torch.maximum, torch.abs, torch.clamp),
        *(operator.truediv, operator.pow, torch.div, torch.pow, torch.exp, torch.exp2, torch.log, torch.log2),
        *(torch.sqrt, torch.rsqrt, torch.tanh, torch.sigmoid, torch.floor, torch.round, torch.sign),
    )
)
NUMBERS = ("new_ones", "new_zeros")
LOOKUPS = (torch.ops.aten.index, torch.ops.aten.index.Tensor, operator.getitem)


def interpreter_of(module: fx.GraphModule) -> fx.Interpreter:
    """What runs a graph of Dynamo's, with what is under `vmap` broadcast where that is the same."""
    inside = under_vmap(module.graph)
    return Broadcasting(module, inside) if inside else Nesting(module)


class Nesting(fx.Interpreter):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        with same_nesting():
            return super().run(*args, **kwargs)


@contextmanager
def same_nesting() -> Iterator[None]:
    """What begins within, of `vmap` and others of its kind, has ended behind it, too."""
    functorch = torch._C._functorch
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            with suppress(RuntimeError):  # torch 2.11 ends all of them, too, and then looks for one that is left
                functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def under_vmap(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose values have dimensions of `vmap`; empty if there are none, or one that is not known."""
    inside: set[fx.Node] = set()
    levels = depth(graph)
    for node in graph.nodes:
        reads = inside.intersection(node.all_input_nodes)
        if called(node, ADD):
            known = not reads and node.args[1] == 0 and dims_of(node.args[0]) == 1
        elif called(node, REMOVE):
            source, level, _, place = node.args
            last = source.args[1] - 1 if called(source, REMOVE) else levels
            known = source in inside and level == last and place == 0
        elif reads:
            known = not any(called(read, REMOVE) for read in reads) and takes_numbers(node, inside)
        else:
            continue
        if not known:
            return frozenset()
        if not called(node, REMOVE) or node.args[1] != 1:
            inside.add(node)
    return frozenset(inside)


def depth(graph: fx.Graph) -> int:
    """How many levels of `vmap` there are, each in the one before."""
    return max((node.args[2] for node in graph.nodes if called(node, ADD)), default=0)


def takes_numbers(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node under `vmap` computes a number of numbers, whatever their indices."""
    if node.op == "call_function" and node.target in LOOKUPS:
        source, given = node.args
        places = given if isinstance(given, (list, tuple)) else (given,)
        known = all(place in inside for place in places)
        return source not in inside and known and len(places) == dims_of(source)
    if any(dims_of(read) for read in node.all_input_nodes if read not in inside):
        return False
    if node.op == "call_method" and node.target in NUMBERS:
        return (*node.args[1:], *(size for name, size in node.kwargs.items() if name == "size")) == ((),)
    return node.target in (METHODS if node.op == "call_method" else FUNCTIONS)


def dims_of(node: Any) -> int:
    """Of a value from outside, 0 if it is no tensor, 1 if it is not known."""
    if "example_value" not in node.meta:
        return 1
    value = node.meta["example_value"]
    return value.dim() if isinstance(value, Tensor) else 0


def called(node: Any, *names: str) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in names


class Broadcasting(fx.Interpreter):
    """Each level of `vmap` is a dimension, the first one in front; numbers from outside have 1 in all of them."""

    def __init__(self, module: fx.GraphModule, inside: frozenset[fx.Node]) -> None:
        super().__init__(module)
        self._inside = inside
        self._levels = depth(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        if called(n, *BOOKKEEPING):
            return None
        if called(n, REMOVE):
            value, level, size = (self.map_nodes_to_values(arg, n) for arg in n.args[:3])
            sizes = [-1] * self._levels
            sizes[level - 1] = size
            return value.expand(sizes)
        if n not in self._inside:
            return super().run_node(n)
        if called(n, ADD):
            value, _, level = (self.map_nodes_to_values(arg, n) for arg in n.args)
            return value.reshape([value.shape[0] if at == level else 1 for at in range(1, self._levels + 1)])
        return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        """Numbers, so that no type is chosen by which of them have dimensions."""
        values = super().map_nodes_to_values(args, n)
        if n not in self._inside or called(n, ADD):
            return values
        return torch.utils._pytree.tree_map_only(Tensor, self._number, values)

    def _number(self, value: Tensor) -> Tensor:
        return value.reshape([1] * self._levels) if value.dim() == 0 else value
