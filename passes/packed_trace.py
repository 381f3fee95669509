"""A trace of `retrace` as plain data, by what was traced: the same graph with inputs alike is traced alike every time.

What tracing makes of a graph depends on its operators, on constants among their arguments and on what its inputs are
like.  All of that is in the key; versions, our own code and settings of the process are for who keeps traces to tell
apart.  A trace is told only where it asked nothing about sizes, so that it left nothing behind but its graph.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from selective_compile.passes.axes import size_expression
from selective_compile.passes.packed_nodes import Operator, PackedCall, packed_call, unpacked_call

# Whose operators are PyTorch's, ours or transformers': those of others may be anything by the next time.
NAMESPACES = ("aten", "prims", "selective", "transformers")
MODULES = ("torch", "_operator", "math")  # and those in them: whose functions are
# What a node of the trace has from the node that it was made for.
OF_SOURCE = ("nn_module_stack", "source_fn_stack", "stack_trace")
VALUE = "val"
MOST = 64  # numbers of a constant


@dataclass(frozen=True)
class Number:
    """A size that depends on symbols."""

    expression: sympy.Expr


@dataclass(frozen=True)
class Strided:
    """What a tensor is like; the numbers are `Number` or int."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class TracedNode:
    """``values``: of its results, none where it has none; ``source``: the number of the node that it was made for."""

    call: PackedCall
    values: tuple[Any, ...]
    source: int | None


@dataclass(frozen=True)
class PackedTrace:
    """``constants``: tensors that code makes of numbers in it, which tracing holds beside the nodes, by their names."""

    nodes: tuple[TracedNode, ...]
    constants: tuple[tuple[str, Tensor], ...] = ()


class Traces(Protocol):
    """Traces that were made before."""

    def get(self, key: str) -> PackedTrace | None: ...

    def keep(self, key: str, trace: PackedTrace) -> None: ...


def key_of(
    module: fx.GraphModule, fakes: Sequence[Any], decompositions: Mapping[Any, Any], mode: FakeTensorMode
) -> str | None:
    """A digest of all that a trace depends on in this process; None where it cannot be told."""
    if _get_current_dispatch_mode_stack() or asked_of(mode):
        return None
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    try:
        told = [told_call(packed_call(node, numbers)) for node in module.graph.nodes]
        told += map(told_input, fakes)
    except ValueError:
        return None
    told += sorted(map(str, decompositions))
    told += [str(torch.is_grad_enabled()), str(torch.is_inference_mode_enabled())]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def told_call(call: PackedCall) -> str:
    return f"{call.op} {call.name} {told_target(call.target)} {call.args!r} {call.kwargs!r}"


def told_target(target: Any) -> str:
    """Raises ValueError for what may be something else by the next time."""
    if isinstance(target, str):  # a method of tensors, or the name of an input
        return repr(target)
    if isinstance(target, Operator) and target.namespace in NAMESPACES:
        return repr(target)
    if target is torch.Size:
        return "torch.Size"
    module = getattr(target, "__module__", None) or ""
    if module.split(".")[0] in MODULES and (is_built_in(target) or is_of_file(target, module)):
        return f"{module}.{target.__qualname__}"
    raise ValueError(f"what is called must be PyTorch's, got {target}")


def is_built_in(target: Any) -> bool:
    """Whether it is a function, and no method of a certain object."""
    return isinstance(target, BuiltinFunctionType) and not isinstance(target.__self__, Tensor)


def is_of_file(target: Any, module: str) -> bool:
    """Whether the file of the module has its code, which is not so of what was put in the place of a function; and
    nothing else is in it, as in one that another function has made."""
    if not isinstance(target, FunctionType) or target.__closure__ is not None:
        return False
    return target.__code__.co_filename == getattr(sys.modules.get(module), "__file__", None)


def told_input(fake: Any) -> str:
    if type(fake) is FakeTensor and is_plain(fake):
        return repr([fake.dtype, fake.device, *map(told_size, (*fake.shape, *fake.stride(), fake.storage_offset()))])
    if isinstance(fake, (int, torch.SymInt)):
        return f"{type(fake).__name__} {told_size(fake)}"
    raise ValueError(f"inputs must be plain tensors and sizes, got {type(fake).__name__}")


def told_size(size: int | torch.SymInt) -> str:
    return f"{size} like {size.node.hint}" if isinstance(size, torch.SymInt) else str(size)


def is_plain(fake: Tensor) -> bool:
    return fake.layout is torch.strided and not (fake.requires_grad or fake.is_conj() or fake.is_neg())


def asked_of(mode: FakeTensorMode) -> int:
    """How often tracing asked what sizes are."""
    env = mode.shape_env
    assert env is not None
    return len(env.guards) + len(env.replacements) + len(env.deferred_runtime_asserts)


