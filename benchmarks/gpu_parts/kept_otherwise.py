"""Decoding where keys and values are kept otherwise: as e4m3, or as the latents of DeepSeek's attention.

Of latents all heads read the same rows, so that with 128 of them, as DeepSeek-V3 has, products can take longer than
reading: both shares are told.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.attention import Requests, each
from benchmarks.gpu_parts.floors import share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.ragged_step import AttentionShape, RaggedStep, in_eight_bits, make_step, ragged
from benchmarks.gpu_parts.timing import Timer
from selective_compile import latent_ops
from selective_compile.implementations import forced_implementation

HEADS = (128, 16)  # of DeepSeek-V3, and of V2-Lite
LATENT, REST = 512, 64
CELLS = ((32, 4096), (128, 4096), (8, 32_768))


@dataclass(frozen=True, kw_only=True)
class LatentStep(RaggedStep):
    """The arguments of `selective::latent_attention`; keys and values are the same rows, of one head."""

    @property
    def value_size(self) -> int:
        return self.shape.head_size * LATENT // (LATENT + REST)

    @property
    def kv_bytes(self) -> int:
        return super().kv_bytes // 2

    @property
    def flops(self) -> int:
        size = self.shape.head_size
        return super().flops * (size + self.value_size) // (2 * size)

    def __call__(self) -> Tensor:
        with forced_implementation("auto" if self.query.is_cuda else "triton"):
            return latent_ops.latent_attention(
                self.query,
                self.key,
                self.key_pool,
                self.cu_seqlens_q,
                self.context_lens,
                self.block_table,
                self.slot_mapping,
                self.value_size,
                self.scale,
                0,
                0.0,
            )


def make_latents(requests: Requests, shape: AttentionShape, device: torch.device) -> LatentStep:
    """In a dry run the shape has more key/value heads, which become one."""
    one = AttentionShape(**{field.name: getattr(shape, field.name) for field in fields(shape)} | {"kv_heads": 1})
    step = make_step(requests, one, device)
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return LatentStep(**values | {"value": step.key, "value_pool": step.key_pool})


def run(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        seconds = timer.seconds(step, context.repeats)
        read = share(step.kv_bytes, seconds, best.bytes_per_second)
        multiplied = share(step.flops, seconds, best.flops_per_second)
        figures = {"microseconds": 1e6 * seconds, "share_of_copy": read, "share_of_product": multiplied}
        figures |= {"kv_bytes": step.kv_bytes, **timer.about()}
        text = f"{1e6 * seconds:9.1f} us  {read:6.1%} of copy bandwidth, {multiplied:.1%} of product"
        context.tell(context.job.row(name, figures=figures, text=text))

    sizes = [(3, 40)] if context.tiny else CELLS[:1] if context.quick else CELLS
    if context.job.name == "fp8":
        cells = [(f"fp8 decode {batch} x {length}", ragged(batch, length)) for batch, length in sizes]
        each(context, cells, measure, make=lambda *what: in_eight_bits(make_step(*what)))
        return
    for heads in HEADS:
        shape = AttentionShape(heads=heads, kv_heads=1, head_size=LATENT + REST)
        cells = [(f"latent decode {batch} x {length}, {heads} heads", ragged(batch, length)) for batch, length in sizes]
        each(context, cells, measure, shape=shape, make=make_latents)
