"""On the flat graph: what is computed of constants alone, in each step anew, is computed once.

Before::  mul(to(reciprocal(pow(10000.0, div(arange(0, 64, 2), 64))), "cuda"), positions)
After::   mul(constant [32], positions)

As PhiMoE does with its frequencies, in each forward and on the CPU: a step that copies them to a GPU is no CUDA graph.
So is one that reads rows at indices of the host's, which PyTorch copies without saying so: constant ones lie on the
device from here on.  What no more than creates a tensor, as `zeros`, is left to the compiler, and so is what many
numbers come of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.host_reads import INDEXING

MOST = 2**20  # numbers that a constant may have
NAME, SENT = "folded_{}", "sent_{}"
WHOLE = (torch.int32, torch.int64)  # of booleans there is no index without a look at them


def fold_constants(flat: FlatGraph) -> int:
    """Returns how many values are constants of the graph that were computed in it, or copied to the device."""
    graph, constants = flat.module.graph, dict(constants_of(flat.module))
    sent = send_indices(flat, constants)
    folded = [node for node in constants if node.all_input_nodes and any(user not in constants for user in node.users)]
    for place, node in enumerate(folded):
        flat.module.register_buffer(NAME.format(place), constants[node], persistent=False)
        with graph.inserting_before(node):
            instead = graph.get_attr(NAME.format(place))
        instead.meta = dict(node.meta)
        node.replace_all_uses_with(instead)
    if folded or sent:
        graph.eliminate_dead_code()
        flat.module.recompile()
    return len(folded) + sent


def send_indices(flat: FlatGraph, constants: Mapping[fx.Node, Tensor]) -> int:
    """Returns how many constants of the host, that elements of a device's tensors are read or put at, lie there now."""
    sent: dict[tuple[fx.Node, torch.device], fx.Node] = {}
    for node in list(flat.module.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in INDEXING:
            continue
        rows, indices, *others = node.args
        value = rows.meta.get("val") if isinstance(rows, fx.Node) else None
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            continue
        device = value.device

        def there(index: Any, device: torch.device = device) -> Any:
            known = constants.get(index)
            if known is None or known.dtype not in WHOLE or known.device.type != "cpu":
                return index
            if (index, device) not in sent:
                sent[index, device] = constant_on(device, flat, index, SENT.format(len(sent)), known)
            return sent[index, device]

        node.args = (rows, [there(index) for index in indices], *others)
    return len(sent)


def constant_on(device: torch.device, flat: FlatGraph, like: fx.Node, name: str, value: Tensor) -> fx.Node:
    flat.module.register_buffer(name, value.to(device), persistent=False)
    with flat.module.graph.inserting_before(like):
        made = flat.module.graph.get_attr(name)
    with flat.symbols.mode:
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    made.meta = {**like.meta, "val": there}
    return made


@torch.no_grad()
def constants_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node, Tensor]]:
    """The nodes of constants, and those that are made of these alone, with their values."""
    values: dict[fx.Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
        elif may_fold(node) and all(each in values for each in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with _disable_current_modes():
                value = node.target(*args, **kwargs)
        else:
            continue
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            values[node] = value
            yield node, value


def may_fold(node: fx.Node) -> bool:
    """Whether each call of it with the same arguments gives a new tensor of the same numbers, and not too many."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not isinstance(value, Tensor):
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags or "empty" in target._schema.name:
        return False
    sizes: list[Any] = list(value.shape)
    return not any(map(is_symbolic, sizes)) and value.numel() <= MOST
