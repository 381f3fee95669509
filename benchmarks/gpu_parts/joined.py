"""Query, key and value, and gate and up, of the 8B as one product each, next to products of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.models import SHAPES
from benchmarks.gpu_parts.rows import NO_TIME
from benchmarks.gpu_parts.step_check import nan_filled_outputs
from benchmarks.gpu_parts.timing import Timer, beside

ROWS = (1, 8, 32, 128, 256)
MOST_ERROR = 2**-7  # of all numbers to their root mean square, of a product that rounds to bfloat16


def run(context: Context) -> None:
    timer = Timer(context.device)
    for name, count, depth, sizes in cells(context):
        if name in context.job.done:
            continue
        if context.seconds_left < 0:
            context.fail(name, NO_TIME)
            continue
        try:
            x, whole = operands(count, depth, sum(sizes), context.device)
            calls = joined(x, whole), apart(x, whole.split(list(sizes)))
            with nan_filled_outputs():
                check(x, whole, *calls)
            figures = beside(timer, *calls, context.repeats)
        except FAILURES as error:
            context.failed(name, error)
            continue
        saved = figures["apart_microseconds"] - figures["microseconds"]
        text = f"{figures['microseconds']:9.1f} us  {saved:.1f} us less than {len(sizes)} products"
        context.tell(context.job.row(name, figures=figures, text=text))


def cells(context: Context) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Rows, numbers in each, and those of the results."""
    shape = SHAPES["llama-3.1-8b"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    of_keys = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    kinds = {"query, key and value": (width, of_keys, of_keys), "gate and up": (inner, inner)}
    if context.tiny:
        width, kinds = 32, {"query, key and value": (32, 16, 16), "gate and up": (48, 48)}
    for kind, sizes in kinds.items():
        for count in (1, 3) if context.tiny else (1, 32) if context.quick else ROWS:
            yield f"{kind} joined, {count} rows", count, width, sizes


def operands(count: int, depth: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [count, depth] and the joined weight [columns, depth]; results are of about 1."""
    x = torch.randn(count, depth, device=device, dtype=torch.bfloat16)
    whole = torch.randn(columns, depth, device=device, dtype=torch.bfloat16) / depth**0.5
    return x, whole


def joined(x: Tensor, whole: Tensor) -> Callable[[], Tensor]:
    return lambda: F.linear(x, whole)


def apart(x: Tensor, weights: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [F.linear(x, weight) for weight in weights]


def check(x: Tensor, whole: Tensor, together: Callable[[], Tensor], separate: Callable[[], list[Tensor]]) -> None:
    """
    Raises:
        ValueError: one of the two is not the product in float32.
    """
    wanted = F.linear(x.float(), whole.float())
    for what, found in (("joined products", together()), ("products apart", torch.cat(separate(), dim=1))):
        error = float((found.float() - wanted).square().mean() / wanted.square().mean()) ** 0.5
        if not error <= MOST_ERROR:
            raise ValueError(f"the error of {what} must be at most {MOST_ERROR}, got {error}")
