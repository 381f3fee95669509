"""Weights of a class of their own, as torchao's quantised ones: what a linear layer is, only their class knows.

Before and after: the same graph.  A layer that quantises its input by all of its rows together would mix the tokens of
all requests, though it is written as `aten.linear`.  Each is tried on rows of very different sizes, together and by
themselves; refused where a row depends on the others, and where such a weight is used for anything but a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
ROWS = 6
SPREAD = 8.0  # between one row and the next: what is rounded in steps for all rows loses the small ones
TOLERANCE = 1e-2  # of a row's largest result: a row by itself may be rounded in another order


def try_weight_classes(traced: TracedGraph) -> int:
    """Refuse linear layers that mix rows; returns how many weights there are that are tensors of another class."""
    count = 0
    for given in traced.inputs:
        if given.place != "weight" or not is_traceable_wrapper_subclass(given.example):
            continue
        count += 1
        weight: Any = given.example
        kind = type(weight).__name__
        for user in given.node.users:
            if user.target is not aten.linear.default or user.args[1] is not given.node:
                traced.refuse(
                    user, f"it computes with a weight of class {kind}, of which linear layers alone are known"
                )
            elif mixes_rows(weight):
                traced.refuse(user, f"a row of its result depends on other rows, by what a weight of class {kind} does")
    return count


@torch.no_grad()
def mixes_rows(weight: Tensor) -> bool:
    """Whether ``F.linear(x [T, in], weight [out, in])`` is another for a row among others than for the row alone."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, weight.shape[-1], generator=generator, dtype=torch.float32, device="cpu")
    spread = SPREAD ** torch.arange(ROWS, dtype=torch.float32, device="cpu")
    rows = (rows * spread[:, None]).to(weight.device, weight.dtype)
    together = F.linear(rows, weight)
    alone = torch.cat([F.linear(row[None], weight) for row in rows])
    scale = alone.abs().amax(dim=-1, keepdim=True)
    return bool(((together - alone).abs() > TOLERANCE * scale).any())
