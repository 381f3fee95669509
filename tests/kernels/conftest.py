"""What tests of kernels on CPUs share."""

from __future__ import annotations

import pytest
import torch

from selective_compile.kernels import native

MATRIX_UNITS = [False, True] if "amx_bf16" in native.processor().split() else [False]


@pytest.fixture(params=MATRIX_UNITS, ids=lambda used: "matrix unit" if used else "vectors")
def matrix_unit(request, monkeypatch):
    """Whether the kernel uses one for bfloat16, where there is one: each has kernels of its own."""
    monkeypatch.setattr(native, "MATRIX_UNIT", request.param)
    return request.param


def pytest_collection_modifyitems(config, items):
    """What computes in another dtype than bfloat16 knows no matrix unit: once is enough."""
    again = [item for item in items if parameters(item).get("matrix_unit") and not in_bfloat16(item)]
    config.hook.pytest_deselected(items=again)
    kept = set(items).difference(again)
    items[:] = [item for item in items if item in kept]


def parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def in_bfloat16(item):
    return parameters(item).get("dtype", torch.bfloat16) is torch.bfloat16
