"""Quantised linear layers: exact next to the quantised model itself, or refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.passes.weight_classes import mixes_rows
from selective_compile.step_program import StepProgram
from tests.models import tiny
from tests.test_live_settings import EAGER, RAGGED, alone, ours

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


class Int8Linear(nn.Module):
    """Weight-only int8, as code beside a checkpoint might have it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name != "lm_head"
    ]


def test_weight_only_layers_of_ones_own_are_ragged() -> None:
    model = tiny("llama", num_hidden_layers=1)
    for parent, name, layer in linears(model):
        setattr(parent, name, Int8Linear(layer))
    assert ours(model, RAGGED) == alone(model)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_quantise_all_rows_together_are_run_request_by_request() -> None:
    """torch's dynamically quantised layers take one scale for all rows: no token is by itself."""
    model = torch.ao.quantization.quantize_dynamic(tiny("llama", num_hidden_layers=1), {nn.Linear})
    assert ours(model, EAGER) == alone(model)
    with pytest.raises(ValueError, match="quantized.linear_dynamic|cannot trace"):
        ours(model, RAGGED)


@needs_torchao
def test_torchaos_weight_only_int8_is_ragged_and_its_class_asked() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny("llama", num_hidden_layers=1)
    quantize_(model, Int8WeightOnlyConfig())
    program = compile_step_program(model, RAGGED)
    assert isinstance(program, StepProgram)
    targets = [node.target for node in program._flat.module.graph.nodes]
    assert F.linear in targets and torch.ops.selective.linear.default not in targets
    assert ours(model, RAGGED) == alone(model)


@needs_torchao
def test_a_weight_class_that_quantises_all_rows_together_is_refused_by_name() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, PerTensor, quantize_

    for granularity, mixes in ((PerRow(), False), (PerTensor(), True)):
        layer: Any = nn.Sequential(nn.Linear(64, 32, bias=False))
        quantize_(layer, Int8DynamicActivationInt8WeightConfig(granularity=granularity))
        assert mixes_rows(layer[0].weight) is mixes
    model = tiny("llama", num_hidden_layers=1)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    with pytest.raises(ValueError, match="a row of its result depends on other rows, by what a weight of class Int8"):
        ours(model, sc.EngineConfig(compile=False, fallback="refuse"))
    assert ours(model, EAGER) == alone(model)
