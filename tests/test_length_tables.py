"""What is asked of all of a table that a request's length makes: answered where it is the same for all lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.length_tables import table_of
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


def of_none(length: int) -> Any:
    return not (torch.tril(causal(length)) != 0).any()


KNOWN = [of_the_tutorial, by_counting, made_in_place, of_any, of_none]


@pytest.mark.parametrize("ask", KNOWN)
def test_what_is_so_for_all_lengths_is_known(ask: Ask) -> None:
    model = Asking(ask)
    assert engine_error(model, vocabulary=VOCABULARY, lengths=(2, 17, 9)) < TOLERANCE
    assert step_program(model).max_positions == model.places.num_embeddings


def rows(length: int) -> Tensor:
    return torch.arange(length)


# Of each which places there are: asked of the longest request as of all that are there.
LINES: dict[str, Callable[[int], Any]] = {
    "shifted twice": lambda length: (rows(length) + 300 == 999).any(),
    "subtracted": lambda length: (rows(length)[:, None] - 20 - rows(length) == 700).any(),
    "both": lambda length: ((rows(length)[:, None] - rows(length) == 123) & (rows(length) == 456)).any(),
    "between": lambda length: ((rows(length) > 899.5) & (rows(length) < 900.5)).any(),
    "a row": lambda length: ((rows(length)[:, None] == 333) & (rows(length) == 77)).any(),
    "cut": lambda length: (torch.ones(length, length).triu(450).tril(450) > 0).any(),
    "cut and counted": lambda length: ((torch.ones(length, length).tril(-200) > 0) & (rows(length) == 444)).any(),
    "nowhere": lambda length: ((rows(length) > 400) & (rows(length) < 401)).any(),
    "everywhere": lambda length: ((rows(length)[:, None] - rows(length) < 500) | (rows(length)[:, None] > 499)).all(),
}


@pytest.mark.parametrize("name", LINES)
def test_a_table_of_few_rows_has_what_one_of_all_has(name: str) -> None:
    traced: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, examples: list[Any]) -> Any:
        traced.append(module)
        return module.forward

    ids = torch.zeros(1, 12)
    torch._dynamo.mark_dynamic(ids, 1)
    torch.compile(lambda x: LINES[name](x.shape[1]), backend=keep, fullgraph=True)(ids)
    (output,) = traced[0].graph.find_nodes(op="output")
    table = table_of(output.args[0][0])
    assert table is not None
    for length in (2, 40, 1000, 1100):
        assert table.holds(length) == bool(LINES[name](length))


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


def filled_with_it(length: int) -> Any:
    return (torch.full((1,), length) > 512).any()


def cut_by_it(length: int) -> Any:
    return (torch.ones(length, length).triu(diagonal=length) > 0).any()


def multiplied(length: int) -> Any:
    return (torch.arange(length) * 3 == 2001).any()


def as_floats(length: int) -> Any:
    return (torch.arange(length).float() == 900.0).any()


def of_a_product(length: int) -> Any:
    places = torch.arange(length)
    return ((places + 2)[:, None] * (places + 2) == 67591).any()


def of_a_sum(length: int) -> Any:
    places = torch.arange(length)
    return (places[:, None] + places == 999).any()


def of_three(length: int) -> Any:
    places = torch.arange(length)
    far = places[:, None, None] - places[:, None] > 300, places[:, None] - places > 400
    return (far[0] & far[1] & (places[:, None, None] < 800)).any()


def written_behind(length: int) -> Any:
    """What is written to one must not be read of others."""
    places, others = torch.arange(length), torch.arange(length)
    written = places.masked_fill_(places >= 0, 5000)
    return ((others == 5000) & (written == 5000)).all()


def cut_in_place(length: int) -> Any:
    table = torch.ones(length, length, dtype=torch.bool)
    cut = table.tril_()
    return (table == cut).all()


def of_few_bits(length: int) -> Any:
    return (torch.arange(length, dtype=torch.int32) + (2**31 - 3) >= 0).all()


def shifted_in_place(length: int) -> Any:
    places = torch.arange(length)
    places.add_(300)
    return (places == 999).any()


UNKNOWN = [of_its_end, of_its_number, counted_down, of_one_more, of_rows, written_to, of_random_numbers]
NOT_READ = [filled_with_it, cut_by_it, multiplied, as_floats, of_a_product, of_a_sum, of_three]


WRITTEN = [written_behind, shifted_in_place, cut_in_place]


@pytest.mark.parametrize("ask", [a_window, one_place, *UNKNOWN, *NOT_READ, *WRITTEN, of_few_bits])
def test_others_end_the_trace(ask: Ask) -> None:
    with pytest.raises(sc.RefusedError, match=r"[Dd]ata-dependent"):
        capture(Asking(ask))


def test_what_is_told_of_weights_ends_the_trace() -> None:
    model = Asking(lambda length: (model.norm.bias[None, :].expand(length, -1) == 0).all())
    nn.init.zeros_(model.norm.bias)
    with pytest.raises(sc.RefusedError, match=r"[Dd]ata-dependent"):
        capture(model)


def test_a_request_of_one_token_that_is_told_apart_is_seen() -> None:
    def has_two(length: int) -> Any:
        return (rows(length)[:, None] - rows(length) == 1).any()

    with pytest.raises(sc.RefusedError, match="the model computes"):
        step_program(Asking(has_two))
