"""Streamers see what `model.generate` shows them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import selective_compile as sc
from tests.huggingface.models import CONFIG, Recorder, assert_idle, random_ids


def test_streamer_gets_what_generate_gives_it(model: Any) -> None:
    ids = random_ids(1, 6)
    ours, theirs = Recorder(), Recorder()
    result = sc.generate(model, ids, max_new_tokens=5, streamer=ours, engine_config=CONFIG)
    model.generate(ids, max_new_tokens=5, streamer=theirs)
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 1 + 5 + 1
    of_list = Recorder()
    sc.generate(model, [ids[0]], max_new_tokens=5, streamer=of_list, engine_config=CONFIG)
    assert of_list.seen == theirs.seen
    assert result.shape == (1, 11)


class Failing(Recorder):
    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.seen) == 3:
            raise OSError("the reader went away")


def test_a_failing_streamer_leaves_nothing_running(model: Any) -> None:
    with pytest.raises(OSError, match="went away"):
        sc.generate(model, random_ids(1, 6), max_new_tokens=50, streamer=Failing(), engine_config=CONFIG)
    assert_idle(model)
