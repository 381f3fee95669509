"""Mixtures of experts as functions, each with tokens that choose experts, for the proofs of `token_wise`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selective_compile.passes.group_loops import Given
from selective_compile.passes.token_wise import why_not_token_wise

TOKENS, WIDTH, EXPERTS, CHOSEN = 7, 4, 3, 2
WEIGHTS = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
GATE = torch.randn(WIDTH, EXPERTS, generator=torch.Generator().manual_seed(1))
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def given() -> list[Given]:
    return [
        Given(value=torch.randn(TOKENS, WIDTH), token_dim=0),
        Given(value=torch.randint(0, EXPERTS, (TOKENS, CHOSEN)), token_dim=0),
        Given(value=torch.rand(TOKENS, CHOSEN), token_dim=0),
    ]


def chosen_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts ``[T, k]``."""
    return torch.topk((x @ GATE).softmax(-1), CHOSEN, dim=-1)


def why_not(experts: Experts) -> str | None:
    return why_not_token_wise(lambda tensors: [experts(*tensors)], given(), {0: 0})


def masked(chosen: Tensor, classes: int = EXPERTS) -> Tensor:
    """``[E, k, T]``"""
    return torch.nn.functional.one_hot(chosen, classes).permute(2, 1, 0)


def is_token_wise(experts: Experts) -> bool:
    """Whether each token alone gives what it gives among others."""
    x, chosen, weights = (one.value for one in given())
    alone = [experts(x[[t]], chosen[[t]], weights[[t]]) for t in range(TOKENS)]
    return torch.allclose(experts(x, chosen, weights), torch.cat(alone), atol=1e-5)
