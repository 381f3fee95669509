"""The table at the end of the GPU benchmark: what each measure is of, and why it is blank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu_parts.measures import HEADER, Measure, measures, of_less, without_found
from benchmarks.gpu_parts.rows import ALL_TIMED, SAMPLE, SHORT, TRACE, Row


def row(part: str, job: str, name: str, state: Any = "measured", text: str = "", **figures: Any) -> Row:
    return Row(part=part, job=job, name=name, state=state, text=text, figures=figures)


def decode(name: str, share: float, *, counts: bool = True) -> Row:
    return row("attention", "decode", name, share_of_copy=share, counts=counts)


def step(requests: int, share: float, idle: float | None) -> Row:
    name = f"llama-3.1-8b, {requests} requests"
    return row("steps", "llama-3.1-8b", name, share_of_floor=share, idle=idle, counts=True)


def profiled(requests: int, idle: float, resolution: float) -> Row:
    name = f"llama-3.1-8b, {requests} requests: profiled"
    return row("steps", "llama-3.1-8b", name, strict_idle=idle, resolution=resolution)


def served(job: str, rate: float, of: str = TRACE, *, again: bool = False) -> Row:
    requests, tokens = {SHORT: (256, 18_500), SAMPLE: (32, 18_000), TRACE: (256, 144_000)}[of]
    figures = {"output_tokens_per_second": rate, "of": of, "again": again, "attention": f"{job} sdpa"}
    return row("trace", job, f"{job}, {of}", **figures, requests=requests, output_tokens=tokens)


ALL = row("steps", "llama-3.1-8b", f"llama-3.1-8b: {ALL_TIMED}")
WHOLE = [
    decode("decode 1 x 512", 0.2, counts=False),
    decode("decode 8 x 4096", 0.8),
    decode("decode 32 x 4096", 0.9),
    row("attention", "decode", "decode, 64 MB of keys and values or more", worst=0.8, worst_over_best=0.89, cells=2),
    row("attention", "fp8", "fp8 decode 32 x 4096", share_of_copy=0.1, counts=True),
    row("attention", "prefill", "prefill 1024", share_of_product=0.1, counts=False),
    row("attention", "prefill", "prefill 4096", share_of_product=0.6, counts=True),
    row("attention", "prefill", "prefill 8192", share_of_product=0.8, counts=True),
    row("attention", "mixed", "mixed: 257 rows and 255 x 4096", over_sum=1.1, counts=True),
    row("attention", "mixed", "mixed: 258 rows and 255 x 4096", over_sum=1.3, counts=True),
    row("start", "start", "llama-3.1-8b, cold start", seconds=40.0, traced=1),
    row("start", "start", "llama-3.1-8b, warm start", seconds=13.0, traced=1),
    row("start", "start", "llama-3.1-8b, warm start, again", seconds=11.0, traced=0),
    row("steps", "tokens", "qwen3-0.6b: tokens"),
    row("steps", "llama-3.1-8b", "llama-3.1-8b: tokens"),
    step(1, 0.8, 0.001),
    step(8, 0.95, 0.004),
    row("steps", "llama-3.2-1b", "llama-3.2-1b, 1 requests", share_of_floor=0.3, idle=0.5, counts=True),
    ALL,
    profiled(8, 0.03, 0.02),
    served("engine", 5000.0, SHORT),
    served("engine", 10_800.0),
    served("engine", 2000.0, SAMPLE),
    served("engine", 6000.0, SHORT, again=True),
    served("generate_batch", 500.0, SHORT),
    served("generate_batch", 400.0, SAMPLE),
    row("trace", "generate_batch", "generate_batch, the trace", "skipped", "by what was served it takes 99 s"),
    served("generate", 2500.0, SAMPLE),
    served("generate", 1800.0),
]


def replace_tokens(of: Row) -> Row:
    return replace(of, figures={**of.figures, "output_tokens": 1})


def found(rows: list[Row]) -> dict[str, Measure]:
    return {measure.name: measure for measure in measures(rows)}


def of(rows: list[Row], part: str) -> Measure:
    (measure,) = [measure for name, measure in found(rows).items() if part in name]
    return measure


def test_each_measure_is_of_what_it_says() -> None:
    values = [(measure.found, measure.reached) for measure in measures(WHOLE)]
    assert values == [
        (0.8, "bar"),
        (pytest.approx(0.8 / 0.9), "goal"),
        (0.6, "bar"),
        (1.3, "neither"),
        (0.8, "bar"),
        (pytest.approx(0.8), "goal"),
        (5.0, "unknown"),
        (6.0, "bar"),
        (0.004, "goal"),
        (40.0, "bar"),
        (12.0, "neither"),
    ]


def test_a_ratio_is_of_the_same_requests_and_says_of_which() -> None:
    ratio = of(WHOLE, "generate_batch")
    assert ratio.why == (
        "generate_batch sdpa attention; a sample: 32 requests, 18000 tokens; no more: by what was served it takes 99 s"
    )
    assert of(WHOLE, "padded").why == "generate sdpa attention; the trace: 256 requests, 144000 tokens"
    other = [each if each.job != "generate" else replace_tokens(each) for each in WHOLE]
    assert of(other, "padded").found is None, "of other requests"
    without = [each for each in WHOLE if each.name != "engine, the trace"]
    assert of(without, "padded").found == pytest.approx(2000 / 2500) and of(without, "tokens/s").found is None


@pytest.mark.parametrize("rate", [1.0, 1e6])
def test_a_sample_neither_reaches_a_bar_nor_misses_it(rate: float) -> None:
    rows = [each for each in WHOLE if each.job != "generate_batch"]
    assert of([*rows, served("generate_batch", rate, SAMPLE)], "generate_batch").reached == "unknown"
    assert of([*rows, served("generate_batch", rate)], "generate_batch").reached != "unknown"


def test_a_ratio_is_of_the_most_that_both_have_served() -> None:
    """Of a kind by the last row; the short sample has more tokens than the other, and says less of the trace."""
    less = [each for each in WHOLE if each.name != "generate_batch, a sample"]
    assert of(WHOLE, "generate_batch").found == 5.0 and of(less, "generate_batch").found == 12.0
    assert "a short sample: 256 requests" in of(less, "generate_batch").why
    assert "; served again, and by the peer once" in of(less, "generate_batch").why
    both = [*less, served("generate_batch", 600.0, SHORT, again=True)]
    assert of(both, "generate_batch").found == 10.0 and "; served" not in of(both, "generate_batch").why
    late = row("trace", "generate_batch", "generate_batch", "failed", "stopped after 25 s")
    assert of([*both, late], "generate_batch").found == 10.0
    assert of([*both, late], "generate_batch").why.endswith("no more: stopped after 25 s")


def test_without_rows_all_are_blank() -> None:
    assert {(measure.found, measure.reached, measure.why) for measure in measures([])} == {
        (None, "unknown", "not measured")
    }


def test_a_cell_that_failed_may_be_the_worst() -> None:
    lost = row("attention", "decode", "decode 256 x 32768", "failed", "got NaN")
    measure = of([*WHOLE, lost], "KV bytes")
    assert measure.found is None and measure.why == "decode 256 x 32768: got NaN; 0.8 of 2 others"
    skipped = row("attention", "decode", "decode 256 x 32768", "skipped", "needs 34 GB")
    assert of([*WHOLE, skipped], "KV bytes").why == "2 cells, without decode 256 x 32768"
    idle = of([step(32, 0.9, None), *WHOLE], "idle")
    assert idle.found is None and idle.why == (
        "llama-3.1-8b, 32 requests: idle is not known, by a graph of the step alone; 0.004 of 2 others"
    )


def test_a_worst_of_what_there_was_time_for_reaches_no_bar_and_says_so() -> None:
    late = row("attention", "decode", "decode 1 x 32768", "failed", "no time was left")
    measure = of([*WHOLE, late], "KV bytes")
    assert (measure.found, measure.reached) == (0.8, "unknown")
    assert measure.why == "2 cells, too few: decode 1 x 32768: no time was left"
    stopped = row("steps", "llama-3.1-8b", "llama-3.1-8b", "failed", "stopped after 53 s")
    untold = row("steps", "llama-3.1-8b", "llama-3.1-8b, 8 requests", "failed", "no time was left")
    more = [*(each for each in WHOLE if each is not ALL), stopped, untold]
    for part, found in (("floor over it", 0.8), ("idle", 0.004)):
        measure = of(more, part)
        assert (measure.found, measure.reached) == (found, "unknown")
        assert "2 cells, too few: llama-3.1-8b: stopped after 53 s, and 1 more" in measure.why
    wrong = row("attention", "decode", "decode 8 x 512", "failed", "got NaN")
    assert of([*WHOLE, late, wrong], "KV bytes").found is None, "which may be the worst at any time"
    nothing = of([late], "KV bytes")
    assert nothing.found is None and nothing.why == "decode 1 x 32768: no time was left"


@pytest.mark.parametrize(("job", "name"), [("tokens", "qwen3-0.6b: tokens"), ("llama-3.1-8b", "llama-3.1-8b: tokens")])
def test_wrong_tokens_leave_no_figure_of_an_engine(job: str, name: str) -> None:
    wrong = row("steps", job, name, "failed", "3 of 480 are wrong")
    blank = [measure for measure in measures([*WHOLE, wrong]) if measure.found is None]
    assert len(blank) == 5 and {measure.why for measure in blank} == {f"{name}: 3 of 480 are wrong"}
    other = row("steps", "llama-3.2-1b", "llama-3.2-1b: tokens", "failed", "3 of 480 are wrong")
    assert all(measure.found is not None for measure in measures([*WHOLE, other]))


def without(job: str) -> list[Row]:
    """All but the comparison of tokens of that job."""
    return [each for each in WHOLE if each.part != "steps" or each.job != job or not each.name.endswith(": tokens")]


OF_ENGINES = 5  # measures


@pytest.mark.parametrize(
    ("job", "name", "text"),
    [
        ("tokens", "tokens", "stopped after 25 s"),
        ("tokens", "tokens", "no time was left"),
        ("tokens", "tokens", "ended with status -9: it said nothing"),
        ("llama-3.1-8b", "llama-3.1-8b: tokens", "not compared: OutOfMemoryError: "),
    ],
)
def test_figures_of_an_engine_are_kept_where_a_comparison_had_no_time(job: str, name: str, text: str) -> None:
    rows = [*without(job), row("steps", job, name, "failed", text)]
    noted = [measure for measure in measures(rows) if measure.why.endswith(f"; tokens not compared: {name}: {text}")]
    assert len(noted) == OF_ENGINES
    same = [(measure.found, measure.reached) for measure in measures(rows)]
    assert same == [(measure.found, measure.reached) for measure in measures(WHOLE)]


def test_without_steps_of_the_8b_its_trace_has_figures() -> None:
    killed = row("steps", "llama-3.1-8b", "llama-3.1-8b", "failed", "ended with status -9: it said nothing")
    rows = [killed, *(each for each in WHOLE if each.part != "steps" or each.job != "llama-3.1-8b")]
    assert of(rows, "tokens/s").found == 0.8 and of(rows, "tokens/s").reached == "goal"
    assert "tokens not compared: llama-3.1-8b: ended with status -9" in of(rows, "tokens/s").why
    assert of(rows, "floor over it").found is None and "status -9" in of(rows, "floor over it").why


def test_without_any_comparison_of_tokens_no_bar_of_an_engine_is_reached() -> None:
    rows = [each for each in WHOLE if not each.name.endswith(": tokens")]
    noted = [measure for measure in measures(rows) if "tokens not compared" in measure.why]
    assert len(noted) == OF_ENGINES and {measure.reached for measure in noted} == {"unknown"}
    assert all(measure.found is not None for measure in noted)


@pytest.mark.parametrize(("idle", "reached"), [(0.0, "goal"), (0.01, "bar"), (0.2, "neither")])
def test_idle_is_that_of_the_host_whatever_a_profiler_sees(idle: float, reached: str) -> None:
    rows = [*(each for each in WHOLE if each is not ALL and "profiled" not in each.name), step(32, 0.9, idle)]
    assert (of(rows, "idle").found, of(rows, "idle").reached) == (max(idle, 0.004), reached)
    assert of(rows, "idle").why == "3 cells"
    more = [*rows, ALL, profiled(8, 0.03, 0.02), profiled(1, 0.5, 0.04)]
    assert (of(more, "idle").found, of(more, "idle").reached) == (max(idle, 0.004), reached)
    strict = "between kernels, too, by a profiler 0.5, of which 0.04 may be the profiler's"
    assert of(more, "idle").why == f"3 cells; {strict}"


@pytest.mark.parametrize(
    "end",
    [
        row("steps", "llama-3.1-8b", "llama-3.1-8b", "failed", "stopped after 53 s"),
        row("steps", "llama-3.1-8b", "llama-3.1-8b", "failed", "ended with status -11: Fatal Python error"),
        row("steps", "llama-3.1-8b", "llama-3.1-8b, 8 requests: profiled", "failed", "RuntimeError: no profiler"),
    ],
    ids=["hang", "crash", "error"],
)
def test_what_ends_in_the_profiler_takes_no_timed_row(end: Row) -> None:
    for part, found in (("floor over it", 0.8), ("idle", 0.004)):
        same, without = of([*WHOLE, end], part), of([end, *WHOLE], part)
        assert (same.found, same.reached) == (found, of(WHOLE, part).reached) != (without.found, without.reached)


def test_a_row_that_a_measure_cannot_read_takes_that_measure_alone() -> None:
    odd = row("attention", "decode", "decode 256 x 4096", counts=True)
    broken = of([*WHOLE, odd], "KV bytes")
    assert broken.found is None and broken.why == "KeyError: 'share_of_copy'"
    assert of([*WHOLE, odd], "tokens/s").found == of(WHOLE, "tokens/s").found


def test_starts_are_their_median_and_say_how_many_graphs_each_traced() -> None:
    assert of(WHOLE, "warm").why.startswith("13.0 s with 1 graphs traced; 11.0 s with 0 graphs traced; weights")
    once = [each for each in WHOLE if not each.name.endswith("again")]
    assert of(once, "warm").found == 13.0
    skipped = row("start", "start", "llama-3.1-8b, warm start, again", "skipped", "the one before it took 90 s")
    assert of([*once, skipped], "warm").found == 13.0


def test_a_quick_run_reaches_no_bar() -> None:
    for measure in measures(WHOLE):
        less = of_less(measure)
        assert (less.found, less.reached) == (measure.found, "unknown") and less.why.startswith("a quick run: ")


def test_a_job_that_ended_says_why_there_is_nothing() -> None:
    ended = row("trace", "engine", "engine", "failed", "ended with status -11: it said nothing")
    rows = [each for each in WHOLE if each.job != "engine"]
    assert of([*rows, ended], "tokens/s").why == "engine: ended with status -11: it said nothing"
    assert of([*rows, ended], "padded").why == "engine: ended with status -11: it said nothing"


def test_a_line_is_as_wide_as_its_header_and_a_dry_run_shows_nothing() -> None:
    for measure in measures(WHOLE):
        assert measure.line.index(measure.why) == HEADER.index("of what")
        assert without_found(measure).found is None and without_found(measure).bar == measure.bar


def test_kernels_behind_what_is_timed_take_no_measure() -> None:
    """Nor does a job that ends in them."""
    behind = [
        row("attention", job, name, state, "some error")
        for job in ("decode", "prefill")
        for name, state in ((f"{job}: {ALL_TIMED}", "measured"), (f"{job}: kernels", "failed"), (job, "failed"))
    ]
    for part in ("KV bytes over copy", "worst over best", "causal prefill"):
        assert of([*WHOLE, *behind], part) == of(WHOLE, part) and of(WHOLE, part).found is not None
    assert of([*WHOLE, *behind[2:3]], "KV bytes over copy").found is None
