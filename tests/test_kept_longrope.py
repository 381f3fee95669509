"""A second start of a model that makes tables in its first call, and writes a buffer in each, traces nothing either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from selective_compile import kept_captures, kept_files
from selective_compile.capture import capture
from selective_compile.kept_captures import ENDING, capture_once, loaded, own_folder, save
from selective_compile.rewriting import proved
from selective_compile.same_logits import written_inputs
from selective_compile.step import LongForm
from tests.decoders import Small
from tests.longrope import longrope

pytestmark = pytest.mark.skipif(
    TorchVersion(transformers.__version__) < TorchVersion("5.24"), reason="models of transformers 5.17 make no tables"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "selective_compile")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured by tracing."""
    found: list[nn.Module] = []

    def noted(model: nn.Module, *rest: Any) -> Any:
        found.append(model)
        return capture(model, *rest)

    monkeypatch.setattr(kept_captures, "capture", noted)
    return found


def test_a_second_start_traces_nothing(traced: list[nn.Module]) -> None:
    models = [longrope(40), longrope(40)]
    graphs = [proved(model, keep=True)[1] for model in models]
    assert traced == [models[0]] * 2, "as it is before its first call, and behind it"
    assert graphs[0].long_form == graphs[1].long_form == LongForm(beyond=40, anew=True)
    assert graphs[0].flat is not None and graphs[1].flat is not None
    assert graphs[0].flat.module.code == graphs[1].flat.module.code


def test_nor_that_of_one_whose_code_asks_how_long_a_request_is(traced: list[nn.Module]) -> None:
    """Of which two traces are kept as one."""
    models = [longrope(40, "phimoe"), longrope(40, "phimoe")]
    graphs = [proved(model, keep=True)[1] for model in models]
    assert traced == [models[0]] * 2
    assert graphs[0].long_form == graphs[1].long_form == LongForm(beyond=40, anew=True)
    assert graphs[0].flat is not None and graphs[1].flat is not None
    assert graphs[0].flat.module.code == graphs[1].flat.module.code


def test_what_is_tried_leaves_the_buffer_that_it_writes(traced: list[nn.Module]) -> None:
    model = longrope(40)
    proved(model, keep=True)
    buffer = model.model.rotary_emb.inv_freq
    with torch.no_grad():
        buffer.fill_(7)
    captured = capture_once(model)
    assert len(traced) == 2 and written_inputs(captured, model)
    assert bool((buffer == 7).all())


class Counting(Small):
    """Whose buffer tells how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Any:
        self.calls.add_(1)
        return self.head(self.embed(input_ids))


def test_a_buffer_that_is_counted_on_is_not_by_trials() -> None:
    model = Counting().eval()
    captured = capture(model)
    before = model.calls.clone()
    save(captured, model, own_folder(), "parts")
    (file,) = own_folder().glob(f"*{ENDING}")
    assert loaded(file, model) is not None
    assert torch.equal(model.calls, before)


class Holding(Small):
    def forward(self, input_ids: Tensor) -> Any:
        return self.head(self.embed(input_ids) * self.held)


def test_a_plain_attribute_is_the_models_own(traced: list[nn.Module]) -> None:
    first, second = Holding().eval(), Holding().eval()
    second.held = torch.full((8,), 5.0)
    for model in (first, second):
        assert any(example is model.held for example in capture_once(model).examples)
    assert traced == [first]
