"""Tiles that `tile_config` does not choose, of a long prompt and of decoding, next to the one that it does: whether it
should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.attention import Requests, each, layers_like, of_a_layer
from benchmarks.gpu_parts.floors import share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.ragged_step import AttentionShape, RaggedStep, ragged
from benchmarks.gpu_parts.timing import Timer
from selective_compile.kernels import ragged_attention_attend_triton as attends
from selective_compile.kernels.ragged_attention_tiles import TileConfig

LENGTH = 8192
# The changed fields of a tall tile of Hopper's, and the slots of a block. Of half the rows, two programs have room on a
# processor, and one has use for what the other leaves idle, but each reads all keys: 64 bytes for each cycle of its
# products, which is more than the second level of the cache gives a processor. Of half the keys, blocks may have half
# the slots.
TALL: dict[str, tuple[dict[str, Any], int]] = {
    "as chosen": ({}, 128),
    "values not late": ({"late": False}, 128),
    "64 keys": ({"block_n": 64, "late": False}, 64),
    "64 rows, four warps": ({"block_m": 64, "num_warps": 4, "late": False}, 128),
}
# Requests and their keys: the shortest ones that count are the slowest, by what a program does before its keys come. Of
# 24.5 us it waits 1.4 for the write of the step's own keys, and has read for 3.5 when its first iteration is done
# (`docs/benchmarks.md`); keys that are asked for ahead come meanwhile, which may hide 4 us. With eight iterations ahead
# a request of 512 keys asks for all. The others are to stay as fast: 8 x 4,096 was slower where it was tried once.
DECODES = ((32, 512), (8, 4096), (1, 32_768))
LOW: dict[str, dict[str, Any]] = {
    "as chosen": {},
    "2 iterations ahead": {"ahead": 2},
    "4 iterations ahead": {"ahead": 4},
    "8 iterations ahead": {"ahead": 8},
    "8 iterations ahead, 3 stages": {"ahead": 8, "num_stages": 3},
}


def run(context: Context) -> None:
    decodes(context)
    prompts(context)


def decodes(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        times, about = of_a_layer(layers_like(step), timer, context.repeats)
        found = share(step.kv_bytes, times.mean, best.bytes_per_second)
        figures = {"microseconds": 1e6 * times.mean, "share_of_copy": found, **about}
        context.tell(context.job.row(name, figures=figures, text=f"{1e6 * times.mean:9.1f} us  {found:.1%} of copy"))

    for batch, length in [(3, 40)] if context.tiny else DECODES[: 1 if context.quick else None]:
        for name, changes in LOW.items():
            with changed_tiles(changes):
                each(context, [(f"{name}, decode {batch} x {length}", ragged(batch, length))], measure)


def prompts(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        seconds = timer.seconds(step, context.repeats)
        found = share(step.flops, seconds, best.flops_per_second)
        figures = {"microseconds": 1e6 * seconds, "share_of_product": found, **timer.about()}
        context.tell(context.job.row(name, figures=figures, text=f"{1e6 * seconds:9.1f} us  {found:.1%} of product"))

    length = 24 if context.tiny else LENGTH
    prompt: Requests = ((length, length),)
    for name, (changes, block_size) in list(TALL.items())[: 2 if context.quick else None]:
        with changed_tiles(changes):
            each(context, [(f"{name}, prefill {length}", prompt)], measure, shape=AttentionShape(block_size=block_size))


@contextmanager
def changed_tiles(changes: dict[str, Any]) -> Iterator[None]:
    """Every launch within has those fields of its tile replaced."""
    chosen: Callable[..., TileConfig] = attends.tile_config
    attends.tile_config = lambda **step: replace(chosen(**step), **changes)
    try:
        yield
    finally:
        attends.tile_config = chosen
