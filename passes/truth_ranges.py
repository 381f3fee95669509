"""Part of pass 1: Dynamo's assertions that a truth value is no less than 0 and no more than 1 are left out.

Before::  item = mask.all().item(); ge = sym_ite(item, 1, 0) >= 0; _assert_scalar(ge, ...)
After::   item = mask.all().item(); ge = sym_ite(item, 1, 0) >= 0

It has them of whatever a model's code turns into a truth value, also where that is not used; and what tells it then
reads the tokens of a request as a whole.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
COMPARED = (operator.ge, operator.le, operator.gt, operator.lt)


def drop_truth_ranges(module: fx.GraphModule) -> int:
    """Returns how many were there."""
    found = [
        node for node in module.graph.nodes if node.target is aten._assert_scalar.default and is_sure(node.args[0])
    ]
    for node in found:  # what they read is left to be found dead: Dynamo's graph writes in place
        module.graph.erase_node(node)
    module.recompile()
    return len(found)


def is_sure(condition: Any) -> bool:
    """Whether it compares a truth value as a number, and holds of both."""
    if not isinstance(condition, fx.Node) or condition.target not in COMPARED:
        return False
    compare: Any = condition.target
    value, number = condition.args
    if not isinstance(value, fx.Node) or value.target is not torch.sym_ite or not isinstance(number, int):
        return False
    either = value.args[1:]
    return all(isinstance(each, int) and compare(each, number) for each in either)
