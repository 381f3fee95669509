"""The picture of the schedule: what is drawn where, and where it may be written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from selective_compile.runtime import StepRecord, StepShare
from selective_compile.schedule_picture import (
    DECODE,
    PREEMPTED,
    PREFILL,
    Cell,
    check_path,
    chunk_text,
    draw_schedule,
    schedule_rows,
    write_schedule,
)


def record(step: int, *shares: tuple[str, int, bool], preempted: tuple[str, ...] = ()) -> StepRecord:
    made = tuple(StepShare(name, tokens, is_prefill, samples=True, start=0) for name, tokens, is_prefill in shares)
    return StepRecord(step=step, shares=made, preempted=preempted, seconds=0.01)


# a: two chunks, two decodes. b: one chunk, a decode, preempted, waits a step, computed again in two chunks.
STEPS = [
    record(0, ("a", 8, True)),
    record(1, ("a", 3, True), ("b", 5, True)),
    record(2, ("a", 1, False), ("b", 1, False)),
    record(3, ("a", 1, False), preempted=("b",)),
    record(4, ("b", 6, True)),
    record(5, ("b", 2, True)),
]


def boxes(figure: Figure, colour: str) -> dict[int, list[tuple[float, float]]]:
    """By row, the (step, columns) extents of the boxes of a colour among the requests."""
    found: dict[int, list[tuple[float, float]]] = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        if to_hex(collection.get_facecolor()[0]) == colour:
            for path in collection.get_paths():
                extents = path.get_extents()
                found.setdefault(round(extents.y1 - 0.4), []).append((extents.x0, extents.width))
    return found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_rows_are_in_order_of_arrival_with_their_shares() -> None:
    first, second = schedule_rows(STEPS, arrivals={"a": 0, "b": 0}, labels={"b": "second"})
    assert (first.label, second.label) == ("a", "second")
    assert second.cells == (Cell(1, 5, True), Cell(2, 1, False), Cell(4, 6, True), Cell(5, 2, True))
    assert (first.preempted_at, second.preempted_at) == ((), (3,))
    assert [row.request_id for row in schedule_rows(STEPS, arrivals={"a": 1, "b": 0})] == ["b", "a"]


def test_a_preempted_request_waits_and_starts_anew() -> None:
    _, row = schedule_rows(STEPS, arrivals={"b": 0})
    assert row.waits == [(0, 1), (3, 4)]
    assert row.prefills == [(Cell(1, 5, True),), (Cell(4, 6, True), Cell(5, 2, True))]


def test_a_request_preempted_while_in_prefill_starts_anew() -> None:
    steps = [record(0, ("a", 4, True)), record(1, ("a", 4, True), preempted=("a",))]
    (row,) = schedule_rows(steps)
    assert row.prefills == [(Cell(0, 4, True),), (Cell(1, 4, True),)]


def test_prefill_and_decode_are_boxes_of_two_colours_one_column_a_step() -> None:
    figure = draw_schedule(STEPS, token_budget=8)
    assert boxes(figure, DECODE) == {0: [(2, 1), (3, 1)], 1: [(2, 1)]}
    assert boxes(figure, PREFILL) == {0: [(0, 1), (1, 1)], 1: [(1, 1), (4, 1), (5, 1)]}
    assert figure.axes[0].get_xlim() == (0, 6)


def test_chunks_carry_their_sizes() -> None:
    assert texts(draw_schedule(STEPS, token_budget=8)) == ["8", "3", "5", "6", "2"]
    # Among hundreds of steps a column is too narrow for a number, so it stands beside the chunks.
    long = [*STEPS, *(record(6 + step, ("a", 1, False)) for step in range(400))]
    assert texts(draw_schedule(long, token_budget=8)) == ["8+3", "5", "6+2"]
    assert chunk_text([Cell(step, 100, True) for step in range(5)]) == "500 in 5"


def test_preemption_is_marked_and_in_the_legend_only_where_there_is_one() -> None:
    def crosses(figure: Figure) -> list[tuple[int, float]]:
        lines = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
        return [(int(x), float(y)) for line in lines for x, y in line.get_xydata()]  # type: ignore[union-attr]

    def legend(figure: Figure) -> list[str]:
        return [text.get_text() for text in figure.legends[0].get_texts()]

    calm = draw_schedule(STEPS[:3], token_budget=8)
    preempted = draw_schedule(STEPS, token_budget=8)
    assert crosses(preempted) == [(3, 1.0)] and crosses(calm) == []
    assert set(legend(preempted)) - set(legend(calm)) == {"preempted"}


def test_below_the_requests_stand_the_tokens_of_each_step() -> None:
    axes = draw_schedule(STEPS, token_budget=8).axes[1]
    decode, prefill = axes.containers
    assert [bar.get_height() for bar in decode] == [0, 0, 2, 1, 0, 0]
    assert [bar.get_height() for bar in prefill] == [8, 8, 0, 0, 6, 2]
    assert [bar.get_y() for bar in prefill][2:4] == [2, 1]


def test_labels_are_short_lines_without_formulas() -> None:
    steps = [record(0, ("a", 1, True), ("b", 1, True))]
    first, second = schedule_rows(steps, labels={"a": "costs $5\n and 日 $6", "b": "x" * 99})
    assert first.label == r"costs \$5 and ? \$6"
    assert len(second.label) == 26 and second.label.endswith("...")


@pytest.mark.parametrize("requests", [1, 40])
def test_it_is_written_as_png_in_colour(tmp_path: Path, requests: int) -> None:
    steps = [record(n, *((str(r), 7 if n == 0 else 1, n == 0) for r in range(requests))) for n in range(300)]
    steps.append(record(300, ("0", 8, True), preempted=("0",)))
    path = tmp_path / "schedule.png"
    write_schedule(path, steps, token_budget=7 * requests)
    pixels = imread(path)[..., :3]
    assert 1000 <= pixels.shape[1] <= 2600
    for colour in (PREFILL, DECODE, PREEMPTED):
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels - wanted).max(axis=2) < 0.01).any(), colour


def test_it_is_written_as_svg(tmp_path: Path) -> None:
    path = tmp_path / "schedule.SVG"
    write_schedule(path, STEPS, token_budget=8)
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert PREFILL in path.read_text() and DECODE in path.read_text()


def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .png or .svg, got 'x.gif'"):
        check_path(Path("x.gif"))
    with pytest.raises(ValueError, match="must lie in a folder that exists"):
        check_path(tmp_path / "missing" / "x.png")
    assert check_path(Path("x.png")) == Path("x.png")


def test_no_steps_are_no_picture() -> None:
    with pytest.raises(ValueError, match="at least one step, got none"):
        draw_schedule([], token_budget=8)
