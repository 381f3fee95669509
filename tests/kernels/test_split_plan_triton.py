"""How a step is cut into pieces: every key of every tile is in one of them, for steps of any lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selective_compile.kernels.one_step import one_step

pytest.importorskip("triton")
tiles_of = pytest.importorskip("selective_compile.kernels.ragged_attention_tiles")
plans = pytest.importorskip("selective_compile.kernels.split_plan_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")

# A100, H100 and MI300X have 108, 132 and 304.
PROCESSORS = 132


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class Step:
    """`requests` are (rows, tokens already in the pool); `padding` rows more belong to none of them."""

    requests: tuple[tuple[int, int], ...]
    padding: int = 0
    block_q: int = 1
    block_n: int = 16
    window: int = 0
    slots: int = 8
    shortest: int = 32
    few: int = 1
    long: int = 0
    at_once: int = 0

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.requests) + self.padding

    @property
    def most_tiles(self) -> int:
        return min(self.num_rows, (self.num_rows + (len(self.requests) + 1) * (self.block_q - 1)) // self.block_q)

    def keys(self, request: int) -> int:
        """That the tiles of a request walk over, from the iteration of the first one's first key."""
        _, past = self.requests[request]
        first = max(0, past - self.window + 1) if self.window else 0
        return sum(self.requests[request]) - first // self.block_n * self.block_n

    def row(self, request: int, tile: int) -> int:
        """The first row of a tile."""
        return sum(rows for rows, _ in self.requests[:request]) + tile * self.block_q

    def tiles(self) -> list[tuple[int, int]]:
        """Of all requests and the padding rows: request and number in it."""
        rows = [*(rows for rows, _ in self.requests), self.padding]
        return [(n, tile) for n, count in enumerate(rows) for tile in range(-(-count // self.block_q))]

    def pieces(self) -> list[list[int]]:
        """As they should be told: request, tile, split, keys of a split, place."""
        tiles = self.tiles()
        keys = {n: self.keys(n) if n < len(self.requests) else 0 for n, _ in tiles}
        walked = sum(keys[n] for n, _ in tiles)
        least = max(self.shortest, min(self.long, -(-walked // self.few)))
        length = max(least, -(-walked // self.slots))
        theirs = [n for n, _ in tiles if n < len(self.requests)]
        room = self.at_once - len(theirs)
        alike = -(-walked // max(room, 1))
        tight = up(-(-walked // max(self.at_once, 1)), self.block_n)
        if sum(max(1, -(-keys[n] // max(tight, 1))) for n in theirs) <= self.at_once:
            alike = tight
        if room > 0 and length * room < walked and length <= alike <= 3 * length:
            length = alike
        if 4 * self.unseen() >= walked:
            length = max(length, (walked - self.unseen()) // max(self.at_once, 1))
        length = up(length, self.block_n)
        found: list[list[int]] = []
        place = 0
        for n, tile in tiles:
            splits = max(1, -(-keys[n] // length))
            each_has = up(-(-keys[n] // splits), self.block_n)
            found += [[n, tile, split, each_has, place + split] for split in range(splits)]
            place += splits if splits > 1 else 0
        return found

    def unseen(self) -> int:
        """Of the keys that tiles walk over, as a request's are counted: those behind what a tile before its last one
        sees, where nothing else is hidden."""
        return 0 if self.window else sum(tile * self.block_q for n, tile in self.tiles() if n < len(self.requests))

    def in_order(self) -> list[list[int]]:
        """The pieces as they begin."""
        pieces = self.pieces()
        ours = [each for each in pieces if each[0] < len(self.requests)]
        return ours[::-1] + pieces[len(ours) :]

    def used(self, request: int, tile: int, split_keys: int) -> int:
        """Splits that the keys of a tile reach into."""
        rows, past = self.requests[request]
        first, last = past + tile * self.block_q, past + min((tile + 1) * self.block_q, rows)
        begin = max(0, first - self.window + 1) // self.block_n * self.block_n if self.window else 0
        return -(-(last - begin) // split_keys)

    def end(self, request: int) -> int:
        """Of its rows."""
        return sum(rows for rows, _ in self.requests[: request + 1]) + (request == len(self.requests)) * self.padding

    def told(self) -> Any:
        """The plan of the kernel; what it does not write is -7."""
        rows = torch.tensor([0, *(rows for rows, _ in self.requests)], dtype=torch.int32)
        bounds = rows.cumsum(0).to(torch.int32)
        contexts = torch.tensor([sum(each) for each in self.requests], dtype=torch.int32)
        bounds_of = {name: getattr(self, name) for name in ("slots", "shortest", "few", "long", "at_once")}
        splits = tiles_of.SplitConfig(**bounds_of)
        sizes = {"num_rows": self.num_rows, "rows_and_keys": (self.block_q, self.block_n), "window": self.window}
        return plans.plan(bounds, contexts, splits, **sizes, chunk=0)


@pytest.fixture(autouse=True)
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **options: new_empty(*args, **options).fill_(-7))


STEPS = st.builds(
    Step,
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900)), max_size=7).map(tuple),
    padding=st.integers(0, 5),
    block_q=st.sampled_from((1, 4, 32)),
    block_n=st.sampled_from((16, 64)),
    window=st.sampled_from((0, 0, 1, 100)),
    slots=st.integers(1, 20),
    shortest=st.integers(1, 300),
    few=st.integers(1, 9),
    long=st.sampled_from((0, 100, 600)),
    at_once=st.integers(0, 40),
).filter(lambda step: step.at_once <= step.slots)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=STEPS)
def test_the_plan_has_all_pieces_and_divided_tiles(step: Step) -> None:
    check(step)


def check(step: Step) -> None:
    expected, found = step.in_order(), step.told()
    pieces, divided = found.pieces.T.tolist(), found.divided.T.tolist()
    assert len(pieces) == step.most_tiles + step.slots and len(divided) == min(step.most_tiles, step.slots)
    split = {tuple(each[:2]) for each in expected if each[2] > 0}
    contexts = [sum(each) for each in step.requests] + [0]
    assert [each[:6] for each in pieces[: len(expected)]] == [
        [n, step.row(n, tile), step.end(n), contexts[n], *rest] for n, tile, *rest, _ in expected
    ]
    assert all(each[1] >= each[2] for each in pieces[len(expected) :])
    for each, (n, tile, *_, place) in zip(pieces, expected, strict=False):
        assert each[6] == place < found.places or (n, tile) not in split
    first = [
        [step.row(n, tile), min(step.row(n, tile) + step.block_q, step.end(n)), step.used(n, tile, keys), place]
        for n, tile, number, keys, place in step.pieces()
        if (n, tile) in split and number == 0
    ]
    assert divided[: len(first)] == first and all(each[1] == -1 for each in divided[len(first) :])


@settings(max_examples=200)
@given(step=STEPS)
def test_pieces_have_all_keys_of_a_tile_and_are_none_too_many(step: Step) -> None:
    pieces = step.pieces()
    assert step.num_rows == 0 or len(pieces) <= step.most_tiles + step.slots
    divided = [each for each in pieces if any(other[:2] == each[:2] and other[2] > 0 for other in pieces)]
    assert [each[4] for each in divided] == list(range(len(divided)))
    assert len(divided) <= min(2 * step.slots, step.slots + step.most_tiles)
    assert sum(each[2] == 0 for each in divided) <= min(step.slots, step.most_tiles)
    for request, tile in step.tiles():
        parts = [each for each in pieces if each[:2] == [request, tile]]
        keys = step.keys(request) if request < len(step.requests) else 0
        assert [each[2] for each in parts] == list(range(len(parts))) and parts
        assert keys <= parts[0][3] * len(parts) < keys + step.block_n * len(parts)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("requests", [1, 2, 3, 8])
def test_of_few_requests_all_pieces_run_at_once(requests: int, large: bool) -> None:
    """Of 512 keys, as before, a quarter of those of one request of 32,768 would begin when all others are done."""
    splits = tiles_of.split_config(parts=8, keys=None, large=large, processors=PROCESSORS)
    keys = (8_192 if large else 32_768) // requests
    step = Step(requests=((1, keys - 1),) * requests, block_n=64, **dataclasses.asdict(splits))
    programs = 8 * len(step.pieces())
    room = (tiles_of.AT_ONCE_OF_LARGE if large else tiles_of.AT_ONCE_OF_SMALL) * PROCESSORS
    assert 0.4 * room <= programs <= room


def test_more_requests_than_are_walked_over_at_once() -> None:
    step = Step(requests=((0, 5),) * 270 + ((1, 3), (2, 400)), padding=1, block_q=2, slots=9)
    check(step)
    assert {each[0] for each in step.pieces()} == {270, 271, 272} and len(step.pieces()) > 8


def test_layers_of_one_step_have_one_plan() -> None:
    def planned(*, slots: int = 3, shortest: int = 16, bounds: Any = None, contexts: Any = None, **changes: Any) -> Any:
        sizes = {"num_rows": 4, "rows_and_keys": (4, 16), "window": 0, "chunk": 0} | changes
        lengths = (bounds_of if bounds is None else bounds, contexts_of if contexts is None else contexts)
        return plans.plan(*lengths, tiles_of.SplitConfig(slots=slots, shortest=shortest), **sizes)

    bounds_of, contexts_of = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 4], [9, 70]))
    others: list[dict[str, Any]] = [{"window": 20}, {"chunk": 20}, {"rows_and_keys": (2, 16)}, {"num_rows": 5}]
    others += [{"rows_and_keys": (4, 32)}, {"slots": 4}, {"shortest": 32}]
    others += [{"bounds": bounds_of.clone()}, {"contexts": contexts_of.clone()}]
    others += [{"bounds": bounds_of[:2], "contexts": contexts_of[:1]}]
    with one_step():
        found = [planned(), *(planned(**changes) for changes in others)]
        assert len({id(each) for each in found}) == len(found)
        assert all(planned(**changes) is each for changes, each in zip([{}, *others], found, strict=True))
    with one_step():
        contexts_of += 40
        assert planned().pieces.tolist() != found[0].pieces.tolist()
    assert planned() is not planned()


def test_more_keys_than_32_bits_can_count() -> None:
    check(Step(requests=((70, 61_500_000),), block_n=64, slots=1))


def decoding(requests: tuple[tuple[int, int], ...]) -> Step:
    splits = tiles_of.split_config(parts=8, keys=None, large=False, processors=PROCESSORS)
    assert splits.slots == PROCESSORS
    return Step(requests=requests, block_n=64, **dataclasses.asdict(splits))


@pytest.mark.parametrize("requests", (1, 8, 12, 13, 40, 64, 256))
@pytest.mark.parametrize("context", (512, 1024, 4096, 32768))
def test_programs_of_decoding_have_alike_to_do_and_few_have_nothing(requests: int, context: int) -> None:
    """In a captured step, whose launch knows of no lengths: 8 key/value heads, eight pieces for each processor."""
    step = decoding(((1, context - 1),) * requests)
    pieces = step.pieces()
    # Of 512 keys, unless some of the processors would have none, or more could not run at once.
    least = min(PROCESSORS, max(requests * context // 512, min(PROCESSORS // 8, requests * context // 256))) // 2
    assert len(pieces) >= min(step.at_once // 2, least)
    assert pieces[0][3] >= min(context, 512) or 8 * len(pieces) <= 2 * PROCESSORS
    assert step.most_tiles == requests and requests + step.slots - len(pieces) <= step.slots
    # How long the last processor has, to its share: with eight heads, a program for each piece and head.
    longest = -(-8 * len(pieces) // PROCESSORS) * min(pieces[0][3], context)
    assert longest <= 1.25 * requests * context * 8 / PROCESSORS + 256


@pytest.mark.parametrize("requests", (1, 12, 64, 255))
def test_a_long_request_among_short_ones_is_cut_at_any_batch_size(requests: int) -> None:
    step = decoding(((1, 1023),) * requests + ((1, 131071),))
    total = 1024 * requests + 131072
    pieces = step.pieces()
    assert pieces[-1][3] <= total / PROCESSORS + 64 or len(pieces) <= step.at_once
    assert pieces[-1][3] <= 3 * total / PROCESSORS + 64


@pytest.mark.skipif(not hasattr(plans._plan_kernel, "params"), reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: Any, tmp_path: Any) -> None:
    types = dict.fromkeys(("pieces", "divided", "cu_seqlens_q", "context_lens"), "*i32")
    constants = {"WINDOW": 4096, "CHUNK": 8192, "BLOCK_Q": 32, "BLOCK_N": 64, "LANES": plans.LANES}
    compiled = ahead.compile_ahead(plans._plan_kernel, target, types, constants, num_warps=4)
    ahead.assert_ships(compiled, tmp_path)
