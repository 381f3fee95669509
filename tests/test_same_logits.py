"""A kept capture is taken only where it gives the logits of the live model, whatever else says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import kept_captures, kept_files
from selective_compile.capture import capture
from selective_compile.kept_captures import capture_once
from selective_compile.same_logits import agree, gives_logits_of, ids_for
from tests.decoders import Small
from tests.models import tiny

FACTOR = 1.0


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured by tracing; others are kept in a folder of the test."""
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "selective_compile")
    found: list[nn.Module] = []
    monkeypatch.setattr(kept_captures, "capture", lambda model: (found.append(model), capture(model))[1])
    return found


class AsksForInt(Small):
    """What Dynamo says of a size without data is not what a run says."""

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        if isinstance(input_ids.shape[-1], int) and FACTOR != 1.0:
            rows = rows * FACTOR
        return self.head(rows)


class AsksForTensor(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        return self.head(rows * FACTOR if type(rows) is Tensor and FACTOR != 1.0 else rows)


@pytest.mark.parametrize("kind", [AsksForInt, AsksForTensor])
def test_where_a_run_without_data_takes_another_branch(
    kind: type[Small], traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [kind().eval() for _ in range(3)]
    assert not [gives_logits_of(capture_once(model), model) for model in models[:2]].count(False)
    assert len(traced) == 1
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    captured = capture_once(models[2])
    assert len(traced) == 2 and gives_logits_of(captured, models[2])


def double(rows: Tensor) -> Tensor:
    return rows * 2


torch.compiler.allow_in_graph(double)


class HoldsFunction(Small):
    def __init__(self) -> None:
        super().__init__()
        self.function = double

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.function(self.embed(input_ids)))


def test_where_a_name_stands_for_another_function(traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    models = [HoldsFunction().eval() for _ in range(2)]
    capture_once(models[0])
    other = torch.compiler.allow_in_graph(lambda rows: rows * 5)
    monkeypatch.setitem(globals(), "double", other)
    captured = capture_once(models[1])
    assert len(traced) == 2 and gives_logits_of(captured, models[1])


def test_what_a_model_leaves_in_its_class_belongs_to_what_a_trace_holds_for(traced: list[nn.Module]) -> None:
    class Caches(Small):
        table: Any = None

        def forward(self, input_ids: Tensor) -> Tensor:
            if Caches.table is None:
                Caches.table = torch.arange(8.0)
            return self.head(self.embed(input_ids) * Caches.table)

    model = Caches().eval()
    for _ in range(2):
        capture_once(model)
        assert type(Caches.table) is Tensor
        Caches.table = None
    assert model(torch.ones(1, 3, dtype=torch.int64)).shape == (1, 3, 11)
    assert traced == [model]
    capture_once(model)
    assert len(traced) == 2


def test_a_mixture_of_experts_is_kept(traced: list[nn.Module]) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mixtral", vocab_size=99, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, **sizes,
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    for model in models:
        assert gives_logits_of(capture_once(model), model)
    assert traced == models[:1]


def test_ids_fit_every_table() -> None:
    assert ids_for(tiny("gpt2")).unique().numel() == 12
    assert ids_for(nn.Linear(2, 2)).max() == 1


def test_agreement_is_of_dtype_and_numbers() -> None:
    logits = torch.randn(1, 12, 30)
    assert agree(logits * (1 + 1e-6), logits) and not agree(logits * 1.01, logits)
    assert not agree(logits.bfloat16(), logits) and not agree(logits * torch.nan, logits)
