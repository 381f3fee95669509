"""Tokens chosen on the device are those that the host chooses."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile.runtime.device_draw import NO_TOKEN, choices, choose
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.processors import Ban
from selective_compile.runtime.sampler import sample
from selective_compile.runtime.token_marks import BANNED, SEEN
from tests.runtime.test_sampler import GREEDY, random_logits

PARAMS = st.fixed_dictionaries(
    {"do_sample": st.booleans(), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "temperature": st.sampled_from([0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 3, 50, 1000, 2**62]),
        "top_p": st.sampled_from([0.1, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "bans": st.lists(
            st.builds(Ban, st.lists(st.integers(0, 299), min_size=1, max_size=4), st.integers(0, 6), st.integers(4, 7)),
            max_size=3,
        ),
    },
)
HISTORY = 5  # tokens of each row's request so far


def asked(wanted: list[dict[str, Any]], vocabulary: int) -> list[GenerationParams]:
    def known(ban: Ban) -> Ban:
        return ban._replace(tokens=array("q", [token % vocabulary for token in ban.tokens]))

    return [dataclasses.replace(GREEDY, **each | {"bans": tuple(map(known, each.get("bans", ())))}) for each in wanted]


def on_device(
    logits: Tensor, params: list[GenerationParams], indices: list[int], marks: Tensor | None = None
) -> list[int]:
    found = choices(params, indices)
    return choose(logits, None if found is None else torch.from_numpy(found), marks).tolist()


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.lists(PARAMS, min_size=1, max_size=6),
    vocabulary=st.integers(2, 300),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_have_the_tokens_of_the_host(
    wanted: list[dict[str, Any]], vocabulary: int, seed: int, ties: bool, dtype: torch.dtype
) -> None:
    params = asked(wanted, vocabulary)
    logits = random_logits(len(params), vocabulary, seed, ties).to(dtype)
    indices = [(seed + row) % 1000 for row in range(len(params))]
    histories = [array("q", [(seed + row * n) % vocabulary for n in range(HISTORY)]) for row in range(len(params))]
    marks = torch.zeros(logits.shape, dtype=torch.uint8)
    for row, history in enumerate(histories):
        marks[row, list(history)] |= SEEN
        for ban in params[row].bans:
            if ban.first <= HISTORY < ban.before:
                marks[row, list(ban.tokens)] |= BANNED
    by_host = sample(logits, params, indices, histories)
    failed = [record is not None and record.error is not None for record in by_host.records]
    wanted_tokens = [NO_TOKEN if none else token for none, token in zip(failed, by_host.tokens, strict=True)]
    assert on_device(logits, params, indices, marks) == wanted_tokens


def test_a_row_does_not_depend_on_those_around_it() -> None:
    logits = random_logits(8, 500)
    params = [dataclasses.replace(GREEDY, do_sample=True, seed=n, top_p=0.9, top_k=n * 10) for n in range(8)]
    together = on_device(logits, params, list(range(8)))
    assert together == [on_device(logits[n : n + 1], [params[n]], [n])[0] for n in range(8)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_where_nothing_can_be_drawn(bad: float) -> None:
    logits = random_logits(2, 30)
    logits[0, 3] = bad
    params = [dataclasses.replace(GREEDY, do_sample=True, seed=3)] * 2
    found = on_device(logits, params, [0, 0])
    assert found[0] == NO_TOKEN and found[1] == on_device(logits[1:], params[1:], [0])[0]
