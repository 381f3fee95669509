"""Inputs of the ragged attention op on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_parts.floors import attention_flops, kv_bytes
from selective_compile import fp8_rows
from selective_compile.implementations import Implementation, forced_implementation


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """By default the attention of Llama-3.1-8B, with the engine's blocks."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 128
    dtype: torch.dtype = torch.bfloat16


TINY = AttentionShape(heads=4, kv_heads=2, head_size=16, block_size=16, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class RaggedStep:
    """The arguments of `selective::ragged_attention`; requests are (rows in this step, context length)."""

    requests: tuple[tuple[int, int], ...]
    shape: AttentionShape
    query: Tensor
    key: Tensor
    value: Tensor
    key_pool: Tensor
    value_pool: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.shape.head_size**-0.5

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def lengths(self) -> dict[str, Tensor]:
        """What the layers of a step have in common, and by which they know that they are of one."""
        return {"cu_seqlens_q": self.cu_seqlens_q, "context_lens": self.context_lens}

    @property
    def kv_bytes(self) -> int:
        """That a step must read at least."""
        seen = self.window or max(context for _, context in self.requests)
        tokens = sum(min(context, seen + rows - 1) for rows, context in self.requests)
        return kv_bytes(tokens, self.shape.kv_heads, self.shape.head_size, self.key_pool.dtype.itemsize)

    @property
    def flops(self) -> int:
        sizes = self.shape.heads, self.shape.head_size
        return sum(attention_flops(rows, context, *sizes, self.window) for rows, context in self.requests)

    def __call__(self) -> Tensor:
        """[T, H, D]; on a CPU, in a dry run, the Triton kernel is interpreted."""
        implementation: Implementation = "auto" if self.query.is_cuda else "triton"
        with forced_implementation(implementation):
            result: Tensor = torch.ops.selective.ragged_attention(
                self.query,
                self.key,
                self.value,
                self.key_pool,
                self.value_pool,
                self.cu_seqlens_q,
                self.context_lens,
                self.block_table,
                self.slot_mapping,
                self.scale,
                self.window,
                self.softcap,
                sinks=self.sinks,
                key_scales=self.key_scales,
                value_scales=self.value_scales,
            )
        return result

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Those of all requests one behind the other [sum of contexts, K, D], copied out of the pools."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for n, (_, context) in enumerate(self.requests):
            blocks = self.block_table[n, : blocks_of(context, self.shape)].long()
            for rows, pool in zip(found, (self.key_pool, self.value_pool), strict=True):
                rows.append(pool[blocks].transpose(1, 2).flatten(0, 1)[:context])
        return torch.cat(found[0]), torch.cat(found[1])


def ragged(requests: int, context: int) -> tuple[tuple[int, int], ...]:
    """Decodes of about so long contexts, no two neighbours of which end at the same slot of a block."""
    return tuple((1, max(1, context - number % 31)) for number in range(requests))


def bytes_needed(requests: Sequence[tuple[int, int]], shape: AttentionShape) -> int:
    """Of the pools and the rows."""
    slots = shape.block_size * sum(blocks_of(context, shape) for _, context in requests)
    rows = sum(rows for rows, _ in requests)
    pools = kv_bytes(slots, shape.kv_heads, shape.head_size, shape.dtype.itemsize)
    return pools + 4 * rows * shape.heads * shape.head_size * shape.dtype.itemsize


def make_step(requests: Sequence[tuple[int, int]], shape: AttentionShape, device: torch.device) -> RaggedStep:
    """Random numbers; blocks lie in random order. What nobody may read is NaN: block 0, and slots behind a context."""
    needed = [blocks_of(context, shape) for _, context in requests]
    order = (1 + torch.randperm(sum(needed))).to(torch.int32)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for n, blocks in enumerate(order.split(needed)):
        table[n, : len(blocks)] = blocks
    size = (1 + sum(needed), shape.kv_heads, shape.block_size, shape.head_size)
    pools = [torch.empty(size, dtype=shape.dtype, device=device).normal_() for _ in range(2)]
    for pool in pools:
        _spoil(pool, table, requests, shape)
    rows = [count for count, _ in requests]
    sizes = [(sum(rows), heads, shape.head_size) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    query, key, value = (torch.randn(each, dtype=shape.dtype, device=device) for each in sizes)
    return RaggedStep(
        requests=tuple(requests),
        shape=shape,
        query=query,
        key=key,
        value=value,
        key_pool=pools[0],
        value_pool=pools[1],
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32).to(device),
        context_lens=torch.tensor([context for _, context in requests], dtype=torch.int32).to(device),
        block_table=table.to(device),
        slot_mapping=torch.cat([_slots(table[n], *one, shape) for n, one in enumerate(requests)]).to(device),
    )


def in_eight_bits(step: RaggedStep) -> RaggedStep:
    """The same with keys and values kept as e4m3, by scales [K] that leave room for numbers twice as large."""
    found = []
    for pool in (step.key_pool, step.value_pool):
        largest = pool.nan_to_num().abs().amax((0, 2, 3)).float()
        scales = torch.exp2(torch.ceil(torch.log2(2 * largest / fp8_rows.LARGEST)))
        found.append((fp8_rows.quantised(pool.transpose(1, 2), scales).transpose(1, 2).contiguous(), scales))
    (key_pool, key_scales), (value_pool, value_scales) = found
    scaled = {"key_scales": key_scales, "value_scales": value_scales}
    return replace(step, key_pool=key_pool, value_pool=value_pool, **scaled)


def blocks_of(context: int, shape: AttentionShape) -> int:
    """How many blocks so many tokens take."""
    return -(-context // shape.block_size)


def _slots(blocks: Tensor, rows: int, context: int, shape: AttentionShape) -> Tensor:
    """[rows] int64, of a request's last positions."""
    positions = torch.arange(context - rows, context)
    return blocks[positions // shape.block_size].long() * shape.block_size + positions % shape.block_size


def _spoil(pool: Tensor, table: Tensor, requests: Sequence[tuple[int, int]], shape: AttentionShape) -> None:
    pool[0] = torch.nan
    for n, (_, context) in enumerate(requests):
        if used := context % shape.block_size:
            pool[int(table[n, context // shape.block_size]), :, used:] = torch.nan
