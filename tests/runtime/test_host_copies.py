"""Blocks that go to the host's memory and come back, by way of memory that the device may still read or write."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.runtime.host_copies import TURNS, copy_blocks
from tests.runtime.played_stream import PlayedStream

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float64)


def pools(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Of the device with nine blocks, and of the host with seven."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (9, 7)
    made = [
        [torch.randint(-9, 9, (size, 2, 4, 3 + place), generator=draw).to(dtype) for size in sizes]
        for place, dtype in enumerate(DTYPES)
    ]
    return [(pool, host) for pool, host in made]


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_come_to_where_they_belong_and_nothing_else_changes(to_host: bool, seed: int) -> None:
    moods = random.Random(seed)
    stream = PlayedStream(lambda: moods.choice((0, 0, 1, 9)))
    some, wanted = pools(seed), pools(seed)
    blocks, slots = torch.tensor([8, 0, 3, 5]), torch.tensor([1, 6, 0, 2])
    copy_blocks(stream, some, to_host=to_host, blocks=blocks, slots=slots)
    for pool, host in wanted:
        if to_host:
            host[slots] = pool[blocks]
        else:
            pool[blocks] = host[slots]
    assert stream.left == 0
    for found, known in zip(some, wanted, strict=True):
        for pool, same in zip(found, known, strict=True):
            assert torch.equal(pool.double(), same.double())


@pytest.mark.parametrize("to_host", [False, True])
def test_the_device_copies_while_the_host_goes_on(to_host: bool) -> None:
    stream, left = PlayedStream(), []
    mark = stream.mark

    def marked() -> Any:
        left.append(stream.left)
        return mark()

    stream.mark = marked  # type: ignore[method-assign]
    places = torch.tensor([1, 2])
    copy_blocks(stream, pools(0), to_host=to_host, blocks=places, slots=places)
    assert left == [1, 2, 2, 2, 2] and TURNS == 2


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_they_go_by_way_of_pinned_memory_where_the_pools_are(
    to_host: bool, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[bool] = []
    empty = torch.empty

    def made(*shape: int, dtype: torch.dtype, pin_memory: bool, device: str) -> Tensor:
        assert device == "cpu"
        noted.append(pin_memory)
        return empty(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: pinned)
    places = torch.tensor([1, 2])
    copy_blocks(PlayedStream(), pools(0), to_host=to_host, blocks=places, slots=places)
    assert noted == [pinned] * len(DTYPES)


@pytest.mark.parametrize("to_host", [False, True])
def test_no_copy_between_them_is_waited_for_by_itself(to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[bool] = []
    to, copy_ = Tensor.to, Tensor.copy_

    def sent(self: Tensor, *given: Any, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        return to(self, *given)

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        return copy_(self, source)

    some, places = pools(0), torch.tensor([1, 2])
    monkeypatch.setattr(Tensor, "to", sent)
    monkeypatch.setattr(Tensor, "copy_", copied)
    copy_blocks(PlayedStream(), some, to_host=to_host, blocks=places, slots=places)
    assert copies == [True] * len(DTYPES)
