"""States of tensors: another tensor, other memory or a counted write is told, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from selective_compile.tensor_state import class_of, read_by_graphs, states


def moved(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def written(tensor: Tensor) -> None:
    tensor.zero_()


@pytest.mark.parametrize("change", [moved, written])
def test_other_memory_and_writes_in_place_are_told(change: Callable[[Tensor], None]) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    before = states(tensors)
    assert states(tensors, before) is before
    change(tensors[1])
    assert states(tensors, before) is not before


def test_a_tensor_that_comes_back_to_an_address_is_in_other_memory() -> None:
    """As where an allocator hands out first what was freed last."""
    memory = np.ones(1000, np.float32)
    tensor = torch.empty(1000)
    tensor.data = torch.from_numpy(memory)
    before, address = states([tensor]), tensor.data_ptr()
    tensor.data = torch.zeros(1000)
    tensor.data = torch.from_numpy(memory)
    assert tensor.data_ptr() == address
    assert states([tensor], before) is not before


def test_tensors_of_inference_mode_and_what_is_no_tensor_are_told_by_themselves() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    counted = torch.ones(3)
    tensors = [inference, counted, None]
    before = states(tensors)
    assert states(tensors, before) is before
    counted.add_(1)
    after = states(tensors, before)
    assert after is not before
    assert not after.hold([counted.clone(), counted, None]) and not after.hold([inference, counted])


def test_of_a_number_in_the_hosts_memory_a_graph_holds_the_value() -> None:
    """It is passed to kernels as it was when they were captured; what is on the device, by its address."""
    scale, weight = torch.tensor(2.0), torch.ones(3, device="meta")
    of_device, of_host = (read_by_graphs([weight, scale, 3], torch.device(kind)) for kind in ("meta", "cpu"))
    assert read_by_graphs([weight, scale, 3], torch.device("meta")) == of_device
    scale.mul_(2)
    assert read_by_graphs([weight, scale, 3], torch.device("meta")) != of_device
    assert read_by_graphs([scale], torch.device("cpu")) == of_host[1:2]


def test_classes_are_told_with_those_of_the_parts_that_tensors_are_made_of() -> None:
    plain = torch.ones(2, 3)
    assert class_of(plain) == class_of(nn.Parameter(plain)) == class_of(nn.Buffer(plain))
    nested = [TwoTensor(plain, plain.clone()), TwoTensor(plain, TwoTensor(plain, plain.clone()))]
    kinds = [class_of(tensor) for tensor in (plain, *nested, nested[0].to(torch.float64))]
    assert len({*kinds}) == 4 and class_of(TwoTensor(plain, plain.clone())) == kinds[1]
