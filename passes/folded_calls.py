"""Several nodes that compute what one operator does become a call of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def fold_calls(module: fx.GraphModule, target: Any, read: Callable[[fx.Node], tuple[Any, ...] | None]) -> int:
    """Returns how many there were.

    Args:
        read: the arguments with which ``target`` gives what a node does; None where it does not.
    """
    found = 0
    for node in list(module.graph.nodes):
        arguments = read(node)
        if arguments is not None:
            with module.graph.inserting_before(node):
                one = module.graph.call_function(target, arguments)
            one.meta.update(node.meta)
            node.replace_all_uses_with(one)
            found += 1
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return found
