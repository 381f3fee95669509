"""Selections of keys by the Triton kernels, in Triton's interpreter and compiled for four targets without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selective_compile import reference
from selective_compile.kernels.registers import warps
from tests.kernels.selection_cases import (
    FEWER,
    Selecting,
    drawn,
    paged,
    selected,
    unpaged,
    weights_of,
    with_equal_scores,
)

triton = pytest.importorskip("triton")
attention = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
launcher = pytest.importorskip("selective_compile.kernels.selection_triton")
writes = pytest.importorskip("selective_compile.kernels.key_write_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
RUNS = [(step, torch.float32) for step in FEWER] + [(FEWER[0], torch.bfloat16)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(("step", "dtype"), RUNS, ids=str)
def test_the_best_keys(step: Selecting, dtype: torch.dtype) -> None:
    """The same positions as the reference, and the same pool, NaN of unused slots among it."""
    inputs, weights = drawn(step, dtype)
    theirs, ours = paged(inputs, weights, step.count), paged(inputs, weights, step.count)
    assert torch.equal(launcher.ragged_top_keys(*ours), reference.ragged_top_keys(*theirs))
    torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=0, equal_nan=True)
    given = unpaged(inputs, weights, step.count)
    assert torch.equal(launcher.varlen_top_keys(*given), reference.varlen_top_keys(*given))


def test_rows_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five at a time, the last turn of fewer."""
    inputs, weights = drawn(FEWER[0], torch.float32)
    theirs, ours = paged(inputs, weights, FEWER[0].count), paged(inputs, weights, FEWER[0].count)
    width = inputs.block_table.shape[1] * ours[3].shape[2]
    assert len(inputs.query) % 5
    monkeypatch.setattr(launcher, "RANK_BYTES", 5 * 8 * width + 7)
    assert torch.equal(launcher.ragged_top_keys(*ours), reference.ragged_top_keys(*theirs))
    given = unpaged(inputs, weights, FEWER[0].count)
    assert torch.equal(launcher.varlen_top_keys(*given), reference.varlen_top_keys(*given))


def test_of_equal_scores_those_in_front() -> None:
    inputs = with_equal_scores(drawn(FEWER[0], torch.float32)[0])
    for weights in (
        weights_of(inputs).round(),
        torch.zeros(inputs.query.shape[:2]),
        -torch.zeros(inputs.query.shape[:2]),
    ):
        given = paged(inputs, weights, 3)
        found = launcher.ragged_top_keys(*given)
        assert torch.equal(found, reference.ragged_top_keys(*given))
        used = found[: int(inputs.cu_seqlens_q[-1])]
        assert torch.equal(used, torch.where(used >= 0, torch.arange(3, dtype=torch.int32), -1))


@pytest.mark.parametrize(("step", "dtype"), RUNS, ids=str)
def test_attention_to_selected_keys(step: Selecting, dtype: torch.dtype) -> None:
    inputs, _ = drawn(step, dtype)
    for name, pool in (("ragged_attention", True), ("varlen_attention", False)):
        selection = selected(inputs, step.count, pool=pool)
        exact, own = inputs.to(torch.float64), inputs.to(dtype)
        given = [x.ragged() if pool else x.varlen() for x in (exact, own)]
        expected = getattr(reference, name)(*given[0], selection)
        found = getattr(attention, name)(*given[1], selection)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_a_selection_is_among_all_keys() -> None:
    inputs, _ = drawn(FEWER[0], torch.float32)
    selection = selected(inputs, 4, pool=True)
    given = list(inputs.ragged())
    given[10] = 5  # the window
    with pytest.raises(ValueError, match="window and chunk must be 0 with a selection, got 5 and 0"):
        attention.ragged_attention(*given, selection)


SIZES = {"KEY_SIZE": 128, "BLOCK_SIZE": 16, "SCALE": 0.1, "WIDEN": False}
ADDRESSES = {"cu_seqlens_q": "*i32", "context_lens": "*i32", "block_table": "*i32", "slot_mapping": "*i64"}


def compile_for(target: Any, kernel: object, dtype: str, *, fp8: bool = False, **constants: Any) -> object:
    pools = dict.fromkeys(("output", "query", "key", "keys", "values", "key_pool"), f"*{dtype}")
    if fp8:
        pools |= dict.fromkeys(("keys", "values", "key_pool"), "*fp8e4nv")
    types = {**ADDRESSES, **pools, "ranks": "*i64", "weights": "*fp32", "selection": "*i32"}
    types |= dict.fromkeys(("sinks", "slopes", "key_scales", "value_scales"), "*fp32")
    options = warps(int(constants.pop("WARPS", 4)), target.backend)
    return ahead.compile_ahead(kernel, target, types, constants, **options)


@pytest.mark.skipif(not isinstance(launcher._rank_kernel, triton.JITFunction), reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize(("dtype", "fp8"), (("bf16", False), ("fp32", False), ("bf16", True)))
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: object, dtype: str, fp8: bool, tmp_path: object) -> None:
    """For the sizes that DeepSeek-V3.2 has: 64 heads of 128 in the indexer, keys of 192 and values of 128."""
    if fp8 and target == ahead.TARGETS[0]:
        pytest.skip("no numbers of e4m3 below compute capability 8.9")
    key_scales: dict[str, None] = {} if fp8 else {"key_scales": None}
    scales = {} if fp8 else key_scales | {"value_scales": None}
    names, size = ("BLOCK_H", "BLOCK_N", "BLOCK_D", "WARPS"), 4 if dtype == "fp32" else 2
    blocks = dict(zip(names, launcher.block_sizes(64, 128, size), strict=True))
    ranks = compile_for(target, launcher._rank_kernel, dtype, **SIZES, **blocks, GROUP=64, KV_HEADS=1)
    ahead.assert_ships(ranks, tmp_path)
    blocks = dict(zip(names, launcher.block_sizes(1, 192, size), strict=True))
    sizes = {**SIZES, **blocks, "KEY_SIZE": 192, "VALUE_SIZE": 128, "BLOCK_DV": 128, "GROUP": 1, "HEADS": 128}
    sizes |= {"COUNT": 2048, "SOFTCAP": 0.0}
    attends = compile_for(target, launcher._selected_kernel, dtype, fp8=fp8, **sizes, sinks=None, slopes=None, **scales)
    ahead.assert_ships(attends, tmp_path)
    sizes = {"KV_HEADS": 1, "KEY_SIZE": 128, "BLOCK_SIZE": 16, "BLOCK_K": 1, "BLOCK_D": 128}
    written = compile_for(target, writes._write_kernel, dtype, fp8=fp8, **sizes, **key_scales)
    ahead.assert_ships(written, tmp_path)
