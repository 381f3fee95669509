"""What is asked of all of a table that a request's length makes: answered where it is the same for all lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.passes.lengths import CAPTURE_TOKENS
from tests.decoders import VOCABULARY, Decoder
from tests.exactness import TOLERANCE, engine_error, step_program

Ask = Callable[[int], Any]


class Asking(Decoder):
    """Computes something else where what is asked of its number of tokens is true."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, attention_mask)
        return logits * 2 if self.ask(input_ids.shape[1]) else logits


def causal(length: int) -> Tensor:
    return torch.triu(torch.full((length, length), -math.inf), diagonal=1)


def of_the_tutorial(length: int) -> Any:
    mask = (torch.triu(torch.ones(length, length)) == 1).transpose(0, 1)
    mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
    return (mask == causal(length)).all()


def by_counting(length: int) -> Any:
    places = torch.arange(length)
    return torch.all((places[None, :] > places[:, None]) == causal(length).isinf()).item()


def made_in_place(length: int) -> Any:
    return bool((torch.zeros_like(causal(length)).masked_fill_(causal(length) < 0, -math.inf) == causal(length)).all())


def of_any(length: int) -> Any:
    return (torch.tril(causal(length), -1) != 0).any() or (causal(length).new_ones(length) < 1).any()


KNOWN = [of_the_tutorial, by_counting, made_in_place, of_any]


@pytest.mark.parametrize("ask", KNOWN)
def test_what_is_so_for_all_lengths_is_known(ask: Ask) -> None:
    model = Asking(ask)
    assert engine_error(model, vocabulary=VOCABULARY, lengths=(2, 17, 9)) < TOLERANCE
    assert step_program(model).max_positions == model.places.num_embeddings


def a_window(length: int) -> Any:
    """That of requests of up to 40 tokens is causal."""
    return ((causal(length) == 0) & (torch.ones(length, length).triu(-40) > 0) == (causal(length) == 0)).all()


def one_place(length: int) -> Any:
    places = torch.arange(length)
    return ((places == 5000)[:, None] & (places == 70)).any()


def of_its_end(length: int) -> Any:
    return (torch.arange(length) == length - CAPTURE_TOKENS).any()


def of_its_number(length: int) -> Any:
    return (torch.arange(length) * length > 500).any()


def counted_down(length: int) -> Any:
    return (torch.arange(length - 1, -1, -1) > 20).all()


def of_one_more(length: int) -> Any:
    return (torch.ones(length, length + 1).triu(-1) > 0).all()


def of_rows(length: int) -> Any:
    return (causal(length) == 0).any(-1)[0]


def written_to(length: int) -> Any:
    mask = causal(length)
    mask.zero_()
    return (mask == causal(length)).all()


def of_random_numbers(length: int) -> Any:
    return (torch.rand(length, length) >= 0).all()


NOT_KNOWN = [a_window, one_place, of_its_end, of_its_number, counted_down, of_one_more, of_rows, written_to]


@pytest.mark.parametrize("ask", [*NOT_KNOWN, of_random_numbers])
def test_others_end_the_trace(ask: Ask) -> None:
    with pytest.raises(sc.RefusedError, match=r"[Dd]ata-dependent"):
        capture(Asking(ask))


def test_what_is_told_of_weights_ends_the_trace() -> None:
    model = Asking(lambda length: (model.norm.bias[None, :].expand(length, -1) == 0).all())
    nn.init.zeros_(model.norm.bias)
    with pytest.raises(sc.RefusedError, match=r"[Dd]ata-dependent"):
        capture(model)


def test_a_request_of_one_token_that_is_told_apart_is_seen() -> None:
    def with_slopes(length: int) -> Any:
        places = torch.arange(length)
        return bool((causal(length) - (places[:, None] - places).abs() == causal(length)).all())

    with pytest.raises(sc.RefusedError, match="the model computes"):
        step_program(Asking(with_slopes))
