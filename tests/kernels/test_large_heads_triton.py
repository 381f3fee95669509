"""The Triton kernel of attention in its interpreter where other tests only compile it: heads of up to 576 numbers, and
each feature alone in 16 bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.ragged_cases import Case, exact_ragged, exact_varlen, make_inputs
from tests.kernels.test_ragged_attention_splits_triton import split_into
from tests.kernels.test_ragged_attention_triton import TOLERANCE, nan_filled_outputs  # noqa: F401

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

SIZES = ((192, 128), (256, 256), (320, 320), (512, 512), (576, 512))
LOW, TALL = ((1, 37), (0, 5), (1, 0)), ((7, 30), (1, 2))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# As in a model: with the other cases' scale, one key would have all the weight.
SIZED = [
    Case(
        name=f"{size}_{value_size}_{kind}",
        requests=requests,
        key_size=size,
        value_size=value_size,
        scale=size**-0.5,
        padding_rows=1,
    )
    for size, value_size in SIZES
    for kind, requests in (("low", LOW), ("tall", TALL))
]
FEATURES = {"window": 9, "chunk": 12, "softcap": 1.5, "sinks": 0.5, "slopes": True}
ALONE = [
    dataclasses.replace(Case(name=name, requests=((1, 30), (5, 19), (2, 0))), **{name: value})
    for name, value in FEATURES.items()
]


def check(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    expected, *pools = exact_ragged(inputs)
    output = launcher.ragged_attention(*inputs.ragged())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    for pool, exact in zip((inputs.key_pool, inputs.value_pool), pools, strict=True):
        torch.testing.assert_close(pool.double(), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SIZED, ids=str)
def test_sizes(case, dtype, nan_filled_outputs):  # noqa: F811
    check(case, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", SIZED[1::2], ids=str)
def test_sizes_without_a_pool(case, dtype, nan_filled_outputs):  # noqa: F811
    inputs = make_inputs(case, dtype)
    output = launcher.varlen_attention(*inputs.varlen())
    torch.testing.assert_close(output.double(), exact_varlen(inputs), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", SIZED, ids=str)
def test_sizes_split_over_programs(case, nan_filled_outputs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attends, "split_config", split_into(1))
    check(case, torch.bfloat16)


@pytest.mark.parametrize("case", SIZED[:4], ids=str)
def test_sizes_read_by_bulk_copies(case, nan_filled_outputs, monkeypatch):  # noqa: F811
    monkeypatch.setattr(attends, "bulk_copies", lambda device: True)
    check(dataclasses.replace(case, block_size=64), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_many_heads_in_parts(dtype, nan_filled_outputs):  # noqa: F811
    """As of DeepSeek's latents, with more heads than a tile has rows for."""
    check(dataclasses.replace(SIZED[-2], query_heads=40, kv_heads=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_features_alone_in_16_bits(case, dtype, nan_filled_outputs):  # noqa: F811
    check(case, dtype)
