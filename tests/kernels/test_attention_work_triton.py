"""What no number shows of the attention kernels: keys that are not walked over, products that are not made, and offsets
of pools with more numbers than 32 bits count."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile import reference
from tests.kernels.ragged_cases import Case, make_inputs
from tests.kernels.test_latent_attention import arguments

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
attends = pytest.importorskip("selective_compile.kernels.ragged_attention_attend_triton")
latents = pytest.importorskip("selective_compile.kernels.latent_attention_triton")
tiles = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
launcher = pytest.importorskip("selective_compile.kernels.ragged_attention_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
kernels = pytest.importorskip("tests.kernels.test_ragged_attention_triton")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every matrix product that Triton's interpreter makes."""
    seen: list[tuple[int, ...]] = []
    create_dot = interpreter.InterpreterBuilder.create_dot

    def counted(self: Any, a: Any, b: Any, *others: Any) -> Any:
        seen.append((*a.data.shape, b.data.shape[1]))
        return create_dot(self, a, b, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)
    return seen


@pytest.mark.parametrize("rows", [1, 12], ids=["decode", "prefill"])
@pytest.mark.parametrize("seen", [{"window": 40}, {"chunk": 64}, {"window": 100, "chunk": 64}], ids=str)
def test_keys_that_no_row_sees_are_not_walked_over(
    rows: int, seen: dict[str, int], products: list[tuple[int, ...]]
) -> None:
    case = Case(name="", requests=((rows, 1000 - rows),), query_heads=2, kv_heads=1, **seen)
    inputs = make_inputs(case, torch.float32)
    launcher.ragged_attention(*inputs.ragged())
    # Of an iteration there are two products, of keys and of values; at both ends one more is begun.
    block_n = products[0][2]
    keys = min(seen.values()) + rows
    assert 2 <= len(products) <= 2 * (triton.cdiv(keys, block_n) + 1)
    assert len(products) < 2 * 1000 // block_n // 4


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each program makes, in the order of their launch."""
    seen: list[int] = []
    create_dot, set_grid_idx = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.set_grid_idx

    def begun(self: Any, *place: int) -> None:
        seen.append(0)
        set_grid_idx(self, *place)

    def counted(self: Any, *given: Any) -> Any:
        seen[-1] += 1
        return create_dot(self, *given)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", begun)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counted)
    return seen


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("latent", [True, False])
def test_the_longest_walks_of_a_prompt_are_launched_first(
    split: bool, latent: bool, walks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched last should not be what takes longest: processors would wait for it."""
    whole = {"slots": 4, "shortest": 4096} if split else {"slots": 0, "shortest": 0}
    for module in (attends, latents):
        monkeypatch.setattr(module, "split_config", lambda **sizes: tiles.SplitConfig(**whole))
    case = Case(name="", requests=((300, 0),), query_heads=4, kv_heads=1 if latent else 2)
    inputs = make_inputs(case, torch.float32)
    if latent:
        latents.latent_attention(*arguments(inputs, 16))
    else:
        launcher.ragged_attention(*inputs.ragged())
    lengths = [walk for walk in walks if walk]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 8


@kernels.compiling
@pytest.mark.parametrize("target", [ahead.TARGETS[1], ahead.TARGETS[3]], ids=str)
def test_the_scale_is_folded_into_the_exponent(target: Any) -> None:
    """Scores reach the maximum over them as the product left them, but for a bias, which is added to scaled ones. Of 64
    keys, they are not as many as the sums, which are scaled, too."""
    found = []
    for given in ((), ("slopes",)):
        compiled = kernels.compile_attention(target, "bf16", 128, 512, given=given, BLOCK_SIZE=64)
        _, loop = ahead.innermost_loops(compiled)
        scores = re.search(r"(?:warp_group_dot |tt\.dot ).*-> (tensor<\w+xf32)", loop)[1]
        found.append(re.search(f"arith.mulf .*{scores}", loop.partition('"tt.reduce"')[0]) is not None)
    assert found == [False, True]


@pytest.fixture
def large_pools() -> Tensor:
    """[2, num_blocks, 1, 64, 64], of which two blocks alone are touched, that begin behind 2^31 numbers."""
    try:
        pools = torch.empty(2**31 // (2 * 64 * 64) + 8, 2, 1, 64, 64, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    pools[[-1, -3]] = torch.randn(2, 2, 1, 64, 64, dtype=torch.bfloat16)
    return pools.transpose(0, 1)


def decoding_in(blocks: int) -> tuple[Tensor, ...]:
    """The metadata of a row behind 69 others, which lie in the last block and the third from the end."""
    table = torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    lengths = (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([70], dtype=torch.int32))
    return *lengths, table, torch.tensor([(blocks - 3) * 64 + 5])


def test_offsets_into_large_pools(large_pools: Tensor) -> None:
    keys, values = large_pools
    query, (key, value) = torch.randn(1, 2, 64).bfloat16(), torch.randn(2, 1, 1, 64).bfloat16()
    given = (query, key, value, keys, values, *decoding_in(len(keys)), 0.1, 0, 0.0)
    output = launcher.ragged_attention(*given)
    assert torch.equal(keys[-3, 0, 5], key[0, 0]) and torch.equal(values[-3, 0, 5], value[0, 0])
    torch.testing.assert_close(output, reference.ragged_attention(*given), rtol=0, atol=3e-2)


def test_offsets_into_large_pools_of_latents(large_pools: Tensor) -> None:
    query, row, rows = torch.randn(1, 2, 64).bfloat16(), torch.randn(1, 1, 64).bfloat16(), large_pools[1]
    given = (query, row, rows, *decoding_in(len(rows)), 48, 0.1, 0, 0.0)
    output = latents.latent_attention(*given)
    assert torch.equal(rows[-3, 0, 5], row[0, 0])
    torch.testing.assert_close(output, reference.latent_attention(*given), rtol=0, atol=3e-2)
