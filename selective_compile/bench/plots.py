"""The benchmark's results as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from selective_compile.bench.figures import Figures

ENGINE: Final = "#2b6cb0"
OTHER: Final = "#9aa5b1"
TAIL: Final = "#d9a441"
FLOOR: Final = "#b3002d"
MARKERS: Final = "osD^vP"
PANELS: Final = (
    ("first_token", "time to first token, s"),
    ("between_tokens", "time between tokens, s"),
)


def draw_results(results: Mapping[str, Figures], folder: Path) -> list[Path]:
    """A picture of each result, and one of all if there are several; where they lie."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, result in results.items():
        if result["peers"]:
            drawn.append(saved(picture(name, result), folder / f"{name.replace(' ', '_')}.png"))
    compared = {name: result for name, result in results.items() if "engine" in result["peers"]}
    if len(compared) > 1:
        drawn.append(saved(overview(compared), folder / "overview.png"))
    return drawn


def saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    return path


def picture(name: str, result: Figures) -> Figure:
    """Speed with the floor, waiting times and memory, a bar for each peer."""
    names = list(result["peers"])
    peers = list(result["peers"].values())
    figure = Figure(figsize=(13, 1.6 + 0.55 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    speed, first, between, memory = figure.subplots(1, 4, sharey=True, width_ratios=(1.4, 1, 1, 0.8))
    figure.suptitle(title(name, result), fontsize=10)
    draw_speed(speed, names, peers)
    for axes, (kind, label) in zip((first, between), PANELS, strict=True):
        draw_quantiles(axes, kind, label, peers)
    draw_memory(memory, peers)
    speed.set_yticks(range(len(names)), names)
    speed.set_ylim(len(names) - 0.4, -0.6)
    return figure


def title(name: str, result: Figures) -> str:
    machine = f"{result['machine']['processor']}, {result['settings']['threads']} threads"
    work = f"{result['requests']} request(s), {result['prompt_tokens']} prompt and {result['new_tokens']} new tokens"
    failed = f"; failed: {', '.join(result['failed'])}" if result["failed"] else ""
    return f"{name}: {work}\n{machine}{failed}"


def draw_speed(axes: Axes, names: Sequence[str], peers: Sequence[Figures]) -> None:
    speeds = [peer["tokens_per_second"] for peer in peers]
    bars = axes.barh(range(len(names)), speeds, 0.6, color=[ENGINE if name == "engine" else OTHER for name in names])
    axes.bar_label(bars, [f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}" for speed in speeds], padding=3, fontsize=8)
    axes.set_xlabel("output tokens/s, median of the rounds")
    limits = [*speeds]
    for peer in peers:
        if "share_of_floor" in peer:
            limit = peer["tokens_per_second"] / peer["share_of_floor"]
            limits.append(limit)
            axes.axvline(limit, color=FLOOR, linestyle="--", linewidth=1.2)
            said = "what the floor of the engine's steps allows "
            axes.text(limit, -0.58, said, color=FLOOR, fontsize=7, ha="right", va="top")
    axes.set_xlim(0, 1.12 * max(limits))


def draw_quantiles(axes: Axes, kind: str, label: str, peers: Sequence[Figures]) -> None:
    for place, peer in enumerate(peers):
        low, high = peer[f"{kind}_p50"], peer[f"{kind}_p99"]
        if low is None:
            axes.text(0.5, place, "none", transform=axes.get_yaxis_transform(), ha="center", va="center", fontsize=8)
            continue
        axes.plot([low, high], [place, place], color=OTHER, linewidth=2, zorder=1)
        axes.plot(low, place, "o", color=ENGINE, label="p50" if place == 0 else None)
        axes.plot(high, place, "D", color=TAIL, label="p99" if place == 0 else None, markersize=5)
    axes.set_xlabel(label)
    logarithmic(axes)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def logarithmic(axes: Axes) -> None:
    """The x axis, with numbers as people write them; as many as there is room for."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    low, high = low / 1.2, high * 1.2
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.25)


def draw_memory(axes: Axes, peers: Sequence[Figures]) -> None:
    for place, peer in enumerate(peers):
        ratio = peer["memory_ratio"]
        if ratio is None:
            axes.text(0.02, place, " not told", va="center", fontsize=8)
            continue
        axes.bar_label(axes.barh(place, ratio, 0.6, color=OTHER), [f"{ratio:.2f}"], padding=3, fontsize=8)
    axes.axvline(1, color=FLOOR, linestyle="--", linewidth=1.2)
    axes.set_xlabel("peak memory over\nweights + keys and values")
    axes.margins(x=0.2)


def overview(results: Mapping[str, Figures]) -> Figure:
    """A row for each result: the speed of every peer, and of the floor, over that of the engine."""
    figure = Figure(figsize=(10, 1.4 + 0.4 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    peers = dict.fromkeys(peer for result in results.values() for peer in result["peers"] if peer != "engine")
    for number, peer in enumerate(peers):
        found = {
            place: 1 / result["peers"][peer]["engine_ratio"]
            for place, result in enumerate(results.values())
            if peer in result["peers"]
        }
        axes.plot(list(found.values()), list(found), MARKERS[number], color=f"C{number}", label=peer, alpha=0.8)
    floors = {
        place: 1 / share
        for place, result in enumerate(results.values())
        if (share := result["peers"]["engine"].get("share_of_floor"))
    }
    axes.plot(list(floors.values()), list(floors), "|", color=FLOOR, label="floor", markersize=12, markeredgewidth=2)
    axes.axvline(1, color=ENGINE, linewidth=1.2)
    axes.text(1, -0.55, " engine", color=ENGINE, fontsize=8, va="center")
    axes.set_xlabel("output tokens/s over those of the engine")
    logarithmic(axes)
    axes.set_yticks(range(len(results)), list(results))
    axes.set_ylim(len(results) - 0.5, -0.8)
    axes.legend(frameon=False, ncols=6, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure
