"""How a model is called for its logits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from selective_compile.model_call import logits_of, without_cache
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
