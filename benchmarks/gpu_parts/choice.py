"""Choosing a token for each row of logits of the 8B's vocabulary, by the share of the copy bandwidth that reading them
once would have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.floors import share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.models import SHAPES
from benchmarks.gpu_parts.rows import NO_TIME
from benchmarks.gpu_parts.step_check import nan_filled_outputs
from benchmarks.gpu_parts.timing import Timer
from selective_compile.kernels import choose_triton
from selective_compile.runtime.device_draw import FIELDS, NO_TOKEN, choose

ROWS = (1, 32, 256)
CHECKED = 8  # rows, on the host
# Temperature, 1 - top_p, min_p, top_k; then where in the sum of probabilities, and the repetition penalty. Of the first
# alone, a token is drawn from the whole vocabulary.
DRAWN = {"temperature": (0.8, 0.0, 0.0, 0.0), "top-k, top-p": (0.8, 0.1, 0.0, 50.0)}


def run(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)
    vocabulary = 300 if context.tiny else SHAPES["llama-3.1-8b"]["vocab_size"]
    for count in (1, 3) if context.tiny else ROWS:
        logits = 3 * torch.randn(count, vocabulary, device=context.device).to(torch.bfloat16)
        ways = {how: drawn(count, limits, context.device) for how, limits in DRAWN.items()}
        for how, fields in {"greedy": None, **ways}.items():
            name = f"{how}, {count} x {vocabulary}"
            if name in context.job.done:
                continue
            if context.seconds_left < 0:
                context.fail(name, NO_TIME)
                continue
            try:
                check(logits, fields)
                seconds = timer.seconds(chosen(logits, fields), context.repeats)
            except FAILURES as error:
                context.failed(name, error)
                continue
            found = share(logits.nbytes, seconds, best.bytes_per_second)
            figures = {"microseconds": 1e6 * seconds, "share_of_copy": found, **timer.about()}
            text = f"{1e6 * seconds:9.1f} us  {found:6.1%} of copy bandwidth"
            context.tell(context.job.row(name, figures=figures, text=text))


def drawn(count: int, limits: tuple[float, ...], device: torch.device) -> Tensor:
    """[FIELDS, count] float64, as `device_draw.choices` has them; each row is drawn elsewhere."""
    fields = torch.ones(FIELDS, count, dtype=torch.float64)
    fields[:4] = torch.tensor(limits, dtype=torch.float64)[:, None]
    fields[4] = torch.rand(count, dtype=torch.float64)
    return fields.to(device)


def chosen(logits: Tensor, fields: Tensor | None) -> Callable[[], Tensor]:
    """As a captured step chooses: tokens [N]."""
    return lambda: choose_triton.choose(logits, fields, None, None, no_token=NO_TOKEN)


def check(logits: Tensor, fields: Tensor | None) -> None:
    """
    Raises:
        ValueError: some tokens are not those of the definition, computed on the host.
    """
    with nan_filled_outputs():
        found = chosen(logits, fields)().cpu()
    rows = torch.linspace(0, len(logits) - 1, min(CHECKED, len(logits))).long()
    wanted = choose(logits.cpu()[rows], None if fields is None else fields.cpu()[:, rows])
    if not torch.equal(found[rows], wanted):
        raise ValueError(f"tokens must be those of the definition, {wanted.tolist()}, got {found[rows].tolist()}")
