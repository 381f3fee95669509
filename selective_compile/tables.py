"""What the commands print: tables for people, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from selective_compile.demo import Comparison, Outcome, Prepared, Way

WIDEST = 100


def console(*, stderr: bool = False) -> Console:
    """At most `WIDEST` columns, however wide the terminal."""
    made = Console(stderr=stderr, highlight=False)
    return Console(stderr=stderr, highlight=False, width=WIDEST) if made.width > WIDEST else made


def graphs_line(graphs: int) -> str:
    if graphs == 0:
        return "0 compiled graphs: the rewritten graph runs as it is"
    return f"{graphs} compiled graph{'s' if graphs > 1 else ''} for every step to come"


def demo_tables(prepared: Prepared, outcome: Outcome, width: int) -> RenderableType:
    """A row for each request, then a row for each way of serving them."""
    return Group(requests_table(prepared, outcome, width), Text(), times_table(outcome))


def requests_table(prepared: Prepared, outcome: Outcome, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    numbers, verdicts = 4, 14
    text = max(8, (width - 3 * numbers - verdicts - 12) // 2)
    for name in ("#", "prompt", "in", "answer", "out", "same tokens"):
        table.add_column(name, justify="right" if name in ("#", "in", "out") else "left", no_wrap=True)
    rows = zip(outcome.requests, outcome.run.way.tokens, outcome.comparisons, strict=True)
    for number, (request, tokens, comparison) in enumerate(rows):
        table.add_row(
            str(number),
            one_line(request.text, keep="end", width=text),
            str(len(request.prompt_ids)),
            one_line(prepared.checkpoint.decoded(tokens), keep="start", width=text),
            str(len(tokens)),
            verdict_text(comparison),
        )
    return table


def one_line(text: str, *, keep: Literal["start", "end"], width: int) -> Text:
    """Shortened to the part that tells most: a prompt ends in its question, an answer starts with it."""
    flat = " ".join(text.split())
    flat = "".join(letter if letter.isprintable() else "?" for letter in flat)
    if len(flat) > width:
        flat = f"…{flat[1 - width :]}" if keep == "end" else f"{flat[: width - 1]}…"
    return Text(flat, overflow="ellipsis")


def verdict_text(comparison: Comparison) -> Text:
    if comparison.verdict == "equal":
        return Text("yes", style="green")
    if comparison.behind is None:
        return Text("NO: length", style="bold red")
    if comparison.verdict == "near tie":
        return Text(f"near tie {comparison.behind:.1g}", style="yellow")
    return Text(f"NO, by {comparison.behind:.2g}", style="bold red")


def times_table(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("way of serving")
    for name in ("seconds", "tokens", "tokens/s", "engine is"):
        table.add_column(name, justify="right")
    for way in (outcome.alone, outcome.padded, outcome.run.way):
        ratio = "" if way is outcome.run.way else f"{way.seconds / outcome.run.way.seconds:.2f}x as fast"
        count = str(sum(map(len, way.tokens)))
        table.add_row(way.name, f"{way.seconds:.2f}", count, f"{way.tokens_per_second:.0f}", ratio)
    return table


def demo_summary(prepared: Prepared, outcome: Outcome) -> str:
    """What was done, whether the tokens are the same, and how many of the known answers came."""
    stats, counts = outcome.run.stats, verdict_counts(outcome.comparisons)
    work = f"{stats.steps} steps, {stats.tokens_computed} tokens computed, {stats.preemptions} preemptions"
    same = f"{counts['equal']} of {len(outcome.comparisons)} requests got the same tokens as from generate"
    lines = [f"engine: {work}", same]
    if stats.captured_max:
        lines.insert(1, f"{stats.captured_max} kinds of steps captured before the first, to be replayed")
    if counts["near tie"]:
        lines.append(f"{counts['near tie']} differ from where on two logits are as good as equal")
    if counts["different"]:
        lines.append(f"{counts['different']} DIFFER")
    rows = zip(outcome.requests, outcome.run.way.tokens, strict=True)
    right = [prepared.checkpoint.decoded(tokens) == one.answer for one, tokens in rows if one.answer is not None]
    if right:
        lines.append(f"{sum(right)} of {len(right)} known answers are right")
    return "\n".join(lines)


def verdict_counts(comparisons: Sequence[Comparison]) -> dict[str, int]:
    found = [comparison.verdict for comparison in comparisons]
    return {verdict: found.count(verdict) for verdict in ("equal", "near tie", "different")}


def demo_json(prepared: Prepared, outcome: Outcome, picture: str) -> str:
    """Everything that the demo prints, in full."""
    checkpoint = prepared.checkpoint
    rows = zip(outcome.requests, outcome.run.way.tokens, outcome.comparisons, strict=True)

    def way(one: Way) -> dict[str, float]:
        return {"seconds": one.seconds, "tokens_per_second": one.tokens_per_second}

    return json.dumps(
        {
            "model": checkpoint.name,
            "report": json.loads(prepared.report.to_json()),
            "graphs": prepared.graphs,
            "requests": [
                {
                    "prompt": request.text,
                    "prompt_tokens": len(request.prompt_ids),
                    "text": checkpoint.decoded(tokens),
                    "tokens": tokens,
                    "verdict": comparison.verdict,
                    "behind": comparison.behind,
                }
                for request, tokens, comparison in rows
            ],
            "one_by_one": way(outcome.alone),
            "padded_batch": way(outcome.padded),
            "engine": way(outcome.run.way) | dataclasses.asdict(outcome.run.stats),
            "verdicts": verdict_counts(outcome.comparisons),
            "picture": picture,
        },
        indent=2,
    )
