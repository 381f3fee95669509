"""What launches of attention ask for: kernels stand back, and grids and options are looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.ragged_cases import Case, make_inputs
from tests.kernels.test_latent_attention_triton import compile_latents
from tests.kernels.test_ragged_attention_triton import Recorder, compile_attention, compiling

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
cuts = pytest.importorskip("selective_compile.kernels.ragged_attention_cut_triton")
merges = pytest.importorskip("selective_compile.kernels.ragged_attention_merge_triton")
writes = pytest.importorskip("selective_compile.kernels.ragged_attention_write_triton")
launches = pytest.importorskip("selective_compile.kernels.dependent_launch")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
Launch = tuple[str, tuple[int, ...], dict[str, Any]]
GPU = torch.device("cuda", 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of a device of 132 processors: kernel, grid and options.  A step is cut into pieces indeed."""
    recorder = Recorder(lambda kernel, grid, args, options: (kernel.fn.__name__, grid, options))
    for module in (attends, merges, writes):
        monkeypatch.setattr(module, "on_device", recorder)
    monkeypatch.setattr(attends, "processors", lambda device: 132)
    return recorder.seen


def step_of(requests: int, context: int) -> Any:
    """Of one token each."""
    case = Case(name="", requests=((1, context - 1),) * requests, query_heads=8, kv_heads=2, block_size=64)
    return make_inputs(case, torch.float32).ragged()


@pytest.mark.parametrize("requests", [1, 8, 12, 13, 32, 64])
def test_keys_are_split_whatever_the_number_of_requests(
    requests: int, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into as many pieces as the device has use for, so that a long request among many is not walked by one program."""
    slots: list[int] = []
    plan = cuts.plan

    def noted(*lengths: Any, **options: Any) -> Any:
        slots.append(lengths[2].slots)
        return plan(*lengths, **options)

    monkeypatch.setattr(cuts, "plan", noted)
    launcher.ragged_attention(*step_of(requests, 600))
    names = [name for name, _, _ in launched]
    assert slots == [attends.split_config(parts=2, keys=None, large=False, processors=132).slots] and slots[0] > 132
    assert "attention_kernel" in names and "_merge_kernel" in names
    grid = next(grid for name, grid, _ in launched if name == "attention_kernel")
    assert grid[0] // 2 >= slots[0]  # a program for each of the two heads


@pytest.mark.parametrize("early", [True, False])
def test_launches_ask_to_begin_early_where_the_device_can(
    early: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attends, merges, writes):
        monkeypatch.setattr(module, "begins_early", lambda device: early)
    launcher.ragged_attention(*step_of(3, 600))
    asked = {name: options.get("launch_pdl", False) for name, _, options in launched}
    assert asked == dict.fromkeys(("_write_kernel", "attention_kernel", "_merge_kernel"), early)


@pytest.mark.parametrize(
    ("capability", "hip", "early"),
    [((8, 0), None, False), ((8, 9), None, False), ((9, 0), None, True), ((10, 0), None, True), ((9, 4), "6.2", False)],
)
def test_devices_that_can_begin_early(
    capability: tuple[int, int], hip: str | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launches.begins_early.__wrapped__(GPU) is early
    assert not launches.begins_early.__wrapped__(torch.device("cpu"))


HOPPER = ahead.TARGETS[1]
COMPILED = {
    "pieces": lambda: compile_attention(HOPPER, "bf16", 128, 8, split=True),
    "whole": lambda: compile_attention(HOPPER, "bf16", 128, 8),
    "latents": lambda: compile_latents(HOPPER, "step", 16, 8),
}


@compiling
@pytest.mark.parametrize("name", COMPILED)
def test_attention_gives_leave_before_it_reads_keys(name: str) -> None:
    """Then the launch of what comes behind it, the merge above all, takes no time of its own."""
    _, _, behind = COMPILED[name]().asm["ptx"].partition("griddepcontrol.wait")
    between, leave, _ = behind.partition("griddepcontrol.launch_dependents")
    assert leave and not ahead.global_accesses(between)
