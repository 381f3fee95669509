"""States of tensors: another tensor, other memory or a counted write is told, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from selective_compile.tensor_state import states


def moved(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def written(tensor: Tensor) -> None:
    tensor.zero_()


@pytest.mark.parametrize("change", [moved, written])
def test_other_memory_and_writes_in_place_are_told(change: Callable[[Tensor], None]) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    before = states(tensors)
    assert states(tensors) == before
    change(tensors[1])
    assert states(tensors) != before


def test_tensors_of_inference_mode_and_what_is_no_tensor_are_told_by_themselves() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    counted = torch.ones(3)
    tensors = [inference, counted, None]
    before = states(tensors)
    assert states(tensors) == before
    counted.add_(1)
    assert states(tensors) != before
    assert states([counted.clone(), counted, None]) != states(tensors) != states([inference, counted])
