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


def set_view(buffer: Tensor) -> None:
    buffer.data = buffer.data.view(torch.int32)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda buffer: buffer.add_(1),
    "in place and not counted": lambda buffer: buffer.data.add_(1),
    "through NumPy": lambda buffer: buffer.numpy().__iadd__(1),
    "resized to less": lambda buffer: buffer.resize_(2),
    "another dtype": set_view,
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
    with same_buffers(model) as every:
        for _ in range(3):
            with unchanged(model):
                pass
        for _ in range(2):
            with unchanged(model) as written:
                model.kept.add_(1)
            assert model.kept.sum() == 0 and written
            with unchanged(model) as written:
                pass
            assert not written
        assert len(copied) == 1
        model.kept.add_(2)
        with unchanged(model):
            model.kept.add_(3)
        assert model.kept.sum() == 18
    assert model.kept.sum() == 0 and every == {(model, "buffer", "kept")}


def test_a_buffer_that_cannot_be_put_back_is_an_error_and_others_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clone = holding(torch.zeros(3)), Tensor.clone
    for name in ("before", "behind"):
        model.register_buffer(name, torch.zeros(2))

    def refused(tensor: Tensor, **options: Any) -> Tensor:
        if tensor.shape == (3,):
            raise NotImplementedError
        return clone(tensor, **options)

    monkeypatch.setattr(Tensor, "clone", refused)
    with unchanged(model):
        model.before.add_(1)
    with pytest.raises(ValueError, match="must be one that can be copied, got torch.float32"), same_buffers(model):
        for buffer in model.buffers():
            buffer.add_(1)
    assert not model.before.any() and not model.behind.any() and model.kept.all()
