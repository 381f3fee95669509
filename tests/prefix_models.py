"""Models of which the first tokens of a request see one another, as those of a prefix LM do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaModel
from transformers.masking_utils import create_causal_mask

from selective_compile.generate_states import CACHE
from tests.models import tiny


class Prefixed:
    """In front of a class of models: the first `prefix` positions are seen by all."""

    prefix = 0

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        seen = 0 if cache is None else cache.get_seq_length()
        mask = prefix_mask(input_ids, attention_mask, seen, self.prefix)
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input_ids, attention_mask=mask, **kwargs)


class PrefixModel(Prefixed, LlamaModel):
    """A Llama like that."""


class PrefixByFunction(PrefixModel):
    """The same by what transformers offers for it, a function of indices."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        embeds, prefix = self.embed_tokens(input_ids), self.prefix
        mask = create_causal_mask(
            self.config,
            embeds,
            attention_mask,
            kwargs.get(CACHE),
            position_ids,
            or_mask_function=lambda batch, head, query, key: key < prefix,
        )
        return LlamaModel.forward(
            self,
            input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            **kwargs,
        )


def prefix_mask(ids: Tensor, attention_mask: Tensor | None, seen: int, prefix: int) -> Tensor:
    """[B or 1, 1, S, seen + S] booleans."""
    places = torch.arange(seen + ids.shape[1])
    kept = ((places <= places[seen:, None]) | (places < prefix))[None, None]
    return kept if attention_mask is None else kept & (attention_mask != 0)[:, None, None, :]


def prefix_model(prefix: int, family: str = "llama", **changes: Any) -> Any:
    """A tiny model whose first `prefix` positions are seen by all."""
    model: Any = tiny(family, **changes)
    kind = type(model.model)
    model.model.__class__ = PrefixModel if kind is LlamaModel else type(kind.__name__, (Prefixed, kind), {})
    model.model.prefix = prefix
    return model
