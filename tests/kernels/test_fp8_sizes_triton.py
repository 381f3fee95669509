"""Attention to keys and values of e4m3, compiled for the targets that have it, at sizes and with features of its own.

On the way to the matrix units each number becomes one of the query's dtype, which takes registers that pools of that
dtype do not.
"""

from __future__ import annotations

import pytest

from tests.kernels.test_ragged_attention_triton import compile_attention, compiling, triton_cache  # noqa: F401

pytest.importorskip("triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")

# Query's element, head size, rows, tensors given, changed constants, and the targets: each for those that have the
# fewest registers left.
VARIANTS = {
    "64_sinks_and_window": ("bf16", 64, 512, ("sinks",), {"WINDOW": 128}, (1, 2)),
    "96": ("fp16", 96, 512, (), {"BLOCK_SIZE": 16}, (1,)),
    "96_decode": ("bf16", 96, 8, (), {}, (3,)),
    "128_window": ("bf16", 128, 512, (), {"WINDOW": 128}, (3,)),
    "128_slopes": ("bf16", 128, 512, ("slopes",), {}, (3,)),
    "256": ("bf16", 256, 512, (), {}, (1, 2)),
    "256_decode": ("bf16", 256, 8, (), {}, (2,)),
    "256_decode_of_64_heads": ("bf16", 256, 8, (), {"group": 64}, (3,)),
    "256_decode_of_71_heads": ("bf16", 256, 8, (), {"group": 71, "BLOCK_SIZE": 16}, (1, 3)),
    "256_slopes": ("bf16", 256, 512, ("slopes",), {}, (1, 3)),
    "256_window_and_softcap": ("bf16", 256, 512, (), {"WINDOW": 4096, "SOFTCAP": 50.0}, (3,)),
}
COMPILED = [(ahead.TARGETS[place], name) for name, variant in VARIANTS.items() for place in variant[-1]]


@compiling
@pytest.mark.parametrize(("target", "name"), COMPILED, ids=str)
def test_attention_to_fp8_compiles_without_spills(target, name, tmp_path):
    element, size, rows, given, constants, _ = VARIANTS[name]
    compiled = compile_attention(target, element, size, rows, given=given, split=True, fp8=True, **constants)
    ahead.assert_ships(compiled, tmp_path)
