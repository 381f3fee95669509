"""What the run is to show: measures, each with a bar and a goal, and what was found of it.

A worst of several cells is blank if one of them failed: it may be the worst. Where only time lacked, it is that of the
others, and no bar is known to be reached. What did not fit the device's memory is named beside the figure. Figures of
engines whose tokens are wrong do not count; where nobody compared them, for lack of time or since the comparison
failed, that is named, and without any comparison no bar is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.gpu_parts.failures import FAILURES, reason
from benchmarks.gpu_parts.rows import ALL_TIMED, KINDS, NOT_COMPARED, TRACE, Row

MODEL = "llama-3.1-8b"  # of which the measures are
TRACE_CEILING = 13_500.0  # output tokens a second
COMPARED = ("tokens", MODEL)  # the jobs that compare them: in float32, and what is timed
LONG_PREFILL = 4096
IDLE_BAR = 0.02
# Of a mixed step over its parts. Decodes are bound by memory and prompts by products, so that together they should take
# no longer than one after the other; a quarter more is what masked rows of tiles that fit only one of them may cost.
OVER_SUM_BAR = 1.25


class Value(NamedTuple):
    """A figure and what it is of; or None, and why there is none. `whole` as of `Measure`."""

    found: float | None
    why: str
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One line of the table.

    Attributes:
        unit: "": a share; "x": so many times another's; "s": seconds.
        less: the smaller the better.
        why: what the figure is of, or why there is none.
    """

    name: str
    bar: float
    goal: float
    unit: Literal["", "x", "s"] = ""
    less: bool = False
    found: float | None = None
    why: str = "not measured"
    whole: bool = True  # of all that the bar is for; else it is not known to be reached

    @property
    def reached(self) -> Literal["goal", "bar", "neither", "unknown"]:
        if self.found is None or not self.whole:
            return "unknown"
        return "goal" if self._reaches(self.goal) else "bar" if self._reaches(self.bar) else "neither"

    @property
    def line(self) -> str:
        shown = [f"{value:.3g}{self.unit}" for value in (self.bar, self.goal)]
        found = "" if self.found is None else f"{self.found:.3g}{self.unit}"
        return f"{self.name:54} {shown[0]:>6} {shown[1]:>6} {found:>7} {self.reached:8} {self.why}"

    def _reaches(self, wanted: float) -> bool:
        assert self.found is not None
        return self.found <= wanted if self.less else self.found >= wanted


HEADER = f"{'measure':54} {'bar':>6} {'goal':>6} {'found':>7} {'reached':8} of what, or why not"


def measures(rows: Sequence[Row]) -> tuple[Measure, ...]:
    """All of them, by the rows so far."""
    return tuple(replace(measure, **_or_why_not(value, rows)._asdict()) for measure, value in MEASURES)


def _or_why_not(value: Callable[[Sequence[Row]], Value], rows: Sequence[Row]) -> Value:
    """A row that is not as a measure expects it takes that measure, and not the run whose rows come after it."""
    try:
        return value(rows)
    except FAILURES as error:
        return Value(None, reason(error))


def without_found(measure: Measure) -> Measure:
    """Of a dry run, which gives no figures."""
    return replace(measure, found=None, why="a dry run gives no figures")


def of_less(measure: Measure) -> Measure:
    """Of a quick run, which looks at fewer cells and requests than the bar is for."""
    return replace(measure, whole=False, why=f"a quick run: {measure.why}")


def decode_share(rows: Sequence[Row]) -> Value:
    return _of_cells(_timed(rows, "attention", "decode"), "share_of_copy", min)


def decode_spread(rows: Sequence[Row]) -> Value:
    return _of_cells(_timed(rows, "attention", "decode"), "share_of_copy", lambda shares: min(shares) / max(shares))


def prefill_share(rows: Sequence[Row]) -> Value:
    return _of_cells(_timed(rows, "attention", "prefill"), "share_of_product", min)


def mixed_over_sum(rows: Sequence[Row]) -> Value:
    return _of_cells(_of(rows, "attention", "mixed"), "over_sum", max)


