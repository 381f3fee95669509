"""Pass 10: linear layers on the CPU go to the kernel that reads a weight where it lies.

Before::  aten.linear(x, weight, bias)
After::   selective.linear(x, weight, bias)

ATen's own path reads weights at 1-2 GB/s for 8-32 rows, and a prepacked copy would double the memory and miss updates.
Declines on other devices and for weights that are computed in the graph; a weight of a class of its own, as a quantised
one, gets `torch.nn.functional.linear`, which asks the class.  Ragged attention needs no lowering: its operator
dispatches to Triton on a GPU and to the native kernel on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.passes.flatten import FlatGraph

aten = torch.ops.aten


def lower(flat: FlatGraph) -> int:
    has_kernel = flat.device.type == "cpu" and hasattr(torch.ops.selective, "linear")
    weights = {node: given.example for node, given in zip(flat.module.graph.nodes, flat.weights, strict=False)}
    changed = 0
    for node in flat.module.graph.nodes:
        if node.target is not aten.linear.default or node.args[1] not in weights:
            continue
        if is_traceable_wrapper_subclass(weights[node.args[1]]):
            node.target = F.linear  # only this way is the weight's class asked: ATen's falls apart before
        elif has_kernel:
            node.target = torch.ops.selective.linear.default
            node.args = (*node.args, None)[:3]
        changed += node.target is not aten.linear.default
    flat.module.recompile()
    return changed