def packed_trace(
    result: fx.GraphModule, sources: Mapping[str, fx.Node], module: fx.GraphModule, fakes: Sequence[Any]
) -> PackedTrace:
    """``result``, whose nodes were made for the ``sources`` in ``module``.

    Raises:
        ValueError: something in it is not plain, or a size is none of the inputs'.
    """
    known = frozenset(symbol for size in sizes_in(fakes) for symbol in size_expression(size).free_symbols)
    places = {node: number for number, node in enumerate(module.graph.nodes)}
    numbers = {node: number for number, node in enumerate(result.graph.nodes)}
    constants = constants_of(result)

    def traced_node(node: fx.Node) -> TracedNode:
        source = sources.get(node.name)
        given = node.op == "placeholder" or VALUE not in node.meta
        return TracedNode(
            call=packed_call(node, numbers, constants),
            values=() if given else (tree_map(lambda value: packed_value(value, known), node.meta[VALUE]),),
            source=None if source is None else places[source],
        )

    return PackedTrace(nodes=tuple(map(traced_node, result.graph.nodes)), constants=tuple(constants.items()))


def constants_of(result: fx.GraphModule) -> dict[str, Tensor]:
    """Small ones alone: large ones are a model's own, and no longer what the code says."""
    names = {str(node.target) for node in result.graph.nodes if node.op == "get_attr"}
    held = {name: getattr(result, name, None) for name in sorted(names)}
    return {
        name: tensor
        for name, tensor in held.items()
        if type(tensor) is Tensor and is_plain(tensor) and tensor.device.type == "cpu" and tensor.numel() <= MOST
    }


def sizes_in(values: Iterable[Any]) -> list[torch.SymInt]:
    numbers = [
        number
        for value in values
        for number in ((*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,))
    ]
    return [number for number in numbers if isinstance(number, torch.SymInt)]


def packed_value(value: Any, known: frozenset[sympy.Basic]) -> Any:
    def number(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size_expression(size)
        if not expression.free_symbols <= known:
            raise ValueError(f"sizes must be those of inputs, got {expression}")
        return Number(expression)

    if type(value) is FakeTensor and is_plain(value) and value.constant is None:
        shape, stride = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
        return Strided(shape, stride, number(value.storage_offset()), value.dtype, value.device)
    if isinstance(value, torch.SymInt) or value is None or type(value) in (bool, int, float):
        return number(value)
    raise ValueError(f"results must be plain tensors and sizes, got {type(value).__name__}")


def unpacked_trace(
    trace: PackedTrace, module: fx.GraphModule, fakes: Sequence[Any], mode: FakeTensorMode
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """The trace of ``module`` with ``fakes``; and by the names of its nodes those of ``module`` they were made for."""
    value_of = maker_of_values(fakes, mode)
    originals, given = list(module.graph.nodes), iter(fakes)
    graph = fx.Graph()
    made: list[fx.Node] = []
    sources: dict[str, fx.Node] = {}
    for packed in trace.nodes:
        node = unpacked_call(packed.call, graph, made)
        made.append(node)
        if packed.source is not None:
            source = sources[node.name] = originals[packed.source]
            node.meta = {name: source.meta[name] for name in OF_SOURCE if name in source.meta}
        if node.op == "placeholder":
            node.meta[VALUE] = next(given)
        elif packed.values:
            node.meta[VALUE] = tree_map(value_of, packed.values[0], is_leaf=lambda value: value is None)
    return _LazyGraphModule(dict(trace.constants), graph), sources


def maker_of_values(fakes: Sequence[Any], mode: FakeTensorMode) -> Callable[[Any], Any]:
    """What makes a value what it was, with the symbols of ``fakes``; a tensor for each, not its memory."""
    env = mode.shape_env
    assert env is not None
    hints = {
        size.node.expr: size.node.hint for size in sizes_in(fakes) if isinstance(size_expression(size), sympy.Symbol)
    }
    numbers: dict[sympy.Expr, Any] = {}

    def number(size: Any) -> Any:
        if not isinstance(size, Number):
            return size
        expression = size.expression
        if expression not in numbers:
            numbers[expression] = env.create_symintnode(expression, hint=int(expression.subs(hints)))
        return numbers[expression]

    metas: dict[Strided, Tensor] = {}

    def meta_of(value: Strided) -> Tensor:
        shape, stride, offset = tuple(map(number, value.shape)), tuple(map(number, value.stride)), number(value.offset)
        tensor = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        if not isinstance(offset, int) or offset:
            tensor.set_(tensor.untyped_storage(), offset, shape, stride)
        return tensor

    def value_of(value: Any) -> Any:
        if not isinstance(value, Strided):
            return number(value)
        # What strides of symbolic sizes say is found out once for all values that are alike: it takes twenty times as
        # long as the rest. They share memory, which views' of the trace do not with what they are of: it tells nothing.
        if value not in metas:
            metas[value] = meta_of(value)
        return FakeTensor(mode, metas[value].detach(), value.device)

    return value_of
