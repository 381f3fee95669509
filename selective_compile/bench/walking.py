"""A model whose next token is known: it walks along cycles of token ids, at the price of a forward like any other."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

CYCLE = 48


def cycles(vocabulary: int) -> int:
    """How many token ids, the lowest ones, are in cycles of `CYCLE`; those above are in one."""
    return vocabulary // 2 // CYCLE * CYCLE


def following(vocabulary: int) -> Tensor:
    """What comes after each token [V]: the next of its cycle."""
    half = cycles(vocabulary)
    ids = torch.arange(vocabulary, device="cpu")
    lower = ids // CYCLE * CYCLE + (ids + 1) % CYCLE
    upper = half + (ids - half + 1) % (vocabulary - half)
    return torch.where(ids < half, lower, upper)


def walking(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, changed so that the next token is the one that follows the last, whatever came before.

    Embeddings become large beside what the layers add, and the LM head's row of each token the embedding of the one
    that it follows: the likeliest token is so by far.
    """
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(1)
        table.copy_(torch.randn(table.shape, generator=generator, dtype=torch.float32, device="cpu") * 10)
        model.get_output_embeddings().weight[following(len(table))] = table
    return model
