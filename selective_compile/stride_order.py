"""What PyTorch asks of sizes to lay out a new tensor as another one is: no branch of the model's."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Which strides are larger, and of dimensions with equal ones which is longer.
ORDERS = torch._prims_common.compute_elementwise_output_logical_to_physical_perm.__code__
FRAMES = 24  # from such a question to its answer there are 8


def answer_without_guards(env: ShapeEnv) -> None:
    """From now on ``env`` answers these questions without taking down that the trace holds for such answers alone.

    A graph computes the same however its values lie; where it does not, as behind `as_strided`, there is no rule for
    the operator.  What the model then asks itself is taken down, also if the question is the same.
    """
    evaluate = env.evaluate_expr

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        if not orders_strides():
            return evaluate(*args, **kwargs)
        with env.suppress_guards():
            return evaluate(*args, **kwargs)

    env.evaluate_expr = evaluated  # type: ignore[method-assign]


def orders_strides() -> bool:
    """Whether the caller is asked by what orders the dimensions of a new tensor by their strides."""
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        if frame.f_code is ORDERS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
