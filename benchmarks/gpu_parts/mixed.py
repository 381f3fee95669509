"""Steps with a prompt beside many decodes, each next to its two parts in steps of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.gpu_parts.attention import Requests, each
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.measures import OVER_SUM_BAR
from benchmarks.gpu_parts.ragged_step import RaggedStep, ragged
from benchmarks.gpu_parts.timing import Timer

BEHIND = 16_384  # of the chunk's prompt, in front of it


class MixedStep(NamedTuple):
    name: str
    prompt: Requests
    decodes: Requests

    @property
    def both(self) -> Requests:
        return (*self.decodes, *self.prompt)


def run(context: Context) -> None:
    timer = Timer(context.device)
    seconds: dict[Requests, float] = {}
    about: dict[Requests, dict[str, Any]] = {}

    def measure(name: str, step: RaggedStep) -> None:
        seconds[step.requests] = timer.seconds(step, context.repeats)
        about[step.requests] = timer.about("both_")

    for step in mixed_steps(context):
        if step.name in context.job.done:
            continue
        parts = {"the prompt": step.prompt, "the decodes": step.decodes, "both": step.both}
        cells = [(f"{step.name}: {part}", requests) for part, requests in parts.items() if requests not in seconds]
        each(context, cells, measure)
        if all(requests in seconds for requests in parts.values()):
            tell(context, step.name, [seconds[requests] for requests in parts.values()], about[step.both])


def tell(context: Context, name: str, seconds: list[float], about: dict[str, Any]) -> None:
    """By the seconds of the prompt, of the decodes, and of both together, and how these were timed."""
    ratio = seconds[2] / (seconds[0] + seconds[1])
    figures = {"microseconds": [1e6 * each for each in seconds], "over_sum": ratio, "counts": True, **about}
    above = "" if ratio <= OVER_SUM_BAR else f": failed, must be at most {OVER_SUM_BAR}"
    text = f"{1e6 * seconds[2]:9.1f} us  {ratio:.2f} of the two apart{above}"
    context.tell(context.job.row(name, figures=figures, text=text))


def mixed_steps(context: Context) -> tuple[MixedStep, ...]:
    """The first says most, a whole prompt. The others are a chunk of one, on either side of where tiles become tall
    (`ragged_attention_tiles`): up to two rows a request the chunk has the low tiles of decodes, and with a row more the
    decodes have the tall ones of prompts."""
    if context.tiny:
        return (mixed_step(24, 0, 3, 40),)
    batch = 31 if context.quick else 255
    first = mixed_step(4096, 0, 32, 4096) if context.quick else mixed_step(8192, 0, 128, 4096)
    most = 2 * (batch + 1) - batch
    return first, *(mixed_step(rows, BEHIND, batch, 4096) for rows in (most, most + 1))


def mixed_step(rows: int, behind: int, batch: int, past: int) -> MixedStep:
    where = f" behind {behind}" if behind else ""
    prompt = ((rows, behind + rows),)
    return MixedStep(f"mixed: {rows} rows{where} and {batch} x {past}", prompt, ragged(batch, past))
