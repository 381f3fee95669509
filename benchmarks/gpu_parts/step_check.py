"""Whether a result of the ragged attention op is that of the float32 reference, by some of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu_parts.ragged_step import RaggedStep, blocks_of
from selective_compile import fp8_rows, reference

# Of a row's error over the row, both as lengths of vectors: probabilities and results are rounded once each.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_REQUESTS, CHECKED_ROWS = 4, 16  # rows of each end of a request
# Of a prompt between its ends: so many rows of each of so many equal parts.
MIDDLE_ROWS, MIDDLE_PARTS = 4, 8


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


def _windows(step: RaggedStep) -> Iterator[tuple[int, int, int]]:
    """(request, first row, row behind the last): rows of requests that are spread over the step."""
    count = len(step.requests)
    for n in sorted({place * (count - 1) // max(1, CHECKED_REQUESTS - 1) for place in range(CHECKED_REQUESTS)}):
        rows = step.requests[n][0]
        yield n, 0, min(rows, CHECKED_ROWS)
        for first in _middle(rows):
            yield n, first, first + MIDDLE_ROWS
        if rows > CHECKED_ROWS:
            yield n, rows - CHECKED_ROWS, rows


def _middle(rows: int) -> Iterator[int]:
    """Where rows between the ends of a prompt begin, somewhere in each part: at random, but alike in every run."""
    draw, part = Random(rows), (rows - 2 * CHECKED_ROWS) // MIDDLE_PARTS
    for number in range(MIDDLE_PARTS if part >= MIDDLE_ROWS else 0):
        yield CHECKED_ROWS + number * part + draw.randrange(part - MIDDLE_ROWS + 1)


def _error(step: RaggedStep, output: Tensor, n: int, first: int, last: int) -> float:
    """A row depends on nothing behind it: rows from the middle of a request are the last of a shorter one."""
    rows, context = step.requests[n]
    context -= rows - last
    begin = sum(count for count, _ in step.requests[:n])
    where, count = slice(begin + first, begin + last), last - first
    blocks = step.block_table[n, : blocks_of(context, step.shape)].long()
    pools = ((step.key_pool, step.key_scales), (step.value_pool, step.value_scales))
    exact = reference.ragged_attention(
        *(tensor[where].float() for tensor in (step.query, step.key, step.value)),
        *(_as_numbers(_bits(pool)[blocks].view(pool.dtype), scales) for pool, scales in pools),
        torch.tensor([0, count]),
        torch.tensor([context]),
        torch.arange(len(blocks), device=output.device)[None],
        torch.full((count,), -1, device=output.device),
        step.scale,
        step.window,
        step.softcap,
        sinks=step.sinks,
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
