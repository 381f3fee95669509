"""Inputs of the ragged attention op on the device, and whether a result is that of the float32 reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_parts.floors import attention_flops, kv_bytes
from selective_compile import fp8_rows, ops, reference

# Of a row's error over the row, both as lengths of vectors: probabilities and results are rounded once each.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_REQUESTS, CHECKED_ROWS = 4, 16


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """By default the attention of Llama-3.1-8B, with the engine's blocks."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
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

    @property
    def scale(self) -> float:
        return self.shape.head_size**-0.5

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def kv_bytes(self) -> int:
        """That a step must read at least."""
        tokens = sum(context for _, context in self.requests)
        return kv_bytes(tokens, self.shape.kv_heads, self.shape.head_size, self.key_pool.dtype.itemsize)

    @property
    def flops(self) -> int:
        sizes = self.shape.heads, self.shape.head_size
        return sum(attention_flops(rows, context, *sizes) for rows, context in self.requests)

    def __call__(self) -> Tensor:
        """[T, H, D]; on a CPU, in a dry run, the Triton kernel is interpreted."""
        implementation: ops.Implementation = "auto" if self.query.is_cuda else "triton"
        with ops.forced_implementation(implementation):
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
                0,
                0.0,
                key_scales=self.key_scales,
                value_scales=self.value_scales,
            )
        return result

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Those of all requests one behind the other [sum of contexts, K, D], copied out of the pools."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for n, (_, context) in enumerate(self.requests):
            blocks = self.block_table[n, : _blocks(context, self.shape)].long()
            for rows, pool in zip(found, (self.key_pool, self.value_pool), strict=True):
                rows.append(pool[blocks].transpose(1, 2).flatten(0, 1)[:context])
        return torch.cat(found[0]), torch.cat(found[1])


def ragged(requests: int, context: int) -> tuple[tuple[int, int], ...]:
    """Decodes of about so long contexts, no two neighbours of which end at the same slot of a block."""
    return tuple((1, max(1, context - number % 31)) for number in range(requests))


def bytes_needed(requests: Sequence[tuple[int, int]], shape: AttentionShape) -> int:
    """Of the pools and the rows."""
    slots = shape.block_size * sum(_blocks(context, shape) for _, context in requests)
    rows = sum(rows for rows, _ in requests)
    pools = kv_bytes(slots, shape.kv_heads, shape.head_size, shape.dtype.itemsize)
    return pools + 4 * rows * shape.heads * shape.head_size * shape.dtype.itemsize


def make_step(requests: Sequence[tuple[int, int]], shape: AttentionShape, device: torch.device) -> RaggedStep:
    """Random numbers; blocks lie in random order. What nobody may read is NaN: block 0, and slots behind a context."""
    needed = [_blocks(context, shape) for _, context in requests]
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


def worst_error(step: RaggedStep, output: Tensor, written: float = 0.0) -> float:
    """The largest error of a row over the row, of some rows of some requests, by the float32 reference.

    The pools must have the step's keys and values by now, of which the kernel may have rounded an element so much
    differently, as a part of it.

    Raises:
        ValueError: something of the output is NaN, or a key or value is not where it belongs.
    """
    if bool(output.isnan().any()):
        raise ValueError("every element of the result must be written, got NaN")
    blocks, offsets = step.slot_mapping // step.shape.block_size, step.slot_mapping % step.shape.block_size
    kept = ((step.key_pool, step.key, step.key_scales), (step.value_pool, step.value, step.value_scales))
    for pool, rows, scales in kept:
        wanted = rows if scales is None else fp8_rows.quantised(rows, scales)
        there = _bits(pool)[blocks, :, offsets].view(pool.dtype)
        if not torch.allclose(there.float(), wanted.float(), rtol=written, atol=written / 8):
            raise ValueError("keys and values must be written to their slots, got others there")
    return max(_error(step, output, *window) for window in _windows(step))


def check(step: RaggedStep, output: Tensor, written: float = 0.0) -> float:
    """`worst_error`.

    Raises:
        ValueError: it is larger than rounding explains.
    """
    error = worst_error(step, output, written)
    if not error <= (most := TOLERANCE[step.shape.dtype]):
        raise ValueError(f"the error of a row must be at most {most} of the row, got {error:.3g}")
    return error


@contextmanager
def nan_filled_outputs() -> Iterator[None]:
    """What is allocated holds NaN, so that an element that a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(1).isnan()), "torch must fill what is not initialised"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _blocks(context: int, shape: AttentionShape) -> int:
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


def _windows(step: RaggedStep) -> Iterator[tuple[int, int, int]]:
    """(request, first row, row behind the last): the ends of requests that are spread over the step."""
    count = len(step.requests)
    for n in sorted({place * (count - 1) // max(1, CHECKED_REQUESTS - 1) for place in range(CHECKED_REQUESTS)}):
        rows = step.requests[n][0]
        yield n, 0, min(rows, CHECKED_ROWS)
        if rows > CHECKED_ROWS:
            yield n, rows - CHECKED_ROWS, rows


def _error(step: RaggedStep, output: Tensor, n: int, first: int, last: int) -> float:
    """A row depends on nothing behind it: rows from the middle of a request are the last of a shorter one."""
    rows, context = step.requests[n]
    context -= rows - last
    begin = sum(count for count, _ in step.requests[:n])
    where, count = slice(begin + first, begin + last), last - first
    blocks = step.block_table[n, : _blocks(context, step.shape)].long()
    pools = ((step.key_pool, step.key_scales), (step.value_pool, step.value_scales))
    exact = reference.ragged_attention(
        *(tensor[where].float() for tensor in (step.query, step.key, step.value)),
        *(_as_numbers(_bits(pool)[blocks].view(pool.dtype), scales) for pool, scales in pools),
        torch.tensor([0, count]),
        torch.tensor([context]),
        torch.arange(len(blocks), device=output.device)[None],
        torch.full((count,), -1, device=output.device),
        step.scale,
        0,
        0.0,
    )
    exact = exact[..., : output.shape[-1]]  # of latents the first numbers of a key are its value
    errors = (output[where].float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(errors.max())


def _bits(pool: Tensor) -> Tensor:
    """Of 8 bits as integers, which every torch indexes on every device."""
    return pool.view(torch.uint8) if pool.dtype == fp8_rows.DTYPE else pool


def _as_numbers(blocks: Tensor, scales: Tensor | None) -> Tensor:
    """[blocks, K, slots, D] float32 of what is kept."""
    if scales is None:
        return blocks.float()
    return fp8_rows.dequantised(blocks.transpose(1, 2), scales, torch.float32).transpose(1, 2)
