"""Rotation of queries and keys in the launch that writes keys and values, next to Inductor's before that launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts.attention import Requests, each
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.ragged_step import RaggedStep, ragged
from benchmarks.gpu_parts.step_check import check, nan_filled_outputs
from benchmarks.gpu_parts.timing import Timer, beside
from selective_compile import reference, rotary_ops
from selective_compile.implementations import forced_implementation

# Of a key: an element that two kernels round to either side is a last bit of bfloat16 apart.
WRITTEN = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def run(context: Context) -> None:
    timer = Timer(context.device)
    rotated = rotate if context.tiny else torch.compile(rotate, dynamic=True)

    def measure(name: str, step: RaggedStep) -> None:
        tables = angles(step)
        with nan_filled_outputs():
            output = fused(step, tables)()
        query, key = reference.rotated_heads(step.query, step.key, *tables, *plain(step))
        check(replace(step, query=query, key=key), output, WRITTEN[step.shape.dtype])
        figures = beside(timer, fused(step, tables), apart(rotated)(step, tables), context.repeats)
        saved = figures["apart_microseconds"] - figures["microseconds"]
        text = f"{figures['microseconds']:9.1f} us  {saved:.1f} us less than rotated by Inductor, then written"
        context.tell(context.job.row(name, figures=figures, text=text))

    each(context, cells(context), measure)


def cells(context: Context) -> list[tuple[str, Requests]]:
    batches, length = ((3,), 40) if context.tiny else ((32,), 512) if context.quick else ((1, 32, 256), 512)
    found: list[tuple[str, Requests]] = [(f"rotary, decode {n} x {length}", ragged(n, length)) for n in batches]
    rows = 24 if context.tiny else 2048
    return [*found, (f"rotary, prefill {rows}", ((rows, rows),))]


def angles(step: RaggedStep) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D], of which the second half is the first again, as transformers has them."""
    size, device = step.shape.head_size, step.query.device
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    places = [torch.arange(context - rows, context, device=device) for rows, context in step.requests]
    turned = torch.cat(places)[:, None] * torch.cat([rates, rates])
    return turned.cos().to(step.shape.dtype), turned.sin().to(step.shape.dtype)


def plain(step: RaggedStep) -> tuple[Any, ...]:
    """No norm; of each head all elements, halves apart."""
    return None, None, None, 0.0, 0, step.shape.head_size, False


def fused(step: RaggedStep, tables: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    pools = step.key_pool, step.value_pool
    metadata = step.cu_seqlens_q, step.context_lens, step.block_table, step.slot_mapping
    rest = (*tables, *plain(step), *pools, *metadata, step.scale, 0, 0.0)

    def call() -> Tensor:
        with forced_implementation("auto" if step.query.is_cuda else "triton"):
            return rotary_ops.rotary_attention(step.query, step.key, step.value, *rest)

    return call


def apart(rotated: Callable[..., Any]) -> Callable[[RaggedStep, tuple[Tensor, Tensor]], Callable[[], Tensor]]:
    def of(step: RaggedStep, tables: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            query, key = rotated(step.query, step.key, *tables)
            return replace(step, query=query, key=key)()

        return call

    return of


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As models of transformers write it."""
    found = []
    for x in (query, key):
        first, second = x.chunk(2, dim=-1)
        found.append(x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None])
    return found[0], found[1]
