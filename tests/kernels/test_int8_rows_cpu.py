"""Rows that the native CPU kernel keeps as int8: byte for byte those of the reference, and read as what they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import ops, reference
from selective_compile.implementations import forced_implementation
from selective_compile.int8_rows import quantised, row_bytes
from selective_compile.kernels import ragged_attention_cpu as launcher
from tests.kernels.ragged_cases import CASES, Case, make_inputs

pytestmark = pytest.mark.skipif(not launcher.available(), reason=str(launcher.unavailable_reason()))
BLOCK = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def written(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [T, K, D] of a request: the result, the pool of keys and that of values."""
    count, heads, size = keys.shape
    pools = [torch.full((-(-count // BLOCK), heads, BLOCK, row_bytes(size)), 77, dtype=torch.int8) for _ in range(2)]
    blocks = len(pools[0])
    metadata = (
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.arange(count),
    )
    return launcher.ragged_attention(torch.ones_like(keys), keys, values, *pools, *metadata, 1.0, 0, 0.0), *pools


def slots(pool: Tensor, count: int) -> Tensor:
    return pool.transpose(1, 2).flatten(0, 1)[:count]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_the_bytes_are_those_of_the_reference(data: st.DataObject, dtype: torch.dtype) -> None:
    """Ties, zeros, subnormal and huge numbers among them."""
    count, heads, size = (data.draw(st.integers(1, most)) for most in (9, 2, 40))
    steps = st.integers(-254, 254).map(lambda step: step / 2)
    width: Any = 16 if dtype == torch.float16 else 32
    numbers = st.one_of(steps, st.floats(width=width, allow_nan=False, allow_infinity=False))
    drawn = data.draw(st.lists(numbers, min_size=size, max_size=size))
    scale = data.draw(st.sampled_from((1.0, 3.0, 2.0**-140, 2.0**90)))
    rows = (torch.tensor(drawn) * torch.linspace(0, scale, count * heads)[:, None]).reshape(count, heads, size)
    rows = rows.to(dtype).nan_to_num(1.0, 2.0, -3.0)
    _, keys, values = written(rows, rows.flip(2))
    assert torch.equal(slots(keys, count), quantised(rows))
    assert torch.equal(slots(values, count), quantised(rows.flip(2)))
    assert (keys.transpose(1, 2).flatten(0, 1)[count:] == 77).all()


@pytest.mark.parametrize("count", (1, 3, 40), ids=("one", "few", "tile"))
@pytest.mark.parametrize("wrong", (math.nan, math.inf))
def test_what_is_not_finite_shows_in_the_rows_that_see_it(wrong: float, count: int) -> None:
    rows = torch.randn(count, 2, 16)
    rows[-1, 1, 4] = wrong
    output, keys, _ = written(rows, torch.randn(count, 2, 16))
    assert output[-1, 1].isnan().all() and output[:, 0].isfinite().all() and output[:-1].isfinite().all()
    assert not slots(keys, count)[-1, 1, :16].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prompt_in_parts_leaves_the_same_rows(dtype: torch.dtype) -> None:
    """Whatever was attended to before: a row is rounded once, by itself."""
    case = Case(name="", requests=((20, 0),), key_size=24, value_size=8)
    whole = make_inputs(case, dtype).with_int8_pools()
    parts = make_inputs(case, dtype).with_int8_pools()
    launcher.ragged_attention(*whole.ragged())
    for begin, end in ((0, 7), (7, 8), (8, 20)):
        rows = slice(begin, end)
        one = (whole.query[rows], whole.key[rows], whole.value[rows], parts.key_pool, parts.value_pool)
        metadata = (
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            whole.block_table,
            whole.slot_mapping[rows],
        )
        launcher.ragged_attention(*one, *metadata, 0.3, 0, 0.0)
    assert torch.equal(whole.key_pool, parts.key_pool) and torch.equal(whole.value_pool, parts.value_pool)


def test_rows_of_the_wrong_length_or_kind_are_refused() -> None:
    inputs = make_inputs(CASES[3], torch.float32)
    good = inputs.with_int8_pools()
    pools = {
        "with rows of 20 and 20 torch.int8": (good.key_pool, good.value_pool[..., :16]),
        r"must be torch\.float32, or torch\.int8 both of them": (good.key_pool, inputs.value_pool),
    }
    before = good.key_pool.clone()
    for message, pair in pools.items():
        with pytest.raises(ValueError, match=message):
            launcher.ragged_attention(*good.ragged()[:3], *pair, *good.ragged()[5:])
        assert torch.equal(good.key_pool, before)


def test_they_are_refused_when_traced_too() -> None:
    with torch.device("meta"):
        rows = [torch.empty(3, heads, 16) for heads in (4, 2, 2)]
        metadata = [torch.empty(2, dtype=torch.int32) for _ in range(4)]
        short, pool = (torch.empty(4, 2, 16, size, dtype=torch.int8) for size in (16, 20))
        floats = torch.empty(4, 2, 16, 16)
    with pytest.raises(ValueError, match=r"key_pool must be \[num_blocks, K, block_size, 20\]"):
        ops.ragged_attention(*rows, short, pool, *metadata, 1.0, 0, 0.0)
    with pytest.raises(ValueError, match=r"value_pool must be \[num_blocks, K, block_size, 20\]"):
        ops.ragged_attention(*rows, pool, floats, *metadata, 1.0, 0, 0.0)
    with pytest.raises(ValueError, match=r"value_pool must be \[num_blocks, K, block_size, 16\]"):
        ops.ragged_attention(*rows, floats, pool, *metadata, 1.0, 0, 0.0)
    assert ops.ragged_attention(*rows, pool, pool, *metadata, 1.0, 0, 0.0).shape == (3, 4, 16)


def test_triton_refuses_them() -> None:
    pytest.importorskip("triton")
    inputs = make_inputs(CASES[0], torch.float32).with_int8_pools()
    with (
        forced_implementation("triton"),
        pytest.raises(ValueError, match="for Triton's kernels, got torch.int8"),
    ):
        ops.ragged_attention(*inputs.ragged())


def test_of_a_step_in_the_reference_rows_are_read_as_they_stand_in_the_pool() -> None:
    """One token attends to itself: its value comes back rounded."""
    inputs = make_inputs(Case(name="", requests=((1, 0),), key_size=4, value_size=3), torch.float32).with_int8_pools()
    found = reference.ragged_attention(*inputs.ragged())
    expected = quantised(inputs.value)
    scale = expected[..., -4:].contiguous().view(torch.float32)
    assert torch.allclose(found.reshape(2, 2, 3)[:, 0], (expected[..., :3] * scale)[0])
    assert not torch.equal(found.reshape(2, 2, 3)[:, 0], inputs.value[0])
