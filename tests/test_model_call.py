"""How a model is called for its logits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from selective_compile.model_call import logits_of, without_cache
from selective_compile.passes.refusals import RefusedError
from tests.decoders import Decoder
from tests.exactness import TOLERANCE, logits_in_chunks, step_program


def test_a_call_without_a_cache_is_asked_for_where_a_part_of_the_model_would_make_one() -> None:
    """As in MossTranscribeDiarize, which hands ``use_cache`` on in its **kwargs, for the configuration of its text."""

    class Inner(PreTrainedConfig):
        use_cache = True

    class Outer(PreTrainedConfig):
        sub_configs = {"text_config": Inner}

        def __init__(self) -> None:
            self.text_config = Inner()
            super().__init__()

    class HandsOn(nn.Module):
        config = Outer()

        def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
            return input_ids

    class TakesNone(HandsOn):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    assert without_cache(HandsOn()) == {"use_cache": False}
    assert without_cache(TakesNone()) == {}


@pytest.mark.parametrize("kind", ["tensor", "first of two", "loss first", "dictionary", "object"])
def test_logits_are_found_by_name_or_as_the_first_of_several(kind: str) -> None:
    logits = torch.zeros(1, 3, 7)
    results: dict[str, Any] = {
        "tensor": logits,
        "first of two": (logits, None),
        "loss first": (None, logits),
        "dictionary": {"loss": None, "logits": logits},
        "object": CausalLMOutput(logits=logits),
    }
    assert logits_of(results[kind]) is logits


@pytest.mark.parametrize("result", [None, (None, None), {"scores": torch.zeros(1)}, "text"])
def test_a_result_without_logits_says_so(result: Any) -> None:
    with pytest.raises(TypeError, match="a forward must give logits: a tensor, .* got"):
        logits_of(result)


class Named(Decoder):
    """Gives its logits under a name, behind a loss that it has none of."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return {"loss": None, "logits": super().forward(input_ids, attention_mask)}


def test_a_model_may_return_a_dictionary() -> None:
    torch.manual_seed(0)
    prompts = [[5, 3, 9], [1, 2]]
    found = logits_in_chunks(step_program(Named(layers=1)), prompts, 2)
    plain = Decoder(layers=1)
    for prompt, ours in zip(prompts, found, strict=True):
        torch.testing.assert_close(ours, plain(torch.tensor([prompt]))[0], atol=TOLERANCE, rtol=0)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "as it is": ((1, 3, 7), (1, 3, 7)),
    "no dimension of requests": ((3, 7), (1, 3, 7)),
    "no dimension of tokens": ((1, 7), (1, 1, 7)),
    "neither": ((7,), (7,)),
}


@pytest.mark.parametrize("given, read", SHAPES.values(), ids=SHAPES)
def test_rows_of_logits_are_those_of_the_one_request(given: tuple[int, ...], read: tuple[int, ...]) -> None:
    assert logits_of(torch.zeros(given)).shape == read


class Rows(Decoder):
    """Gives rows of logits, one for each token of its one request; those of a prompt of one token times ``alone``."""

    def __init__(self, alone: float) -> None:
        super().__init__(layers=1)
        self.alone = alone

    def forward(self, input_ids: Tensor) -> Any:
        rows = super().forward(input_ids)[0]
        return rows * self.alone if input_ids.shape[1] == 1 else rows


def test_rows_are_ragged() -> None:
    model, prompts = Rows(alone=1.0), [[5, 3, 9], [1]]
    for prompt, ours in zip(prompts, logits_in_chunks(step_program(model), prompts, 2), strict=True):
        torch.testing.assert_close(ours, model(torch.tensor([prompt])), atol=TOLERANCE, rtol=0)


def test_rows_of_one_token_that_are_others_are_seen() -> None:
    """They were compared as if the first row were a request, which has no spread to compare with."""
    with pytest.raises(RefusedError, match="of a prompt of one token"):
        step_program(Rows(alone=3.0))