def of_right_tokens(value: Callable[[Sequence[Row]], Value]) -> Callable[[Sequence[Row]], Value]:
    """The same figure of an engine, if its tokens are not wrong, in float32 or of the 8B."""

    def judged(rows: Sequence[Row]) -> Value:
        if (row := next(_wrong_tokens(rows), None)) is not None:
            return Value(None, f"{row.name}: {row.text}")
        found, why_not = value(rows), _not_compared(rows)
        if found.found is None or not why_not:
            return found
        # Either comparison is of the engine's way from step to step.
        whole = found.whole and len(why_not) < len(COMPARED)
        return found._replace(why=f"{found.why}; tokens not compared: {'; '.join(why_not)}", whole=whole)

    return judged


@of_right_tokens
def step_share(rows: Sequence[Row]) -> Value:
    return _of_cells(_steps(rows), "share_of_floor", min)


@of_right_tokens
def idle(rows: Sequence[Row]) -> Value:
    """What the host leaves idle in the worst cell. Beside it, for information, what the profiler saw between kernels,
    too, in which its own part may be the larger one."""
    worst = _of_cells(_steps(rows), "idle", max, "not known, by a graph of the step alone")
    profiled = [row for row in _of(rows, "steps", MODEL) if "strict_idle" in row.figures]
    if worst.found is None or not profiled:
        return worst
    most = max(profiled, key=lambda row: float(row.figures["strict_idle"]))
    strict = f"{most.figures['strict_idle']:.3g}, of which {most.figures['resolution']:.3g} may be the profiler's"
    return worst._replace(why=f"{worst.why}; between kernels, too, by a profiler {strict}")


@of_right_tokens
def trace_share(rows: Sequence[Row]) -> Value:
    whole = [row for row in _served(rows, "engine") if row.figures["of"] == TRACE]
    if not whole:
        return Value(None, _why_none(_of(rows, "trace", "engine")))
    return Value(whole[-1].figures["output_tokens_per_second"] / TRACE_CEILING, _asked(whole[-1]))


def over(peer: str) -> Callable[[Sequence[Row]], Value]:
    """The engine's tokens a second over a peer's, of the most that both have served. Bars are for the trace."""

    @of_right_tokens
    def ratio(rows: Sequence[Row]) -> Value:
        ours, theirs = ({_asked(row): row for row in _served(rows, name)} for name in ("engine", peer))
        both = [(ours[asked], theirs[asked]) for asked in ours if asked in theirs]  # by the last row of each kind
        if not both:
            return Value(None, _why_none([row for name in (peer, "engine") for row in _of(rows, "trace", name)]))
        pair = max(both, key=lambda rows: KINDS.index(rows[0].figures["of"]))
        rates = [row.figures["output_tokens_per_second"] for row in pair]
        times = ["again" if row.figures["again"] else "once" for row in pair]
        counted = "" if times[0] == times[1] else f"; served {times[0]}, and by the peer {times[1]}"
        why = f"{pair[1].figures['attention']} attention; {_asked(pair[1])}{counted}"
        whole = pair[0].figures["of"] == TRACE
        more = [row for row in _of(rows, "trace", peer) if row.state != "measured"]
        why += "" if whole or not more else f"; no more: {more[-1].text}"
        return Value(rates[0] / rates[1], why, whole)

    return ratio


def first_token(start: str) -> Callable[[Sequence[Row]], Value]:
    """Seconds of one of the starts, the median of those that there were."""

    def seconds(rows: Sequence[Row]) -> Value:
        of_start = [row for row in _of(rows, "start", "start") if row.name.startswith(f"{MODEL}, {start} start")]
        known = [row.figures for row in of_start if row.state == "measured"]
        if not known:
            return Value(None, _why_none(of_start or _of(rows, "start", "start")))
        each = "; ".join(f"{one['seconds']:.1f} s with {one['traced']} graphs traced" for one in known)
        return Value(median(one["seconds"] for one in known), f"{each}; weights made on the device, not loaded")

    return seconds


