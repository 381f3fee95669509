"""What a padded call returns: logits of other shapes and of other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import (
    VOCABULARY,
    Decoder,
)
from tests.exactness import TOLERANCE, engine_error, fast, greatest
from tests.models import tiny
from tests.padded_calls import IDS, MASK, REAL, difference


class Bigram(nn.Module):
    """A decoder without attention: the logits depend on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.tokens(ids))


class Shaped(nn.Module):
    """A decoder whose logits leave it in another shape."""

    def __init__(self, decoder: nn.Module, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.decoder, self.shape = decoder, shape
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.shape(self.decoder(input_ids, attention_mask))


SHAPES: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "rows merged": (lambda x: x.reshape(-1, x.shape[-1]), True),
    "tokens first": (lambda x: x.transpose(0, 1), True),
    "tokens last": (lambda x: x.transpose(1, 2), True),
    "rows merged tokens first": (lambda x: x.transpose(0, 1).reshape(-1, x.shape[-1]), False),
    "tokens and features merged": (lambda x: x.flatten(1), False),
    "requests and features merged": (lambda x: x.permute(0, 2, 1).flatten(0, 1), False),
    "half of the vocabulary": (lambda x: x[..., :50], True),
    "from the third token": (lambda x: x[:, 2:], True),
    "with the positions": (lambda x: (x, torch.arange(x.shape[1])), False),
    "with the sizes": (lambda x: (x, x.shape[1], 7), True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_of_other_shapes(name: str) -> None:
    """Without padding, so that every element is to be compared."""
    shape, rewritten = SHAPES[name]
    model = Shaped(Bigram(), shape)
    compiled = fast(model)
    with torch.no_grad():
        ours, theirs = compiled(IDS), model(IDS)
    if isinstance(theirs, tuple):
        assert [int(a) if isinstance(a, int) else a.tolist() for a in ours[1:]] == [
            int(b) if isinstance(b, int) else b.tolist() for b in theirs[1:]
        ]
        ours, theirs = ours[0], theirs[0]
    assert ours.shape == theirs.shape
    assert greatest(ours - theirs) < TOLERANCE
    assert sc.selective.reports[-1].ok == rewritten, sc.selective.reports[-1]


def test_engine_samples_from_the_vocabulary_that_the_model_returns() -> None:
    model = Shaped(Decoder(layers=1), SHAPES["half of the vocabulary"][0])
    assert engine_error(model, vocabulary=50) < TOLERANCE


def test_engine_refuses_logits_without_the_last_token() -> None:
    with pytest.raises(sc.RefusedError, match="cuts off the logits of the last token"):
        engine_error(Shaped(Bigram(), lambda x: x[:, :-1]), vocabulary=VOCABULARY)


def test_engine_serves_a_model_without_attention() -> None:
    assert engine_error(Bigram().eval(), vocabulary=VOCABULARY) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.bfloat16, "sdpa"), (torch.bfloat16, "eager"), (torch.float16, "eager")]
)
def test_half_precision(dtype: torch.dtype, attention: str) -> None:
    """No further from the float32 model than the model's own rounding."""
    exact, model = (tiny("llama", attention=attention, num_hidden_layers=1) for _ in range(2))
    compiled = fast(model.to(dtype))
    with torch.no_grad():
        right = exact(IDS, attention_mask=MASK, use_cache=False).logits[REAL]
        ours, theirs = (f(IDS, attention_mask=MASK, use_cache=False).logits[REAL].float() for f in (compiled, model))
    assert sc.selective.reports[-1].ok, sc.selective.reports[-1]
    assert float((ours - right).norm()) <= 1.1 * float((theirs - right).norm())


def test_double_precision_runs_as_it_came() -> None:
    model = tiny("llama", num_hidden_layers=1).double()
    assert difference(model, (IDS, {"attention_mask": MASK, "use_cache": False})) < 1e-12
    assert not sc.selective.reports[-1].ok
