"""What a forward leaves in its modules and never reads, as the attention weights that tutorials keep to look at.

    self.attn = weights

An engine does not leave it there: a request's tokens are the same without, and what a step could leave would be of the
tokens of all requests.  It is named in the report.  Declines where anything is stored that a forward may read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from selective_compile.captured import Captured
from selective_compile.joined_graphs import inputs_of
from selective_compile.length_tables import nodes_in
from selective_compile.live_conditions import STEP
from selective_compile.model_call import CANNOT
from selective_compile.module_state import lock_of
from selective_compile.passes.normalise import source_name
from selective_compile.same_logits import gives_logits_of
from selective_compile.trace_conditions import Condition

TABLE = re.compile(r"\b_(parameters|modules|buffers)('\])?$")  # which PyTorch looks into where an attribute is set


def without_unread(model: nn.Module, captured: Captured) -> Captured | None:
    """``captured`` without what it stores; None where something reads that, and where the rest are not the logits."""
    names = {stored.rpartition(".")[2] for stored in captured.sets}
    sources = [source_name(node) for node in inputs_of(captured.module)]
    (output,) = captured.module.graph.find_nodes(op="output")
    first, *others = results = output.args[0]  # the first is what the forward gives
    if is_named(captured, names, sources) or any(stored_as(each) not in captured.stored for each in nodes_in(others)):
        return None
    found = replace(captured, sets=(), stored=frozenset(), left_out=captured.sets)
    kept = False
    try:
        give(captured.module, (first,))
        with lock_of(model):
            kept = gives_logits_of(found, model)
    except CANNOT:
        return None
    finally:
        if not kept:
            give(captured.module, results)
    return found if kept else None


def is_named(captured: Captured, names: set[str], sources: list[str]) -> bool:
    """Whether what the trace depends on has one of these names on its way."""
    asked = any(mentions(source, names) for source in sources) or any(asks(one, names) for one in captured.conditions)
    return asked or not names.isdisjoint(captured.read.names)


def asks(condition: Condition, names: set[str]) -> bool:
    """Whether one of these is on its way, or it is asked whether there is one; not by who sets it."""
    there = not names.isdisjoint(map(str, condition.given)) and not TABLE.search(condition.source)
    return there or mentions(condition.source, names)


def mentions(source: str, names: set[str]) -> bool:
    """Whether one of the attributes on the way is of such a name, and not a module."""
    return not names.isdisjoint(re.split(r"\W+", STEP.sub("", source)))


def stored_as(result: fx.Node) -> str:
    """As `Captured.stored` has it."""
    value = result.meta.get("example_value")
    return str(value) if isinstance(value, torch.SymInt) else result.name


def give(module: fx.GraphModule, results: Sequence[Any]) -> None:
    (output,) = module.graph.find_nodes(op="output")
    output.args = (tuple(results),)
    module.recompile()
