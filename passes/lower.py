"""Pass 10: linear layers on the CPU go to the kernel that reads a weight where it lies.

Before::  aten.linear(x, weight, bias)
After::   selective.linear(x, weight, bias)

ATen's own path reads weights at 1-2 GB/s for 8-32 rows, and a prepacked copy would double the memory and miss updates.
Declines on other devices and for weights that are computed in the graph.  Ragged attention needs no lowering: its
operator dispatches to Triton on a GPU and to the native kernel on the CPU.
"""

from __future__ import annotations

import torch

from selective_compile.passes.flatten import FlatGraph

aten = torch.ops.aten


def lower(flat: FlatGraph) -> int:
    if flat.device.type != "cpu" or not hasattr(torch.ops.selective, "linear"):
        return 0
    weights = {node for node, _ in zip(flat.module.graph.nodes, flat.weights, strict=False)}
    changed = 0
    for node in flat.module.graph.nodes:
        if node.target is aten.linear.default and node.args[1] in weights:
            node.target = torch.ops.selective.linear.default
            node.args = (*node.args, None)[:3]
            changed += 1
    flat.module.recompile()
    return changed
