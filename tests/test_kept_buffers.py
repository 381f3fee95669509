"""Buffers are what they were before a run, whatever it does to them, and are copied once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    "to the same values": lambda buffer: buffer.mul_(1),
    "given memory of another kind": lambda buffer: setattr(buffer, "data", torch.ones(3).clone()),
    "its memory taken": lambda buffer: buffer.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_buffer_is_put_back(how: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        model = holding(torch.tensor([1.0, torch.nan, 3.0]))
        before, address = model.kept.clone(), model.kept.data_ptr()
        with same_buffers(model) as written:
            CHANGES[how](model.kept)
        assert written == ({(model, "buffer", "kept")} if not (inference and how == "to the same values") else set())
        assert torch.equal(model.kept, before) or torch.allclose(model.kept, before, equal_nan=True)
        moved = how in ("resized", "its memory taken")
        assert model.kept.shape == (3,) and (moved or model.kept.data_ptr() == address)


def of_quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)


# What holds a value, and how to write another without being counted, and counted.
KINDS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "of no dimension": (lambda: torch.tensor(1.0), lambda b: b.data.add_(1), lambda b: b.add_(1)),
    "transposed": (lambda: torch.zeros(2, 3).t(), lambda b: b.data.fill_(1), lambda b: b.fill_(1)),
    "expanded": (lambda: torch.zeros(1).expand(4), lambda b: b.data[:1].fill_(1), lambda b: b[:1].fill_(1)),
    "a zero of the other sign": (lambda: torch.zeros(2), lambda b: b.data.neg_(), lambda b: b.neg_()),
    "conjugated": (
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda b: b.data.add_(1),
        lambda b: b.add_(1),
    ),
    "negated": (
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
        lambda b: b.data.add_(1),
        lambda b: b.add_(1),
    ),
    "quantised": (of_quantised, lambda b: b.data.copy_(torch.ones(4)), lambda b: b.copy_(torch.ones(4))),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda b: None, lambda b: b.mul_(2)),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), lambda b: None, lambda b: b.mul_(2)),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda b: None,
        lambda b: b.mul_(2),
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda b: None,
        lambda b: b.mul_(2),
    ),
}


def values(tensor: Tensor) -> str:
    if tensor.is_nested:
        return str([each.tolist() for each in tensor.unbind()])
    if tensor.is_quantized:
        return str(tensor.int_repr().tolist())
    return str((tensor.to_dense() if tensor.layout is not torch.strided else tensor).tolist())


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|quantize)")
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_buffer_may_be(kind: str, counted: bool) -> None:
    make, *ways = KINDS[kind]
    model = holding(make())
    before = values(model.kept)
    with same_buffers(model) as written:
        ways[counted](model.kept)
        changed = values(model.kept) != before
    assert values(model.kept) == before and bool(written) == changed and (changed or not counted)
    with same_buffers(model) as written:
        pass
    assert not written


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


def test_a_run_within_another_leaves_what_that_wrote_without_being_counted() -> None:
    model = holding(torch.zeros(3))
    with same_buffers(model):
        model.kept.data.add_(2)
        with unchanged(model) as written:
            pass
        assert not written and model.kept.sum() == 6
        with unchanged(model) as written:
            model.kept.data.add_(3)
        assert written and model.kept.sum() == 6
    assert not model.kept.any()


def test_two_of_one_memory_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied, clone = holding(torch.zeros(9)), [], Tensor.clone
    model.register_buffer("part", model.kept[:4])
    monkeypatch.setattr(Tensor, "clone", lambda tensor, **options: (copied.append(tensor), clone(tensor, **options))[1])
    with same_buffers(model):
        with unchanged(model):
            model.kept.add_(1)
        version = model.kept._version
        for _ in range(3):
            with unchanged(model) as written:
                pass
            assert not written
    assert len(copied) == 2 and model.kept._version == version and not model.kept.any()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_all_are_put_back_if_one_cannot_be_looked_at(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody stops it, or there is no room for what compares bytes."""
    model, looked = holding(torch.zeros(3)), []
    model.register_buffer("other", torch.zeros(2))

    def stopped(*tensors: Tensor) -> bool:
        looked.append(tensors)
        raise error

    with suppress(KeyboardInterrupt), same_buffers(model) as written:
        for buffer in model.buffers():
            buffer.data.add_(1)
        monkeypatch.setattr(torch, "equal", stopped)
    assert looked and len(written) == 2 and not model.kept.any() and not model.other.any()


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
