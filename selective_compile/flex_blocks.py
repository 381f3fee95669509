"""While the model is traced: which blocks of a mask of `flex_attention` are empty is not computed.

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length)
    flex_attention(query, key, value, block_mask=mask)

A mask that is made of a function has the blocks that follow from it, by which a kernel leaves out pairs of tokens that
the function hides anyway: the function says all.  What counts blocks bounds requests to as many as the traced one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask


@contextmanager
def blocks_unread() -> Iterator[None]:
    """For what Dynamo traces within; what other threads run meanwhile has its blocks."""
    instead: dict[str, Callable[..., Any]] = {
        "_convert_mask_to_block_mask": kept_whole,
        "_create_sparse_block_from_block_mask": mask_of_function,
        "_create_empty_block_mask": mask_of_nothing,
    }
    with ExitStack() as stack:
        for name, function in instead.items():
            both = where_traced(function, getattr(flex_attention, name))
            stack.enter_context(mock.patch.object(flex_attention, name, both))
        yield


def where_traced(traced: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return (traced if torch.compiler.is_dynamo_compiling() else run)(*args, **options)

    return call


def kept_whole(mask: Tensor, *sizes: Any, **options: Any) -> tuple[Tensor, None]:
    return mask, None


def mask_of_function(
    mask: tuple[Tensor, Any], function: Callable[..., Any], lengths: tuple[int, int], *block: int
) -> BlockMask:
    return told_by_function(mask[0], mask[0].shape[:2], lengths, block, function)


def mask_of_nothing(query: Tensor, key: Tensor) -> BlockMask:
    """As PyTorch has it where no mask is given: of blocks of so many tokens it asks no length."""
    size = flex_attention._LARGE_SPARSE_BLOCK_SIZE
    return told_by_function(query, (1, 1), (1, 1), (size, size), None)


def told_by_function(like: Tensor, given: Any, lengths: tuple[int, int], block: Any, function: Any) -> BlockMask:
    """``given``: for how many requests and heads the function was asked; one stands for all."""
    return BlockMask.from_kv_blocks(
        torch.ones([*given, 1], dtype=torch.int32, device=like.device),
        torch.zeros([*given, 1, 1], dtype=torch.int32, device=like.device),
        BLOCK_SIZE=block,
        mask_mod=function,
        seq_lengths=lengths,
        compute_q_blocks=False,
    )


def is_told_by_function(blocks: fx.Node) -> bool:
    """Whether a mask's tensor in Dynamo's graph is one that is made here."""
    made = f'{__file__}", line ', f"in {told_by_function.__name__}\n"
    last = (blocks.meta.get("stack_trace") or "").rpartition("  File ")[2]
    return blocks.target in (torch.ones, torch.zeros) and all(part in last for part in made)
