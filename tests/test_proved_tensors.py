"""A proof from a model's buffers holds as long as they keep their values: other values are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.proved_tensors import ProvedTensors
from tests.decoders import MAX_POSITIONS, Decoder, by_einsum
from tests.exactness import engine_error, fast, padded_batch, padded_error, step_program


class MaskInBuffer(Decoder):
    """The triangle lies in a buffer, as in GPT-Neo."""

    def __init__(self) -> None:
        super().__init__(layers=2, mask=self.sliced, attend=by_einsum)
        self.register_buffer("bias", torch.ones(1, 1, 100, 100, dtype=torch.bool).tril())

    def sliced(self, ids: Tensor, attention_mask: Any) -> Tensor:
        kept = self.bias[:, :, : ids.shape[1], : ids.shape[1]]  # type: ignore[index]
        return kept if attention_mask is None else kept & attention_mask[:, None, None, :].bool()


def test_values_count_and_not_the_tensor() -> None:
    table = torch.arange(6.0)
    held = ProvedTensors([table, table.clone()])
    assert held.hold([table, table.clone()])
    table[2] += 1
    assert not held.hold([table, torch.arange(6.0)])
    table[2] -= 1
    assert held.hold([table, torch.arange(6.0)])
    for other in (None, torch.arange(6), torch.arange(7.0), torch.arange(6.0)[None]):
        assert not held.hold([table, other])


def test_model_with_its_mask_in_a_buffer_is_exact_up_to_the_buffers_end() -> None:
    model = MaskInBuffer().eval()
    assert engine_error(model, vocabulary=97) < 1e-4
    assert padded_error(model, vocabulary=97)[0] < 1e-4
    assert step_program(model).max_positions == 100
    assert MAX_POSITIONS > 100


def test_engine_names_a_buffer_that_was_changed() -> None:
    model = MaskInBuffer().eval()
    program = step_program(model)
    program.weights_version()
    buffer: Any = model.bias
    buffer.copy_(buffer.clone())
    program.weights_version()
    buffer[0, 0, 7, 3] = False
    with pytest.raises(ValueError, match=r"a proof has read must keep their values, got others in bias"):
        program.weights_version()


LOWER = torch.ones(100, 100, dtype=torch.int64).tril()


class MaskInGlobal(Decoder):
    """The triangle is a variable of the file, as in a notebook."""

    def __init__(self) -> None:
        super().__init__(layers=1, mask=lambda ids, _: LOWER[: ids.shape[1], : ids.shape[1]] == 1)


def test_model_with_its_mask_in_a_global_is_exact_and_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MaskInGlobal().eval()
    assert engine_error(model, vocabulary=97) < 1e-4
    assert padded_error(model, vocabulary=97, masked=False)[0] < 1e-4
    program = step_program(model)
    assert program.max_positions == 100
    engine = sc.Engine(model, sc.EngineConfig(compile=False), program=program)
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "LOWER", LOWER.clone())
        error = str(engine.submit([3, 1, 4], max_new_tokens=1).result().error)
        assert "LOWER must stay Tensor, as compiled, got another Tensor" in error
    before = LOWER[7, 3].clone()
    LOWER[7, 3] = 0
    with pytest.raises(ValueError, match="a proof has read must keep their values"):
        program.weights_version()
    LOWER[7, 3] = before


def test_padded_call_follows_a_buffer_that_was_changed() -> None:
    model = MaskInBuffer().eval()
    compiled = fast(model)
    ids, mask = padded_batch(97)
    assert_same_as(model, compiled, ids, mask)
    buffer: Any = model.bias
    buffer[0, 0, 7, 3] = False
    assert_same_as(model, compiled, ids, mask)


def assert_same_as(model: nn.Module, compiled: Any, ids: Tensor, mask: Tensor) -> None:
    with torch.no_grad():
        difference = (compiled(ids, mask) - model(ids, mask))[mask.bool()]
    assert float(difference.abs().max()) < 1e-4
