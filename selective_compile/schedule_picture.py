"""A picture of a schedule: one row per request, one column per step, prefill and decode told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import StepRecord

SUFFIXES: Final = (".png", ".svg")
PREFILL: Final = "#e8833a"
PREFILL_REST: Final = "#fbe3d0"  # what a chunk leaves of the budget
DECODE: Final = "#9cc3e6"
WAITING: Final = "#b5b5b5"
PREEMPTED: Final = "#b3002d"
BUDGET: Final = "#404040"
TEXT: Final[dict[str, Any]] = {"fontsize": 7, "va": "center", "color": "#202020", "zorder": 6}
DIGIT_INCHES: Final = 0.058  # of TEXT
# Columns narrower than this, in inches, get no line between one and the next.
NARROW: Final = 0.045
LONGEST_LABEL: Final = 26


class Cell(NamedTuple):
    """A request's share of one step."""

    step: int
    tokens: int
    is_prefill: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request over time; `arrival` is the first step that it could have been in."""

    request_id: RequestId
    label: str
    arrival: int
    cells: tuple[Cell, ...]
    preempted_at: tuple[int, ...]

    @property
    def prefills(self) -> list[tuple[Cell, ...]]:
        """Chunks grouped into prompts: a chunk after a preemption, or after decoding, starts anew."""
        groups: list[list[Cell]] = []
        previous: Cell | None = None
        for cell in self.cells:
            if cell.is_prefill:
                anew = previous is None or not previous.is_prefill
                cut = previous is not None and any(previous.step < at <= cell.step for at in self.preempted_at)
                if anew or cut:
                    groups.append([])
                groups[-1].append(cell)
            previous = cell
        return [tuple(group) for group in groups]

    @property
    def waits(self) -> list[tuple[int, int]]:
        """Ranges of steps, ends excluded, without a share for a request that has arrived and is not done."""
        ends = [self.arrival, *(cell.step + 1 for cell in self.cells)]
        starts = [cell.step for cell in self.cells]
        return [(end, start) for end, start in zip(ends, starts, strict=False) if start > end]


def schedule_rows(
    records: Sequence[StepRecord],
    *,
    arrivals: Mapping[RequestId, int] | None = None,
    labels: Mapping[RequestId, str] | None = None,
) -> list[Row]:
    """The rows of the picture, in the order of arrival.

    Args:
        records: the steps, counted from the first of them.
        arrivals: the step before which a request arrived; where it is missing, its first share.
        labels: what to call a request in place of its id.
    """
    cells: dict[RequestId, list[Cell]] = {}
    preempted: dict[RequestId, list[int]] = {}
    for step, record in enumerate(records):
        for request_id in record.preempted:
            preempted.setdefault(request_id, []).append(step)
        for share in record.shares:
            cells.setdefault(share.request_id, []).append(Cell(step, share.tokens, share.is_prefill))
    rows = [
        Row(
            request_id=request_id,
            label=_label((labels or {}).get(request_id, str(request_id))),
            arrival=(arrivals or {}).get(request_id, own[0].step),
            cells=tuple(own),
            preempted_at=tuple(preempted.get(request_id, ())),
        )
        for request_id, own in cells.items()
    ]
    return sorted(rows, key=lambda row: row.arrival)


def check_path(path: Path) -> Path:
    """The path itself, if a picture can be written there; asked before the work whose picture it is.

    Raises:
        ValueError: the suffix is none of `SUFFIXES`, or the folder does not exist.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"picture must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"picture must lie in a folder that exists, got {str(path)!r}")
    return path


def write_schedule(
    path: Path,
    records: Sequence[StepRecord],
    *,
    token_budget: int,
    arrivals: Mapping[RequestId, int] | None = None,
    labels: Mapping[RequestId, str] | None = None,
) -> None:
    """Write the picture as PNG or SVG, by the suffix of `path`; the rest as `draw_schedule`.

    Raises:
        ValueError: no step is given, or nothing can be written to `path`.
    """
    check_path(path)
    figure = draw_schedule(records, token_budget=token_budget, arrivals=arrivals, labels=labels)
    figure.savefig(path, dpi=130, format=path.suffix.lower()[1:])


def draw_schedule(
    records: Sequence[StepRecord],
    *,
    token_budget: int,
    arrivals: Mapping[RequestId, int] | None = None,
    labels: Mapping[RequestId, str] | None = None,
) -> Figure:
    """Above, the requests; below, the tokens of each step against the budget.

    Args:
        arrivals, labels: as for `schedule_rows`.

    Raises:
        ValueError: no step is given.
    """
    if not records:
        raise ValueError("records must hold at least one step, got none")
    rows = schedule_rows(records, arrivals=arrivals, labels=labels)
    # A figure of its own canvas: pyplot would keep it in a global list and might want a display.
    width = min(max(3 + 0.055 * len(records), 9), 18)
    height = min(max(2.6 + 0.22 * len(rows), 4), 22)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(height - 2.0, 1.0))
    pitch = (width - 2.5) / len(records)
    for y, row in enumerate(rows):
        _draw_request(above, y, row, token_budget, pitch)
    _name_rows(above, rows)
    _draw_budget(below, records, token_budget, pitch)
    _draw_legend(figure, above, rows, records)
    return figure


