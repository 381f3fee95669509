"""Pass 3: sinks that act on an attention's output are those of its softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import analysed, ragged_error, reasons
from tests.passes.spellings import SINKS, hide_future, scores_of, swapped

HEADS = (1, -1, 1)


def gating(gate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """``gate`` of the scores, the masked scores and the sinks is [B, H, S], and multiplies the output."""

    def attend(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        scores = scores_of(q, k)
        hidden = hide_future(scores)
        return swapped(hidden.softmax(-1) @ swapped(v) * gate(scores, hidden, w).unsqueeze(-1))

    return attend


def of_sinks(scores: Tensor, hidden: Tensor, sinks: Tensor) -> Tensor:
    return (hidden.logsumexp(-1) - sinks.view(HEADS)).sigmoid()


REFUSED = {
    "of scores without their mask": lambda s, h, w: (s.logsumexp(-1) - w.view(HEADS)).sigmoid(),
    "of other scores": lambda s, h, w: ((h * 2).logsumexp(-1) - w.view(HEADS)).sigmoid(),
    "added": lambda s, h, w: (h.logsumexp(-1) + w.view(HEADS)).sigmoid(),
    "the other way round": lambda s, h, w: (w.view(HEADS) - h.logsumexp(-1)).sigmoid(),
    "taken off twice": lambda s, h, w: torch.sub(h.logsumexp(-1), w.view(HEADS), alpha=2).sigmoid(),
    "another curve": lambda s, h, w: (h.logsumexp(-1) - w.view(HEADS)).tanh(),
    "in whole numbers": lambda s, h, w: (h.logsumexp(-1).long().float() - w.view(HEADS)).sigmoid(),
    "one for all heads": lambda s, h, w: (h.logsumexp(-1) - w.sum()).sigmoid(),
    "of tokens": lambda s, h, w: (h.logsumexp(-1) - h[..., 0]).sigmoid(),
}


def test_sinks_on_the_output_are_those_of_the_softmax() -> None:
    traced = analysed(gating(of_sinks), SINKS)
    (call,) = traced.calls
    assert not traced.refusals and call.sinks is not None
    assert ragged_error(gating(of_sinks), SINKS) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_other_gates_are_refused(name: str) -> None:
    assert reasons(gating(REFUSED[name]), SINKS)
