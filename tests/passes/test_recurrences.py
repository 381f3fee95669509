"""Passes 1 and 3 for recurrences: which shifts of tokens are convolutions, and what is nearly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from selective_compile.passes.convolutions import whole_convolutions
from tests.passes.graphs import trace


def read_twice(padded: Tensor) -> Tensor:
    return padded[:, :-1] + padded.sum(1, keepdim=True)


SHIFTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "padded and cut": (lambda x: nn.ZeroPad2d((0, 0, 1, -1))(x), 1),
    "padded and cut, and cut again": (lambda x: F.pad(x, (0, 0, 2, -1))[:, :-1], 2),
    "padded by two, then cut": (lambda x: F.pad(x, (0, 0, 2, 0))[:, :-2], 2),
    "padded, then cut": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], 1),
}
NO_SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded with ones": lambda x: F.pad(x, (0, 0, 1, 0), value=1.0)[:, :-1],
    "padded by one, cut by two": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-2],
    "cut in front": lambda x: F.pad(x, (0, 0, 0, 1))[:, 1:],
    "features": lambda x: F.pad(x, (1, 0, 0, 0))[:, :, :-1],
    "features, too": lambda x: F.pad(x, (1, -1, 1, 0))[:, :-1],
    "heads": lambda x: F.pad(x.view(-1, 2, 4), (0, 0, 1, 0))[:, :-1],
    "read elsewhere, too": lambda x: read_twice(F.pad(x, (0, 0, 1, 0))),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_shift_is_a_convolution_however_it_is_spelled(name: str) -> None:
    function, tokens = SHIFTS[name]
    traced = trace(function)
    assert whole_convolutions(traced) == 1
    (weight,) = (buffer for buffer in traced.module.buffers() if buffer.dim() == 2)
    assert weight[0].tolist() == [1.0] + [0.0] * tokens
    assert whole_convolutions(traced) == 0


@pytest.mark.parametrize("name", NO_SHIFTS)
def test_what_is_nearly_a_shift_is_none(name: str) -> None:
    assert whole_convolutions(trace(NO_SHIFTS[name])) == 0
