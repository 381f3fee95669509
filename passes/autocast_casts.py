"""On Dynamo's graph: what `torch.autocast` does to operators, written down as casts.

Before::  _enter_autocast("cuda", bfloat16, True, True);  linear(x, weight);  _exit_autocast(...)
After::   linear(x.to(bfloat16), weight.to(bfloat16))

Tracing with composite operators kept does not see what autocast does below them.  Which casts there are is asked of
PyTorch (`Watch`): a call is run under autocast on values without numbers, and once more without it, on arguments that
are cast as they were.  Precondition: both times the same operators run, on the same types.  A call where they do not
keeps its autocast, by which `normalise` refuses it.  What only moves numbers may run on either side of a cast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._pytree import tree_leaves, tree_map

from selective_compile.passes.packed_trace import OF_SOURCE
from selective_compile.passes.repeats import spelled
from selective_compile.passes.watched_calls import Autocasts, Watch, alike, autocasts, without_numbers

EXAMPLE = "example_value"
# What operators raise where they cannot run so.
CANNOT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Casts:
    """``of``: of what a call reads, by its number, the type it is cast to; ``dtype``: what the call is told besides."""

    of: Mapping[int, torch.dtype] = field(default_factory=dict)
    dtype: torch.dtype | None = None


Known = dict[Hashable, Casts | None]  # of calls alike, as layers have the same


def write_casts(module: fx.GraphModule, around: Autocasts = ()) -> int:
    """Returns how many calls have casts, or are told a type; the autocast that they had is gone.

    ``around``: what all of the graph is under.
    """
    entered: dict[Any, tuple[Any, ...]] = dict(enumerate(around))
    known: Known = {}
    nodes, written = list(module.graph.nodes), 0
    for node in nodes:
        if node.target is _enter_autocast:
            entered[node] = node.args
        elif node.target is _exit_autocast:
            del entered[node.args[0]]
        elif is_on(entered.values()) and may_cast(node):
            written += written_down(node, tuple(entered.values()), known)
    for node in reversed(nodes):
        if node.target in (_enter_autocast, _exit_autocast):
            module.graph.erase_node(node)
    module.recompile()
    return written


def is_on(entered: Iterable[tuple[Any, ...]]) -> bool:
    """By the innermost of each device."""
    return any({device: enabled for device, _, enabled, _ in entered}.values())


def may_cast(node: fx.Node) -> bool:
    """Whether a call reads numbers that are no integers, or what is not known."""
    examples = tree_leaves([example_of(read) for read in reads_of(node)])
    calls = node.op not in ("placeholder", "get_attr", "output")
    return calls and any(each is None or (isinstance(each, Tensor) and each.is_floating_point()) for each in examples)


def reads_of(node: fx.Node) -> list[fx.Node]:
    """As often as it reads them, in the order in which `map_arg` finds them."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def example_of(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target), None)
    return node.meta.get(EXAMPLE)


def written_down(node: fx.Node, entered: Autocasts, known: Known) -> bool:
    call = (spelled(node), str([tree_map(kind_of, example_of(read)) for read in reads_of(node)]), entered)
    if call not in known:
        known[call] = casts_of(node, entered)
    casts = known[call]
    if casts is None:
        keep_autocast(node, entered)
    elif casts != Casts():
        write(node, casts)
    return casts not in (None, Casts())


def kind_of(example: Any) -> Any:
    return (example.dtype, example.device, example.dim()) if isinstance(example, Tensor) else type(example)


def casts_of(node: fx.Node, entered: Autocasts) -> Casts | None:
    """By which a call does without autocast what it does under it; None where that is not known."""
    under = watched(node, Casts(), entered)
    if under is None:
        return None
    off = tuple((device, None, False, False) for device, *_ in entered)
    tried = [Casts(found) for found in under.casts()]
    for casts in (Casts(), *tried, Casts(tried[0].of, torch.float32), Casts({}, torch.float32)):
        without = watched(node, casts, off)
        if without is not None and without.calls() == under.calls(but=casts.of):
            return casts
    return None


def watched(node: fx.Node, casts: Casts, entered: Autocasts) -> Watch | None:
    """What runs for a call on values without numbers, some of them cast; None where that cannot be told."""
    number = -1

    def fresh(read: fx.Node) -> Any:
        nonlocal number
        number += 1
        example, dtype = tree_map(alike, example_of(read)), casts.of.get(number)
        value = example if dtype is None else example.to(dtype)
        watch.give(number, value)
        return value

    watch = Watch()
    try:
        with torch.no_grad(), without_numbers(map(example_of, reads_of(node))), autocasts(entered):
            args, kwargs = fx.node.map_arg((node.args, told(node.kwargs, casts)), fresh)
            target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
            with watch:
                target(*(args[1:] if node.op == "call_method" else args), **kwargs)
    except CANNOT:
        return None
    return watch


def told(given: dict[str, Any], casts: Casts) -> dict[str, Any]:
    return given if casts.dtype is None else {**given, "dtype": casts.dtype}


def write(node: fx.Node, casts: Casts) -> None:
    numbers = iter(range(len(reads_of(node))))

    def cast(read: fx.Node) -> fx.Node:
        dtype = casts.of.get(next(numbers))
        if dtype is None:
            return read
        with node.graph.inserting_before(node):
            made = node.graph.call_method("to", (read, dtype))
        made.meta = {name: node.meta[name] for name in OF_SOURCE if name in node.meta}
        made.meta[EXAMPLE] = example_of(read).to(dtype)
        return made

    node.args, node.kwargs = fx.node.map_arg((node.args, told(node.kwargs, casts)), cast)


def keep_autocast(node: fx.Node, entered: Autocasts) -> None:
    with node.graph.inserting_before(node):
        begun = [node.graph.call_function(_enter_autocast, given) for given in entered]
    with node.graph.inserting_after(node):
        for autocast in begun:  # each right behind the call, the outermost last
            node.graph.call_function(_exit_autocast, (autocast,))
