"""The kernels by which the GPU benchmark measures what a launch costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from benchmarks.gpu_parts import launches
from benchmarks.gpu_parts.timing import Timer

ahead = pytest.importorskip("tests.kernels.ahead_of_time")
CPU = torch.device("cpu")
CONTEXT: Any = SimpleNamespace(device=CPU, tiny=True, repeats=2)


def test_each_launch_needs_what_the_one_in_front_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches.seconds_of_a_launch(CONTEXT, Timer(CPU), early=False, at_once=False) > 0
    monkeypatch.setattr(launches, "_counting_kernel", _not_counting_kernel)
    with pytest.raises(ValueError, match=r"each program must count 2 launches, got \[0, 0, 0\]"):
        launches.seconds_of_a_launch(CONTEXT, Timer(CPU), early=False, at_once=False)


@triton.jit
def _not_counting_kernel(counts, PDL, AT_ONCE):
    pass


@pytest.mark.skipif(not isinstance(launches._counting_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("target", ahead.TARGETS[:3], ids=str)
def test_it_compiles_ahead_of_time_and_waits(target: Any, at_once: bool, tmp_path: Any) -> None:
    compiled = ahead.compile_ahead(launches._counting_kernel, target, {"counts": "*i32"}, {"AT_ONCE": at_once})
    ahead.assert_ships(compiled, tmp_path)
    ptx = compiled.asm["ptx"]
    if target.early:
        assert (ptx.index("launch_dependents") < ptx.index("ld.global")) is at_once
