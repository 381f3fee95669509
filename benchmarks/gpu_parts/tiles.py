"""Tiles that `tile_config` does not choose, on a long prompt, next to the one that it does: whether it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.attention import Requests, each
from benchmarks.gpu_parts.floors import share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.ragged_step import AttentionShape, RaggedStep
from benchmarks.gpu_parts.timing import Timer
from selective_compile.kernels import ragged_attention_attend_triton as attends
from selective_compile.kernels.ragged_attention_tiles import TileConfig

LENGTH = 8192
# The changed fields of a tall tile of Hopper's, and the slots of a block. Of half the rows, two programs have room on a
# processor, and one has use for what the other leaves idle, but each reads all keys: 64 bytes for each cycle of its
# products, which is more than the second level of the cache gives a processor. Of half the keys, blocks may have half
# the slots.
CANDIDATES: dict[str, tuple[dict[str, Any], int]] = {
    "as chosen": ({}, 128),
    "values not late": ({"late": False}, 128),
    "64 keys": ({"block_n": 64, "late": False}, 64),
    "64 rows, four warps": ({"block_m": 64, "num_warps": 4, "late": False}, 128),
}


def run(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        seconds = timer.seconds(step, context.repeats)
        found = share(step.flops, seconds, best.flops_per_second)
        figures = {"microseconds": 1e6 * seconds, "share_of_product": found, **timer.about()}
        context.tell(context.job.row(name, figures=figures, text=f"{1e6 * seconds:9.1f} us  {found:.1%} of product"))

    length = 24 if context.tiny else LENGTH
    prompt: Requests = ((length, length),)
    for name, (changes, block_size) in list(CANDIDATES.items())[: 2 if context.quick else None]:
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
