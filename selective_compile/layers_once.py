"""Layers that are alike go through Dynamo once, where it can tell: a third of a second for each that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from selective_compile.live_settings import FORWARD, Read, hooks_in, is_felt, is_plain
from selective_compile.passes.traced_graph import module_path

FEWEST = 4  # layers of a kind, for fewer it does not pay
STACK = "nn_module_stack"
# As of torch 2.12: before, marked regions are traced each for itself all the same.
KNOWN = find_spec("torch._dynamo.variables.invoke_subgraph") is not None


class NotAlikeError(Exception):
    """Dynamo took a layer for another that it is not like, or what it did is not understood."""


def repeated_classes(model: nn.Module) -> dict[type[nn.Module], int]:
    """Of modules in lists, those of which there are several: a model's layers, not the experts in one; and how many."""
    found: Counter[type[nn.Module]] = Counter()
    stack = [model] if KNOWN else []
    while stack:
        for child in stack.pop().children():
            counted = Counter(map(type, child)) if isinstance(child, nn.ModuleList) else Counter()
            layers = {kind: count for kind, count in counted.items() if count >= FEWEST and has_own_forward(kind)}
            found.update(layers)
            stack += [child] if not layers else []
    return dict(found)


def has_own_forward(kind: type[nn.Module]) -> bool:
    return isinstance(getattr(kind, FORWARD), FunctionType) and kind.forward is not nn.ModuleList.forward


@contextmanager
def marked(classes: dict[type[nn.Module], int]) -> Iterator[None]:
    """Meanwhile Dynamo sees that calls of these modules may be the same ones over again; else they run as they did."""
    own = {kind: vars(kind).get(FORWARD) for kind in classes}
    before = {kind: kind.forward for kind in classes}
    try:
        for kind, count in classes.items():
            kind.forward = torch.compiler.nested_compile_region(before[kind], max_reuse_entries=count)
        yield
    finally:
        for kind, forward in own.items():
            if forward is not None:
                kind.forward = forward
            elif FORWARD in vars(kind):
                del kind.forward


def written_out(module: fx.GraphModule, model: nn.Module, read: Read) -> fx.GraphModule:
    """Dynamo's graph with each layer's own operators in the place of its call.

    Raises:
        NotAlikeError: a layer is not like the one whose operators stand for it, by all that the trace has ``read``.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    first: dict[fx.GraphModule, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            continue
        if node.target is invoke_subgraph:
            body = getattr(module, node.args[0].target)
            check_alike(model, first.setdefault(body, node), node, read)
            results = write_out(graph, body, first[body], node, [copies[given] for given in node.args[2:]])
            copies |= {user: results[user.args[1]] for user in node.users}
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def write_out(
    graph: fx.Graph, body: fx.GraphModule, first: fx.Node, call: fx.Node, given: list[fx.Node]
) -> list[fx.Node]:
    """The operators of ``body``, which was traced for the call ``first``, for another; returns its results."""
    copies: dict[fx.Node, fx.Node] = {}
    inputs, own, stack = iter(given), module_path(first), call.meta[STACK]
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copies[node] = next(inputs)
        elif node.op == "get_attr":
            raise NotAlikeError(f"{own} has a constant {node.target}")
        elif node.op != "output":
            copies[node] = graph.node_copy(node, lambda given: copies[given])
            inner = list(node.meta.get(STACK, {}).items())[len(first.meta[STACK]) :]
            moved = {f"{key} of {call.name}": (path_in(path, first, call), kind) for key, (path, kind) in inner}
            copies[node].meta = {**node.meta, STACK: {**stack, **moved}}
    (results,) = next(reversed(body.graph.nodes)).args
    return [copies[result] for result in results]


def path_in(path: str, first: fx.Node, call: fx.Node) -> str:
    """Dynamo's name for a module in the layer of ``first``, in that of ``call``."""
    old, new = (next(reversed(node.meta[STACK].values()))[0] for node in (first, call))
    return new + path.removeprefix(old)


def check_alike(model: nn.Module, first: fx.Node, call: fx.Node, read: Read) -> None:
    """Dynamo compares what it guards; hooks, for one, it does not."""
    for one, other in zip(first.args[2:], call.args[2:], strict=True):
        if like(one) != like(other):
            raise NotAlikeError(f"{call.name} is given {like(other)} for {like(one)}")
    paths = [module_path(node) for node in (first, call)]
    layers = [dict(model.get_submodule(path).named_modules()) for path in paths]
    if layers[0].keys() != layers[1].keys():
        raise NotAlikeError(f"{paths[0]} and {paths[1]} have other modules")
    if paths[0] not in read.of_modules:
        raise NotAlikeError(f"{paths[0]} has another name to Dynamo")
    for name, one in layers[0].items():
        names = read.of_modules.get(f"{paths[0]}.{name}".removesuffix("."), frozenset())
        if settings(one, names) != settings(layers[1][name], names):
            raise NotAlikeError(f"{name or 'the layer itself'} of {paths[0]} and of {paths[1]} are set otherwise")


def like(given: Any) -> tuple[Any, ...]:
    """What tracing can tell of an argument."""
    value = given.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    return type(value), value.dtype, value.device, str((value.shape, value.stride())), value.requires_grad


def setting(value: Any, module: nn.Module) -> Any:
    """Equal only where a trace can do the same with both."""
    if isinstance(value, partial):
        return partial, setting(value.func, module), setting(value.args, module), setting(value.keywords, module)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType, id(value.__func__)
    return (type(value), value) if is_plain(value) else id(value)


def settings(module: nn.Module, names: frozenset[str]) -> dict[str, Any]:
    """What a trace may depend on: attributes that it read, plain ones by their values, and which tensors there are."""
    own = vars(module)
    known: dict[str, Any] = {"class": type(module), "training": module.training, FORWARD: id(own.get(FORWARD))}
    for name in names & own.keys() - vars(nn.Module()).keys():
        known[name] = setting(own[name], module)
    for kind in ("_parameters", "_buffers"):
        known[kind] = {name: tensor is None for name, tensor in own[kind].items()}
    known["hooks"] = [id(hook) for hook in hooks_in(own) if is_felt(hook)]
    return known
