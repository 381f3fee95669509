"""How a model is called for its logits alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from selective_compile.model_call import without_cache


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
