"""Linear biases that are rounded, and that overflow far out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import analysed, ragged_error, reasons
from tests.passes.spellings import Function, below, scores_of, weigh

SLOPES = torch.tensor([0.84, 0.71, 0.1, 0.003])


def biased(bias: Callable[[Tensor], Tensor]) -> Function:
    """``bias``: what is added for keys at these positions [S], as [H, 1, S]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k) + bias(torch.arange(q.shape[1]))
        return weigh(scores.masked_fill(~below(q.shape[1]), -math.inf).softmax(-1), v)

    return attend


def in_type(dtype: torch.dtype, slopes: Tensor = SLOPES) -> Function:
    return biased(lambda places: (slopes[:, None, None] * places).to(dtype))


def test_a_bias_that_overflows_is_proved_up_to_there() -> None:
    """In float16, 0.84 a position is more than 65,504 from position 78,000 on."""
    function = in_type(torch.float16)
    traced = analysed(function)
    (call,) = traced.calls
    assert call.family is not None
    assert call.family.slopes == pytest.approx(SLOPES.tolist(), rel=2e-3)
    assert traced.max_tokens is not None and 65_536 <= traced.max_tokens <= 78_000
    assert ragged_error(function) < 1e-2


@pytest.mark.parametrize("dtype, slopes", [(torch.float16, SLOPES / 4), (torch.bfloat16, SLOPES)])
def test_a_bias_that_does_not_overflow_bounds_nothing(dtype: torch.dtype, slopes: Tensor) -> None:
    traced = analysed(in_type(dtype, slopes))
    assert traced.calls[0].family is not None and traced.calls[0].family.slopes
    assert traced.max_tokens is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_a_bias_of_fewer_bits_than_it_is_added_with_is_refused(dtype: torch.dtype, scale: float) -> None:
    """Also where it overflows far out: what is no number there agrees with no line."""
    rounded = biased(lambda places: ((scale * SLOPES)[:, None, None].bfloat16() * places).to(dtype))
    (reason,) = reasons(rounded)
    assert "no linear function of the distance" in reason


def test_a_bias_that_is_no_number_anywhere_is_no_line() -> None:
    traced = analysed(biased(lambda places: SLOPES[:, None, None] * places / 0.0))
    assert traced.refusals or traced.max_tokens is not None and traced.max_tokens <= 1


@pytest.mark.parametrize("numbered", [torch.int64, torch.float32])
def test_a_number_that_hides_is_no_position_of_a_request(numbered: torch.dtype) -> None:
    """Of tokens so far back a bias would hide some by itself, and floats would not tell them apart."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[1], dtype=numbered)
        distance = (places[:, None] - places[None, :]).float()
        scores = scores_of(q, k) - SLOPES[:, None, None] * distance + (distance < 0).float() * -1e9
        return weigh(scores.softmax(-1), v)

    traced = analysed(attend)
    assert not traced.refusals and traced.calls[0].family is not None
    assert traced.calls[0].family.slopes == pytest.approx(SLOPES.tolist()) and traced.max_tokens == 2**24
    assert ragged_error(attend) < 1e-5
