"""Attention of other models than the 8B: heads of 64 numbers, a window, sinks and softcap; figures without bars."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.attention import Make, Requests, each
from benchmarks.gpu_parts.floors import share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.ragged_step import AttentionShape, RaggedStep, make_step, ragged
from benchmarks.gpu_parts.timing import Timer

HEAD_SIZE = 64  # of Llama-3.2-1B
WINDOW = 1024
# Each such that a kernel without it would be found wrong: scores are of about 1, and a context is thousands of keys.
SOFTCAP, SINK = 2.0, 8.0


def run(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        seconds = timer.seconds(step, context.repeats)
        read, multiplied = (
            share(step.kv_bytes, seconds, best.bytes_per_second),
            share(step.flops, seconds, best.flops_per_second),
        )
        figures = {"microseconds": 1e6 * seconds, "share_of_copy": read, "share_of_product": multiplied}
        figures |= {"kv_bytes": step.kv_bytes, **timer.about()}
        text = f"{1e6 * seconds:9.1f} us  {read:6.1%} of copy bandwidth, {multiplied:.1%} of product"
        context.tell(context.job.row(name, figures=figures, text=text))

    wanted: dict[str, Requests] = {"decode 3 x 40": ragged(3, 40)}
    if not context.tiny:
        wanted = {"decode 32 x 4096": ragged(32, 4096), "prefill 4096": ((4096, 4096),)}
    for cell, requests in wanted.items():
        for name, (shape, make) in variants(context).items():
            each(context, [(f"{name}, {cell}", requests)], measure, shape=shape, make=make)


def variants(context: Context) -> dict[str, tuple[AttentionShape, Make]]:
    window = 9 if context.tiny else WINDOW

    def with_window(requests: Requests, shape: AttentionShape, device: torch.device) -> RaggedStep:
        return replace(make_step(requests, shape, device), window=window)

    def with_sinks(requests: Requests, shape: AttentionShape, device: torch.device) -> RaggedStep:
        sinks = SINK + torch.randn(shape.heads, device=device)
        return replace(make_step(requests, shape, device), sinks=sinks)

    def with_softcap(requests: Requests, shape: AttentionShape, device: torch.device) -> RaggedStep:
        return replace(make_step(requests, shape, device), softcap=SOFTCAP)

    plain = AttentionShape()
    return {
        f"heads of {HEAD_SIZE}": (replace(plain, head_size=HEAD_SIZE), make_step),
        f"window of {window}": (plain, with_window),
        "sinks": (plain, with_sinks),
        "softcap": (plain, with_softcap),
    }
