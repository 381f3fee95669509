"""Models that compute the logits of the last token alone: ragged, and as the model for every prefix of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import selective_compile as sc
from tests.decoders import VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, fast, logits_in_chunks, step_program

PROMPTS = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in (1, 2, 13, 9)]
Head = Callable[[Decoder, Tensor], Tensor]  # [B, S, h] -> [B, 1, V]


class LastAlone(Decoder):
    """`Decoder` with another head, which may know tokens apart."""

    def __init__(self, last: Head, **parts: Any) -> None:
        super().__init__(**parts)
        self.last = last

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(self, x)


def capped(logits: Tensor) -> Tensor:
    return 30 * torch.tanh(logits / 30)


ALIKE: dict[str, Head] = {
    "listed": lambda model, x: model.head(model.norm(x)[:, [-1], :]),
    "sliced": lambda model, x: model.head(model.norm(x)[:, -1:]),
    "selected": lambda model, x: model.head(model.norm(x)[:, -1, :]).unsqueeze(1),
    "selected, put back first": lambda model, x: model.head(model.norm(x[:, -1])[:, None]),
    "of all, listed": lambda model, x: model.head(model.norm(x))[:, [-1]],
    "of all, selected": lambda model, x: model.head(model.norm(x))[:, -1].unsqueeze(-2),
    "normed, capped": lambda model, x: capped(model.head(model.norm(x[:, -1:]))).float(),
    "one row": lambda model, x: model.head(model.norm(x)[:, -1, :]),
    "one row of all": lambda model, x: model.head(model.norm(x))[:, -1],
    "sliced, one row": lambda model, x: model.head(model.norm(x[:, -1:])).squeeze(1),
    "sliced, as one row": lambda model, x: model.head(model.norm(x[:, -1:]).view(x.shape[0], WIDTH)),
    "of all, sliced, flat": lambda model, x: model.head(model.norm(x))[:, -1:].flatten(0, 1),
    "twice": lambda model, x: model.head(model.norm(x)[:, -1:]) + 0.5 * model.head(x[:, -1])[:, None],
}


@pytest.mark.parametrize("name", ALIKE)
def test_every_prefix_has_the_logits_of_the_model(name: str) -> None:
    model = LastAlone(ALIKE[name])
    program = step_program(model)
    for chunk in (4, 13):
        for prompt, ours in zip(PROMPTS, logits_in_chunks(program, PROMPTS, chunk), strict=True):
            theirs = [model(torch.tensor([prompt[:end]])).flatten() for end in range(1, len(prompt) + 1)]
            torch.testing.assert_close(ours, torch.stack(theirs), atol=TOLERANCE, rtol=0)


def of_heads(model: Decoder, x: Tensor) -> Tensor:
    """Over values of a head, which behind the selection are dimension 2."""
    mixed = x.view(*x.shape[:2], 4, WIDTH // 4)[:, -1].softmax(2).flatten(1)
    return model.head(mixed).unsqueeze(1)


def looking_back(model: Decoder, x: Tensor) -> Tensor:
    """Of one query and all keys, causal is counted from the first: it sees one key."""
    return model.head(F.scaled_dot_product_attention(x[:, -1:], x, x, is_causal=True))


def turned(model: Decoder, x: Tensor) -> Tensor:
    """By its position among the tokens that it is given: it is the first, of one."""
    return model.head(x[:, -1:] + model.places(torch.ones_like(x[:, -1:, 0]).cumsum(1).long()))


def seeing_itself(model: Decoder, x: Tensor) -> Tensor:
    last = x[:, -1:]
    return model.head(F.scaled_dot_product_attention(last, last, last, is_causal=True))


OTHERS: dict[str, Head] = {
    "attention of itself": seeing_itself,
    "numbered among one": turned,
    "shifted": lambda model, x: model.head(x[:, -1:] - F.pad(x[:, -1:], (0, 0, 1, -1))),
    "added to all": lambda model, x: model.head(x + x[:, -1:])[:, -1:],
    "of all of them": lambda model, x: model.head((x * x[:, -1:]).sum(1, keepdim=True)),
    "attention": looking_back,
    "over heads": of_heads,
    "over tokens": lambda model, x: model.head(x[:, -1:].softmax(1)),
    "one row, the last but one": lambda model, x: model.head(x[:, -2]),
    "halves as rows": lambda model, x: model.head(x[:, -1:].view(2 * x.shape[0], WIDTH // 2).repeat(1, 2)),
    "squeezed, of values": lambda model, x: model.head(x[:, -1:].squeeze(1).softmax(1)),
    "squeezed, one of all": lambda model, x: model.head(x[:, :1].squeeze(1)),
    "one row of means": lambda model, x: model.head(x.mean(1)),
    "beside the first": lambda model, x: model.head(x[:, -1] + x[:, 0]).unsqueeze(1),
    "beside the number of tokens": lambda model, x: model.head(x[:, -1:] / x.shape[1]),
    "the last but one": lambda model, x: model.head(x[:, [-2]]),
    "the first": lambda model, x: model.head(x[:, :1]),
    "of values": lambda model, x: model.head(x[:, -1].softmax(-1).sort(1)[0].unsqueeze(1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_of_the_last_token_alone_is_refused(name: str) -> None:
    with pytest.raises(sc.RefusedError):
        step_program(LastAlone(OTHERS[name]))


@pytest.mark.parametrize("name", ["attention of itself", "numbered among one", "shifted"])
def test_a_padded_call_computes_what_is_of_one_token_as_the_model(name: str) -> None:
    model, ids = LastAlone(OTHERS[name]), torch.randint(0, VOCABULARY, (3, 11))
    with torch.no_grad():
        torch.testing.assert_close(fast(model)(ids), model(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["listed", "selected", "twice"])
def test_a_padded_call_gives_one_row_for_each_request(name: str) -> None:
    model = LastAlone(ALIKE[name])
    ids, mask = torch.randint(0, VOCABULARY, (3, 11)), torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4] = 0
    with torch.no_grad():
        ours, theirs = fast(model)(ids, mask), model(ids, mask)
    assert sc.selective.reports[-1].verdict == "ragged"
    assert ours.shape == theirs.shape == (3, 1, VOCABULARY)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["one row", "sliced, one row"])
def test_a_padded_call_gives_rows_without_a_dimension_of_tokens(name: str) -> None:
    model, ids = LastAlone(ALIKE[name]), torch.randint(0, VOCABULARY, (3, 11))
    with torch.no_grad():
        ours, theirs = fast(model)(ids), model(ids)
    assert ours.shape == theirs.shape == (3, VOCABULARY)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["listed", "one row"])
def test_an_engine_gives_the_tokens_that_the_model_steps_to(name: str) -> None:
    model = LastAlone(ALIKE[name])
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    assert engine.report.verdict == "ragged"
    with engine.running(), torch.no_grad():
        found = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS]
        for prompt, request in zip(PROMPTS, found, strict=True):
            tokens = list(prompt)
            for _ in range(6):
                tokens.append(int(model(torch.tensor([tokens])).flatten().argmax()))
            assert list(request.result().tokens) == tokens[len(prompt) :]
