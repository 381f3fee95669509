"""Selections of keys by the C++ kernels."""

from __future__ import annotations

import pytest
import torch

from selective_compile import reference
from tests.kernels.selection_cases import (
    STEPS,
    Selecting,
    drawn,
    paged,
    selected,
    unpaged,
    weights_of,
    with_equal_scores,
)

attention = pytest.importorskip("selective_compile.kernels.ragged_attention_cpu")
launcher = pytest.importorskip("selective_compile.kernels.selection_cpu")
pytestmark = pytest.mark.skipif(not attention.available(), reason="no C++ compiler")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_best_keys(step: Selecting, dtype: torch.dtype) -> None:
    """The same positions as the reference, and the same pool, NaN of unused slots among it."""
    inputs, weights = drawn(step, dtype)
    theirs, ours = paged(inputs, weights, step.count), paged(inputs, weights, step.count)
    assert torch.equal(launcher.ragged_top_keys(*ours), reference.ragged_top_keys(*theirs))
    torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=0, equal_nan=True)
    given = unpaged(inputs, weights, step.count)
    assert torch.equal(launcher.varlen_top_keys(*given), reference.varlen_top_keys(*given))


def test_of_equal_scores_those_in_front() -> None:
    inputs = with_equal_scores(drawn(STEPS[0], torch.float32)[0])
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_attention_to_selected_keys_in_int8(step: Selecting, dtype: torch.dtype) -> None:
    inputs, _ = drawn(step, dtype)
    selection = selected(inputs, step.count, pool=True)
    own = inputs.with_int8_pools()
    exact = own.to(torch.float64)
    expected = reference.ragged_attention(*exact.ragged(), selection)
    found = attention.ragged_attention(*own.ragged(), selection)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(own.key_pool, exact.key_pool) and torch.equal(own.value_pool, exact.value_pool)


def test_a_selection_is_among_all_keys() -> None:
    inputs, _ = drawn(STEPS[0], torch.float32)
    selection = selected(inputs, 4, pool=True)
    given = list(inputs.ragged())
    given[10] = 5  # the window
    with pytest.raises(ValueError, match="window and chunk must be 0 with a selection, got 5 and 0"):
        attention.ragged_attention(*given, selection)


def test_a_wrong_table_writes_nothing() -> None:
    inputs, weights = drawn(STEPS[0], torch.float32)
    given = list(paged(inputs, weights, 3))
    given[6] = given[6] + 10_000
    before = given[3].clone()
    with pytest.raises(ValueError, match="block_table must name blocks of the pool"):
        launcher.ragged_top_keys(*given)
    assert torch.equal(given[3].nan_to_num(9.0), before.nan_to_num(9.0))


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    """Alone or in a batch, in one step or token by token."""
    inputs, weights = drawn(STEPS[0], torch.float32)
    whole = launcher.varlen_top_keys(*unpaged(inputs, weights, 5))
    attended = attention.varlen_attention(*inputs.varlen(), whole)
    bounds = inputs.cu_seqlens_q.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        q, k, v, w = (tensor[begin:end] for tensor in (inputs.query, inputs.key, inputs.value, weights))
        cu_seqlens_q = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = launcher.varlen_top_keys(q, k, w, cu_seqlens_q, inputs.scale, 5)
        assert torch.equal(alone, whole[begin:end])
        again = attention.varlen_attention(q, k, v, cu_seqlens_q, *inputs.varlen()[4:], alone)
        assert torch.equal(again, attended[begin:end])