MEASURES: tuple[tuple[Measure, Callable[[Sequence[Row]], Value]], ...] = (
    (Measure(name="decode attention: KV bytes over copy, worst, >= 64 MB", bar=0.75, goal=0.90), decode_share),
    (Measure(name="decode attention: worst over best of these", bar=0.75, goal=0.85), decode_spread),
    (Measure(name="causal prefill 4k-16k, share of the product's rate", bar=0.50, goal=0.75), prefill_share),
    (
        Measure(name="mixed step over its two parts apart, worst", bar=OVER_SUM_BAR, goal=1, unit="x", less=True),
        mixed_over_sum,
    ),
    (Measure(name="decode step of the 8B: floor over it, worst of N", bar=0.70, goal=0.90), step_share),
    (Measure(name="whole trace on the 8B: tokens/s over 13,500", bar=0.55, goal=0.80), trace_share),
    (Measure(name="the same over generate_batch", bar=3, goal=10, unit="x"), over("generate_batch")),
    (Measure(name="the same over padded generate", bar=4, goal=8, unit="x"), over("generate")),
    (Measure(name="GPU idle for the host, decode of the 8B, worst of N", bar=IDLE_BAR, goal=0.005, less=True), idle),
    (Measure(name="cold start to the first token", bar=90, goal=30, unit="s", less=True), first_token("cold")),
    (Measure(name="warm start to the first token", bar=10, goal=3, unit="s", less=True), first_token("warm")),
)


def _of(rows: Sequence[Row], part: str, job: str) -> list[Row]:
    return [row for row in rows if (row.part, row.job) == (part, job)]


def _steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _timed(rows, "steps", MODEL) if not row.name.endswith(": tokens")]


def _timed(rows: Sequence[Row], part: str, job: str) -> list[Row]:
    """Those of a job that are timed. A job that fails behind them fails with none of them."""
    of_job = _of(rows, part, job)
    ends = next((place for place, row in enumerate(of_job) if row.name.endswith(ALL_TIMED)), len(of_job))
    return of_job[:ends]


def _of_cells(
    rows: Sequence[Row], figure: str, worst: Callable[[list[float]], float], unknown: str = "not known"
) -> Value:
    """The worst of the cells that count; rows without the figure are those of cells that have none, or of no cell."""
    cells = [row for row in rows if row.state == "measured" and row.figures.get("counts")]
    known = [row.figures[figure] for row in cells if row.figures[figure] is not None]
    late = [row for row in rows if row.lacked_time]
    lost = [row for row in rows if row.state == "failed" and not row.lacked_time]
    lost += [replace(row, text=f"{figure} is {unknown}") for row in cells if row.figures[figure] is None]
    if not known:
        return Value(None, _why_none(lost or late or rows))
    if lost:
        others = f"{worst(known):.3g} of {len(known)} others"
        return Value(None, f"{lost[0].name}: {lost[0].text}; {others}")
    left_out = [row.name for row in rows if row.state == "skipped"]
    without = f", without {'; '.join(left_out)}" if left_out else ""
    if late:
        without += f", too few: {late[0].name}: {late[0].text}" + f", and {len(late) - 1} more" * (len(late) > 1)
    return Value(worst(known), f"{len(known)} cells{without}", whole=not late)


def _why_none(rows: Sequence[Row]) -> str:
    said = [f"{row.name}: {row.text}" for row in rows if row.state != "measured"]
    return said[0] if said else "not measured"


def _wrong_tokens(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of comparisons that came to an end, and found wrong tokens."""
    compared = [row for job in COMPARED for row in _of(rows, "steps", job) if row.name.endswith(": tokens")]
    return (row for row in compared if row.state == "failed" and not row.text.startswith(NOT_COMPARED))


def _not_compared(rows: Sequence[Row]) -> list[str]:
    """For each of the comparisons that there is none of, why."""
    found = []
    for job in COMPARED:
        of_job = _of(rows, "steps", job)
        if not any(row.state == "measured" and row.name.endswith(": tokens") for row in of_job):
            failed = [row for row in of_job if row.state == "failed"]
            found.append(f"{failed[0].name}: {failed[0].text}" if failed else f"there was no job {job}")
    return found


def _served(rows: Sequence[Row], job: str) -> list[Row]:
    return [row for row in _of(rows, "trace", job) if "of" in row.figures]


def _asked(row: Row) -> str:
    """What was served, in words."""
    figures = row.figures
    return f"{figures['of']}: {figures['requests']} requests, {figures['output_tokens']} tokens"
