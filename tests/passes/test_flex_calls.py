"""A call of `flex_attention` is written out where its functions are of numbers, with PyTorch's own result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from selective_compile.flex_blocks import blocks_unread
from selective_compile.passes.flex_calls import FLEX, write_out_flex
from selective_compile.passes.refusals import RefusedError

SLOPES, CAP, BELOW = 0.5 ** torch.arange(1.0, 5.0), torch.tensor(3.0), torch.ones(20, 20).tril().bool()
Shown = Callable[[Any, Any, Any, Any], Any]
Score = Callable[[Any, Any, Any, Any, Any], Any]


def is_before(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def attention(
    shown: Shown | None = is_before, score: Score | None = None, *, heads: int | None = None, **options: Any
) -> Callable[..., Any]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        length = query.shape[2]
        mask = None if shown is None else create_block_mask(shown, None, heads, length, length, device="cpu")
        return flex_attention(query, key, value, score, mask, enable_gqa=True, **options)

    return attend


class Done(Exception):
    """What Dynamo traced is there, and need not run."""


def captured(function: Callable[..., Any], *arguments: Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, examples: Any) -> Any:
        copied = fx.Graph()  # Dynamo may empty its own behind an error
        copied.output(copied.graph_copy(module.graph, {}))
        graphs.append(fx.GraphModule(module, copied))
        raise Done

    torch._dynamo.reset()
    for argument in arguments:
        torch._dynamo.mark_dynamic(argument, 2)
    with blocks_unread(), torch.no_grad(), pytest.raises(BackendCompilerFailed):
        torch.compile(function, backend=keep, fullgraph=True)(*arguments)
    return graphs[0]


def drawn(length: int, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, heads, length, 8), (1, 2, length, 8), (1, 2, length, 5)]
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]


WRITTEN: dict[str, Callable[..., Any]] = {
    "causal": attention(),
    "no mask": attention(None),
    "window of some heads": attention(lambda b, h, q, k: (q >= k) & ((q - k < 5) | (h > 1)), heads=4),
    "slopes": attention(score=lambda s, b, h, q, k: s + (k - q) * 0.5 ** (h + 1)),
    "slopes that are looked up": attention(score=lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "softcap": attention(score=lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "softcap in a tensor": attention(score=lambda s, b, h, q, k: CAP * (s / CAP).tanh()),
    "mask in the scores": attention(None, lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf)),
    "scale": attention(scale=0.5),
    "a table of queries and keys": attention(lambda b, h, q, k: BELOW[q, k]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_is_written_out(name: str) -> None:
    module = captured(WRITTEN[name], *drawn(12))
    assert write_out_flex(module) == 1
    assert not any(node.target is FLEX for node in module.graph.nodes)
    assert write_out_flex(module) == 0
    for length in (3, 12):
        found, wanted = run(module, *drawn(length)), WRITTEN[name](*drawn(length))
        torch.testing.assert_close(found, wanted)


def run(module: fx.GraphModule, *tensors: Tensor) -> Tensor:
    """By the names that Dynamo gives them; the one size is that of tokens."""
    given: dict[str, Any] = {"L_query_": tensors[0], "L_key_": tensors[1], "L_value_": tensors[2]}
    given |= {"G_SLOPES_": SLOPES, "G_CAP_": CAP, "G_BELOW_": BELOW}
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    return module(*(given.get(name, tensors[0].shape[2]) for name in names))[0]


def test_is_computed_in_float32_for_fewer_bits() -> None:
    module = captured(WRITTEN["slopes"], *drawn(12, dtype=torch.bfloat16))
    assert write_out_flex(module) == 1
    given = drawn(12, dtype=torch.bfloat16)
    torch.testing.assert_close(run(module, *given), WRITTEN["slopes"](*given))


def of_own_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """That leave out what the function shows."""
    count, places = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    length = query.shape[2]
    mask = BlockMask.from_kv_blocks(count, places, mask_mod=is_before, seq_lengths=(length, length))
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def of_its_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = create_block_mask(is_before, None, None, query.shape[2], query.shape[2], device="cpu")
    return query * mask.to_dense()[0, 0, 0, 0]


LEFT: dict[str, Callable[..., Any]] = {
    "blocks of its own": of_own_blocks,
    "the logarithm of the sum is read": attention(return_aux=AuxRequest(lse=True)),
    "an operator that is not known": attention(score=lambda s, b, h, q, k: torch.special.i0(s)),
    "a row of a table": attention(lambda b, h, q, k: BELOW[q][k]),
    "heads that it was not asked for": attention(lambda b, h, q, k: (q >= k) & ((q - k < 5) | (h > 1))),
    "a sum": attention(lambda b, h, q, k: (SLOPES * h).sum() >= k),
}


@pytest.mark.parametrize("name", LEFT)
def test_is_left_alone(name: str) -> None:
    module = captured(LEFT[name], *drawn(12))
    before = module.code
    assert write_out_flex(module) == 0
    assert module.code == before


def test_blocks_that_something_else_reads_are_refused() -> None:
    with pytest.raises(RefusedError, match="read by flex_attention alone"):
        write_out_flex(captured(of_its_blocks, *drawn(12)))
