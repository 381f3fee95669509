"""What PyTorch asks of sizes to tell how tensors lie in memory, or are to: no branch of the model's."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses import FakeTensorMode, fake_impls
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Which strides are larger, and of dimensions with equal ones which is longer; whether they leave nothing out, also of a
# result that is known from a call before; which of its libraries is to convolve, which goes by how many elements there
# are, and in which order that leaves dimensions.
OF_STRIDES = frozenset(
    asking.__code__
    for asking in (
        torch._prims_common.compute_elementwise_output_logical_to_physical_perm,
        torch._prims_common.check_contiguous_sizes_strides,
        torch._prims_common.is_channels_last_contiguous_2d,
        torch._prims_common.is_channels_last_contiguous_3d,
        fake_impls.conv,
        FakeTensorMode._get_output_tensor_from_cache_entry,
    )
)
FRAMES = 24  # from such a question to its answer there are 8


def answer_without_guards(env: ShapeEnv) -> None:
    """From now on ``env`` answers these questions without taking down that the trace holds for such answers alone.

    A graph computes the same however its values lie; where it does not, as behind `as_strided`, there is no rule for
    the operator.  What the model then asks itself is taken down, also if the question is the same.
    """
    evaluate = env.evaluate_expr

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        if not of_strides():
            return evaluate(*args, **kwargs)
        with env.suppress_guards():
            return evaluate(*args, **kwargs)

    env.evaluate_expr = evaluated  # type: ignore[method-assign]


def of_strides() -> bool:
    """Whether what asks looks at the strides of a tensor, orders its dimensions by them, or convolves."""
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        if frame.f_code in OF_STRIDES:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
