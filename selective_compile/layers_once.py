"""Layers that are alike go through Dynamo once, where it can tell: a third of a second for each that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
# In releases of torch without it marked regions are traced each for itself all the same.
KNOWN = find_spec("torch._dynamo.variables.invoke_subgraph") is not None


class NotAlikeError(Exception):
    """Dynamo took a layer for another that it is not like, or what it did is not understood."""


def marked(model: nn.Module) -> nn.Module:
    """``model`` for Dynamo, with marks on modules in lists of which there are several of a class: a model's layers, not
    the experts in one.  The model itself if there are none, or it would make no difference.

    Whatever has a mark is a copy, and so is what it is in: another thread may run the model meanwhile, or one of its
    classes.  Parameters, buffers, hooks and all modules below are the model's own.
    """
    counted = Counter(map(type, model)) if isinstance(model, nn.ModuleList) else Counter()
    several = {
        kind: with_mark(kind, count) for kind, count in counted.items() if count >= FEWEST and can_be_marked(kind)
    }
    children: dict[str, Any] = {}
    for name, child in model._modules.items():
        if child is None or (several and (type(child) not in several or FORWARD in vars(child))):
            children[name] = child
        else:
            children[name] = copy_as(several[type(child)], child) if several else marked(child)
    if all(children[name] is child for name, child in model._modules.items()):
        return model
    result = copy_as(type(model), model)
    vars(result)["_modules"] = children
    return result


def can_be_marked(kind: type[nn.Module]) -> bool:
    return KNOWN and isinstance(getattr(kind, FORWARD), FunctionType)


def with_mark(kind: type[nn.Module], count: int) -> type[nn.Module]:
    """A class of the same methods, of whose forward Dynamo sees that its calls may be the same ones over again."""
    called = torch.compiler.nested_compile_region(kind.forward, max_reuse_entries=count)
    return type(kind.__name__, (kind,), {FORWARD: called, "__module__": kind.__module__})


def copy_as(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """Another module of the same attributes."""
    result = object.__new__(kind)
    vars(result).update(vars(module))
    return result


def written_out(module: fx.GraphModule, examples: Sequence[Any], model: nn.Module, read: Read) -> fx.GraphModule:
    """Dynamo's graph with each layer's own operators in the place of its call.

    Args:
        examples: what the graph was called with.

    Raises:
        NotAlikeError: a layer is not like the one whose operators stand for it, by all that the trace has ``read``, or
            its call is not given its own weights in the place of those.
    """
    graph = fx.Graph()
    given = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), examples, strict=True))
    copies: dict[fx.Node, Any] = {}
    first: dict[fx.GraphModule, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            continue
        if node.target is invoke_subgraph:
            body = getattr(module, node.args[0].target)
            layers = layers_of(model, first.setdefault(body, node), node)
            check_settings(*layers, read.of_modules, module_path(first[body]))
            check_given(*layers, first[body], node, given)
            results = write_out(graph, body, first[body], node, [copies[read] for read in node.args[2:]])
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


def layers_of(model: nn.Module, first: fx.Node, call: fx.Node) -> tuple[nn.Module, nn.Module]:
    try:
        return model.get_submodule(module_path(first)), model.get_submodule(module_path(call))
    except AttributeError as error:
        raise NotAlikeError(f"Dynamo has another name for a layer: {error}") from error


def check_settings(first: nn.Module, other: nn.Module, read: Mapping[str, frozenset[str]], path: str) -> None:
    """Dynamo compares what it guards; hooks, for one, it does not."""
    layers = [dict(layer.named_modules()) for layer in (first, other)]
    if layers[0].keys() != layers[1].keys() or path not in read:
        raise NotAlikeError(f"a layer has other modules than {path}, or that has another name to Dynamo")
    for name, one in layers[0].items():
        names = read.get(f"{path}.{name}".removesuffix("."), frozenset())
        if settings(one, names) != settings(layers[1][name], names):
            raise NotAlikeError(f"{name or 'the layer itself'} is set otherwise in another layer than {path}")


def check_given(
    first: nn.Module, other: nn.Module, traced_as: fx.Node, call: fx.Node, examples: Mapping[fx.Node, Any]
) -> None:
    """A tensor of the first layer must have become that of the other one, and any other input must be the same."""
    own, others = (dict(tensors_of(layer)) for layer in (first, other))
    pairs: Any = zip(traced_as.args[2:], call.args[2:], strict=True)
    for one, another in pairs:
        if like(one) != like(another):
            raise NotAlikeError(f"{call.name} is given {like(another)} for {like(one)}")
        if not isinstance(examples.get(one), torch.Tensor):
            continue  # it was computed, or is a size
        names = [name for name, tensor in own.items() if tensor is examples[one]]
        wanted = [others.get(name) for name in names] or [examples[one]]
        if any(tensor is not examples.get(another) for tensor in wanted):
            raise NotAlikeError(f"{call.name} is given {another} for {one}")


def tensors_of(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


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
