"""The benchmark's results as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from selective_compile.bench.figures import Figures

NOTES: Final = """
first token: from arrival, p50/p99 over requests; between: from one to the next.
memory: peak while serving, over weights and pool of keys and values.
engine is: so many times as fast. same: of the tokens, as many are those of
generate, each request up to its first difference. Random weights have near
ties, which rounding decides, in bfloat16 often."""


def result_tables(results: Mapping[str, Figures]) -> RenderableType:
    """A table for each result, and one of all if there are several."""
    parts: list[RenderableType] = []
    for name, result in results.items():
        parts += [Text(f"{name}", style="bold"), Text("\n".join(headings(result))), peers_table(result["peers"])]
        parts += [
            Text(f"{peer} FAILED: {last_line(said)}", style="bold red") for peer, said in result["failed"].items()
        ]
        parts.append(Text())
    if len(results) > 1:
        parts += [Text("tokens/s", style="bold"), overview(results), Text()]
    return Group(*parts, Text(NOTES.strip("\n")))


def headings(result: Figures) -> list[str]:
    settings, versions, ceilings = result["settings"], result["versions"], result["ceilings"]
    rate = result["arrival_rate"]
    arrivals = "all there at once" if rate is None else f"{rate:.3g} arriving per second"
    attention = ", ".join(f"{name} {peer['attention']}" for name, peer in result["peers"].items())
    return [
        f"{result['machine']['processor']}, {settings['threads']} thread(s), torch {versions['torch']}, "
        f"transformers {versions['transformers']}",
        f"{ceilings['bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{ceilings['flops_per_second'] / 1e9:.0f} GFLOP/s multiplied; "
        f"weights {gigabytes(result['weight_bytes'])}, keys and values {gigabytes(result['pool_bytes'])}",
        f"{result['requests']} request(s), {arrivals}, {result['prompt_tokens']} prompt and {result['new_tokens']} new "
        f"tokens; {settings['rounds']} round(s)",
        f"attention: {attention}",
    ]


def peers_table(peers: Mapping[str, Figures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("peer", no_wrap=True)
    for name in ("tokens/s", "first\ntoken, s", "between,\nms", "memory", "engine\nis", "of\nfloor", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, peer in peers.items():
        table.add_row(
            name,
            f"{peer['tokens_per_second']:.1f}",
            span(peer["first_token_p50"], peer["first_token_p99"], 1, 2),
            span(peer["between_tokens_p50"], peer["between_tokens_p99"], 1000, 0),
            times(peer["memory_ratio"]),
            times(peer["engine_ratio"]) if peer["engine_ratio"] and name != "engine" else "",
            f"{peer['share_of_floor']:.0%}" if "share_of_floor" in peer else "",
            f"{same:.0%}" if (same := peer["same_tokens_as_generate"]) is not None else "",
        )
    return table


def overview(results: Mapping[str, Figures]) -> Table:
    """Tokens a second: a row for each result, a column for each peer."""
    names = dict.fromkeys(peer for result in results.values() for peer in (*result["peers"], *result["failed"]))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for title, result in results.items():
        table.add_row(title, *(overview_cell(result, name) for name in names))
    return table


def overview_cell(result: Figures, name: str) -> str:
    if name in result["failed"]:
        return "failed"
    return f"{result['peers'][name]['tokens_per_second']:.1f}" if name in result["peers"] else ""


def last_line(said: str) -> str:
    return said.strip().splitlines()[-1] if said.strip() else ""


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def times(ratio: float | None) -> str:
    return "not told" if ratio is None else f"{ratio:.2f}x"


def span(low: float | None, high: float | None, unit: int, digits: int) -> str:
    """Two durations in seconds, given in parts of one; nothing where there are none."""
    return "" if low is None or high is None else f"{unit * low:.{digits}f}/{unit * high:.{digits}f}"
