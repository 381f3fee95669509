"""Buffers are what they were before a run, whatever it does to them, and are copied once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile.module_state import same_buffers, unchanged


def holding(buffer: Tensor) -> Any:
    module = nn.Module()
    module.register_buffer("kept", buffer)
    return module


def set_data(buffer: Tensor) -> None:
    buffer.data = torch.full((3,), 5.0)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda buffer: buffer.add_(1),
    "to NaN": lambda buffer: buffer.fill_(torch.nan),
    "resized": lambda buffer: buffer.resize_(7).fill_(1),
    "given other memory": set_data,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_buffer_is_put_back(how: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        model = holding(torch.tensor([1.0, torch.nan, 3.0]))
        before, address = model.kept.clone(), model.kept.data_ptr()
        with same_buffers(model) as written:
            CHANGES[how](model.kept)
        assert written == {(model, "buffer", "kept")}
        assert torch.equal(model.kept, before) or torch.allclose(model.kept, before, equal_nan=True)
        assert model.kept.shape == (3,) and (how == "resized" or model.kept.data_ptr() == address)


LEFT: dict[str, Callable[[], Tensor]] = {
    "NaN": lambda: torch.full((2,), torch.nan),
    "expanded": lambda: torch.full((1,), torch.nan).expand(4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "four bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
    "whole numbers": lambda: torch.arange(5),
    "of no numbers": lambda: torch.empty(0),
}


@pytest.mark.parametrize("kind", LEFT)
def test_one_that_nobody_writes_keeps_its_version(kind: str) -> None:
    model = holding(LEFT[kind]())
    version = model.kept._version
    with unchanged(model) as written:
        pass
    assert not written and model.kept._version == version


def test_runs_within_others_copy_nothing_that_is_copied_already(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied, clone = holding(torch.zeros(9)), [], Tensor.clone

    def counted(tensor: Tensor, **options: Any) -> Tensor:
        copied.append(tensor)
        return clone(tensor, **options)

    monkeypatch.setattr(Tensor, "clone", counted)
    with same_buffers(model):
        for _ in range(3):
            with unchanged(model):
                pass
        assert len(copied) == 1
        with unchanged(model):
            model.kept.add_(1)
        assert model.kept.sum() == 0
        model.kept.add_(2)
        with unchanged(model):
            model.kept.add_(3)
        assert model.kept.sum() == 18
    assert model.kept.sum() == 0
