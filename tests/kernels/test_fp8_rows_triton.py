"""Keys and values kept as e4m3 by Triton's kernels: the reference's bytes, its results, and what is compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from selective_compile import fp8_rows, reference
from tests.kernels.ragged_cases import CASES, COMBINATIONS, MIXED, Case, Inputs, cases, exact_ragged, make_inputs
from tests.kernels.rotary_cases import TURNS, Turn, rotary
from tests.kernels.selection_cases import FEWER, Selecting, drawn, selected
from tests.kernels.test_ragged_attention_splits_triton import DRAFTS, split_into
from tests.kernels.test_ragged_attention_triton import (
    TOLERANCE,
    compile_attention,
    compiling,
    nan_filled_outputs,  # noqa: F401
    triton_cache,  # noqa: F401
    types,
)

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
writes = pytest.importorskip("selective_compile.kernels.ragged_attention_write_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

NAMES = ("mixed", "decode", "only_padding", "window_over_blocks", "softcap", "slopes", "wide_values", "everything")
NAMES += ("prefix", "prefix_and_all_that_goes_with_it")
RUNS = [(case, dtype) for case in CASES if case.name in NAMES for dtype in (torch.float32, torch.bfloat16)]
RUNS += [(case, torch.float16) for case in COMBINATIONS if case.name in ("no_feature", "window_sinks")]


def check(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype).with_fp8_pools()
    expected, *pools = exact_ragged(inputs)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert_same_pools(inputs, dataclasses.replace(inputs, key_pool=pools[0], value_pool=pools[1]))


@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=str)
def test_ragged_attention(case, dtype, nan_filled_outputs):  # noqa: F811
    check(case, dtype)


@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_steps_of_any_kind(case: Case) -> None:
    check(
        dataclasses.replace(case, requests=tuple((rows % 9, past % 60) for rows, past in case.requests)), torch.float32
    )


@pytest.mark.parametrize("bulk", (False, True))
def test_splits_and_bulk_copies(bulk, nan_filled_outputs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attends, "split_config", split_into(1))
    monkeypatch.setattr(attends, "bulk_copies", lambda device: bulk)
    check(dataclasses.replace(DRAFTS, block_size=64, key_size=32, value_size=64), torch.bfloat16)


def test_every_number_is_rounded_to_the_nearest() -> None:
    """All there are, the middles between them, their neighbours, and what is not kept as it is."""
    every = torch.arange(256, dtype=torch.uint8).view(fp8_rows.DTYPE).float()
    every = every[every.isfinite()].unique()
    middles = (every[1:] + every[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(side)) for side in (-1e9, 1e9)]
    others = torch.tensor([torch.nan, torch.inf, -torch.inf, 500.0, -449.0, 1e-30, -0.0, -1e-3])
    numbers = torch.cat([every, middles, *beside, others])
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 16)]).view(-1, 1, 16)
    for scale in (1.0, 0.25, 3.0):
        scales = torch.tensor([scale])
        pools = [torch.zeros(len(numbers), 1, 1, 16, dtype=fp8_rows.DTYPE) for _ in range(2)]
        writes.write(numbers * scale, numbers * scale, *pools, torch.arange(len(numbers)), scales, scales)
        expected = fp8_rows.quantised(numbers * scale, scales)
        for pool in pools:
            assert torch.equal(pool[:, :, 0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fp8", ((128, 512, False), (128, 8, True), (64, 512, True)), ids=str)
@compiling
@pytest.mark.parametrize("target", [*ahead.TARGETS[1:], ahead.CONSUMER], ids=str)
def test_attention_compiles_ahead_of_time_without_spills(target, fp8, tmp_path):
    size, rows, split = fp8
    ahead.assert_ships(compile_attention(target, "bf16", size, rows, split=split, fp8=True), tmp_path)


@compiling
@pytest.mark.parametrize("target", ahead.TARGETS[1:], ids=str)
def test_the_write_compiles_ahead_of_time_without_spills(target, tmp_path):
    kinds = types("bf16") | dict.fromkeys(("key_pool", "value_pool"), "*fp8e4nv")
    constants = {"KV_HEADS": 8, "KEY_SIZE": 128, "VALUE_SIZE": 128, "BLOCK_SIZE": 64}
    constants |= {"BLOCK_K": 8, "BLOCK_D": 128, "BLOCK_DV": 128}
    compiled = ahead.compile_ahead(writes._write_kernel, target, kinds, constants, num_warps=4)
    ahead.assert_ships(compiled, tmp_path)


@pytest.mark.parametrize("step", FEWER, ids=str)
def test_attention_to_selected_keys(step: Selecting, nan_filled_outputs: None) -> None:  # noqa: F811
    inputs, _ = drawn(step, torch.float32)
    selection = selected(inputs, step.count, pool=True)
    own = inputs.with_fp8_pools()
    theirs = own.to(torch.float32)
    expected = reference.ragged_attention(*theirs.ragged()[:15], selection, own.key_scales, own.value_scales)
    found = launcher.ragged_attention(*own.ragged()[:15], selection, own.key_scales, own.value_scales)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float32])
    assert_same_pools(own, theirs)


@pytest.mark.parametrize("turn", (TURNS[0], TURNS[4], TURNS[7]), ids=str)
def test_rotary_attention(turn: Turn, nan_filled_outputs: None) -> None:  # noqa: F811
    own = make_inputs(Case(name="", requests=MIXED, padding_rows=3), torch.float32).with_fp8_pools()
    theirs = own.to(torch.float32)
    expected = reference.rotary_attention(*rotary(theirs, turn))
    found = launcher.rotary_attention(*rotary(own, turn))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float32])
    assert_same_pools(own, theirs)


def assert_same_pools(found: Inputs, expected: Inputs) -> None:
    for pool, exact in ((found.key_pool, expected.key_pool), (found.value_pool, expected.value_pool)):
        assert pool.dtype == fp8_rows.DTYPE and torch.equal(pool.view(torch.uint8), exact.view(torch.uint8))
