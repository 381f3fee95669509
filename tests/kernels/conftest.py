"""What tests of kernels on CPUs share."""

from __future__ import annotations

import pytest

from selective_compile.kernels import native

MATRIX_UNITS = [False, True] if "amx_bf16" in native.processor().split() else [False]


@pytest.fixture(params=MATRIX_UNITS, ids=lambda used: "matrix unit" if used else "vectors")
def matrix_unit(request, monkeypatch):
    """Whether the kernel uses one for bfloat16, where there is one: each has kernels of its own."""
    monkeypatch.setattr(native, "MATRIX_UNIT", request.param)
    return request.param
