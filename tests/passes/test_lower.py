"""What products of rows in groups become on a CPU, and which stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.grouped_ops import grouped_linear
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.lower import lower
from tests.passes.test_host_reads import flat_with

aten = torch.ops.aten
ROWS, EXPERTS, ENDS = torch.randn(4, 8), torch.randn(2, 6, 8), torch.tensor([1, 4], dtype=torch.int32)


def grouped_of(flat: Any) -> list[Any]:
    return [node for node in flat.module.graph.nodes if node.target is grouped_linear]


@pytest.mark.parametrize("ends", [ENDS, ENDS.long()], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_lie_row_by_row_are_multiplied_by_our_kernel(dtype: torch.dtype, ends: Tensor) -> None:
    flat = flat_with(aten._grouped_mm.default, ROWS.to(dtype), EXPERTS.to(dtype).mT, ends)
    assert lower(flat) == 1
    (node,) = grouped_of(flat)
    assert node.args[1].meta["val"].shape == EXPERTS.shape and node.args[1].meta["val"].is_contiguous()
    assert lower(flat) == 0


def test_in_a_batch_invariant_step_in_one_order() -> None:
    flat = flat_with(aten._grouped_mm.default, ROWS, EXPERTS.mT, ENDS)
    for _ in range(2):
        lower(flat, batch_invariant=True)
    (node,) = grouped_of(flat)
    assert node.args[3:] == (None, True)


@pytest.mark.parametrize(
    "given",
    [
        (ROWS, EXPERTS.mT.contiguous(), ENDS),
        (ROWS.half(), EXPERTS.half().mT, ENDS),
        (ROWS[None].expand(2, 4, 8), EXPERTS.mT),
        (ROWS.bfloat16(), EXPERTS.bfloat16().mT, ENDS, None, torch.float32),
    ],
    ids=["by columns", "float16", "in no groups", "another result"],
)
def test_others_stay(given: Any) -> None:
    flat = flat_with(aten._grouped_mm.default, *given)
    assert lower(flat) == 0 and not grouped_of(flat)


def test_on_a_gpu_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flat_with(aten._grouped_mm.default, ROWS, EXPERTS.mT, ENDS)
    monkeypatch.setattr(FlatGraph, "device", torch.device("cuda"))
    assert lower(flat) == 0