def _draw_request(axes: Axes, y: int, row: Row, token_budget: int, pitch: float) -> None:
    """A row: boxes of decode, boxes of prefill as high as their share of the budget, waits, preemptions."""
    edge = {"edgecolor": "white", "linewidth": 0.4} if pitch > NARROW else {"linewidth": 0}
    decoding = [(cell.step, 1) for cell in row.cells if not cell.is_prefill]
    axes.broken_barh(decoding, (y - 0.4, 0.8), facecolor=DECODE, zorder=2, **edge)
    for chunks in row.prefills:
        extent = (chunks[0].step, len(chunks))
        axes.broken_barh([extent], (y - 0.4, 0.8), facecolor=PREFILL_REST, zorder=2, linewidth=0)
        for chunk in chunks:
            share = max(0.12, 0.8 * chunk.tokens / token_budget)
            box = (y + 0.4 - share, share)
            axes.broken_barh([(chunk.step, 1)], box, facecolor=PREFILL, zorder=3, **edge)
        _name_chunks(axes, y, row, chunks, pitch)
    for start, stop in row.waits:
        axes.plot([start, stop], [y, y], color=WAITING, linewidth=1.2, zorder=1, solid_capstyle="butt")
    crosses = [step + 0.1 for step in row.preempted_at]
    axes.plot(crosses, [y] * len(crosses), "x", color=PREEMPTED, markersize=6, markeredgewidth=1.6, zorder=5)


def _name_chunks(axes: Axes, y: int, row: Row, chunks: Sequence[Cell], pitch: float) -> None:
    """The sizes inside the boxes where they fit, else behind them, or before them if a preemption is near."""
    if all(DIGIT_INCHES * len(str(chunk.tokens)) < 0.9 * pitch for chunk in chunks):
        for chunk in chunks:
            axes.text(chunk.step + 0.5, y, str(chunk.tokens), ha="center", **TEXT)
        return
    text = chunk_text(chunks)
    first, last = chunks[0].step, chunks[-1].step
    needed = DIGIT_INCHES * (len(text) + 2) / pitch
    crowded = any(last < step < last + 1 + needed for step in row.preempted_at)
    if crowded and first > needed:
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(first - 0.05 / pitch, y, text, ha="right", bbox=white, **TEXT)
    else:
        axes.text(last + 1 + 0.03 / pitch, y, text, ha="left", **TEXT)


def chunk_text(chunks: Sequence[Cell]) -> str:
    """The sizes of a prompt's chunks, or their sum where they are many."""
    sizes = [chunk.tokens for chunk in chunks]
    if len(sizes) <= 3:
        return "+".join(map(str, sizes))
    return f"{sum(sizes)} in {len(sizes)}"


def _name_rows(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=7, family="monospace")
    axes.tick_params(axis="both", length=0)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _draw_budget(axes: Axes, records: Sequence[StepRecord], token_budget: int, pitch: float) -> None:
    decode = [sum(share.tokens for share in record.shares if not share.is_prefill) for record in records]
    prefill = [sum(share.tokens for share in record.shares if share.is_prefill) for record in records]
    gap = 0.9 if pitch > NARROW else 1.0
    centres = [step + 0.5 for step in range(len(records))]
    axes.bar(centres, decode, width=gap, color=DECODE)
    axes.bar(centres, prefill, width=gap, bottom=decode, color=PREFILL)
    axes.axhline(token_budget, color=BUDGET, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, token_budget * 1.15)
    axes.set_yticks([0, token_budget])
    axes.set_xlim(0, len(records))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("tokens", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: Figure, axes: Axes, rows: Sequence[Row], records: Sequence[StepRecord]) -> None:
    tokens = sum(share.tokens for record in records for share in record.shares)
    title = f"{len(rows)} requests in {len(records)} steps, {tokens:,} tokens computed"
    axes.set_title(title, fontsize=11, loc="left", pad=8)
    entries: list[Patch | Line2D] = [
        Patch(color=PREFILL, label="prefill: a chunk, with its tokens"),
        Patch(color=DECODE, label="decode: 1 token"),
        Line2D([], [], color=WAITING, linewidth=1.2, label="waiting"),
    ]
    if any(row.preempted_at for row in rows):
        cross = Line2D([], [], color=PREEMPTED, marker="x", markeredgewidth=1.6, linestyle="none")
        cross.set_label("preempted")
        entries.append(cross)
    entries.append(Line2D([], [], color=BUDGET, linewidth=0.8, linestyle=(0, (4, 3)), label="token budget"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8, frameon=False)


def _label(text: str) -> str:
    """One short line that every font has the letters of, and in which a $ starts no formula."""
    flat = " ".join(text.split()).encode("ascii", "replace").decode()
    short = flat if len(flat) <= LONGEST_LABEL else flat[: LONGEST_LABEL - 3] + "..."
    return short.replace("$", r"\$")
