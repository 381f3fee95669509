"""Tokens that choose an expert in any of their choices, which `topk` makes different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes.group_loops import Given
from selective_compile.passes.token_wise import why_not_token_wise
from tests.passes.expert_loops import CHOSEN, EXPERTS, TOKENS, WEIGHTS, WIDTH

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]  # scores [T, E] -> weights and experts, each [T, k]
Rows = Callable[[Tensor], Tensor]  # mask [T, k] -> numbers of tokens, or a mask of these


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, k=CHOSEN, dim=-1, sorted=False)


def of_three_dimensions(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores[None].topk(CHOSEN)
    return weights.view(-1, CHOSEN), chosen.view(-1, CHOSEN)


def by_numbers(mask: Tensor) -> Tensor:
    """As MiniMind."""
    return mask.any(dim=-1).nonzero().flatten()


def by_where(mask: Tensor) -> Tensor:
    return torch.where(mask.any(-1, keepdim=False))[0]


def experts_of(choose: Choose = best, rows_of: Rows = by_numbers, asks: Any = lambda mask: mask.any()) -> Any:
    def experts(x: Tensor, scores: Tensor) -> Tensor:
        weights, chosen = choose(scores)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = chosen == expert
            if asks(mask):
                rows = rows_of(mask)
                out.index_add_(0, rows, (x[rows] @ WEIGHTS[expert]) * weights[mask].view(-1, 1))
        return out

    return experts


def why_not(experts: Any) -> str | None:
    given = [Given(value=torch.randn(TOKENS, size), token_dim=0) for size in (WIDTH, EXPERTS)]
    return why_not_token_wise(lambda tensors: [experts(*tensors)], given, {0: 0})


def asked_of_rows(mask: Tensor) -> Any:
    return mask.any(-1).any()


@pytest.mark.parametrize("choose", [best, of_three_dimensions])
@pytest.mark.parametrize("rows_of", [by_numbers, by_where])
@pytest.mark.parametrize("asks", [lambda mask: mask.any(), asked_of_rows, lambda mask: mask.sum() > 0])
def test_they_are_the_tokens_of_the_choices(choose: Choose, rows_of: Rows, asks: Any) -> None:
    assert why_not(experts_of(choose, rows_of, asks)) is None


def masked_rows(x: Tensor, scores: Tensor) -> Tensor:
    weights, chosen = best(scores)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = chosen == expert
        rows = mask.any(-1)
        if rows.any():
            out[rows] += (x[rows] @ WEIGHTS[expert]) * weights[mask].unsqueeze(-1)
    return out


def test_of_a_mask_of_tokens_too() -> None:
    assert why_not(masked_rows) is None


def rounded(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of which several may be the same expert."""
    return scores[:, :CHOSEN], scores[:, :CHOSEN].long()


def best_of_tokens(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores[:CHOSEN].t().topk(CHOSEN, dim=0)
    return weights, chosen


def written_to(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = best(scores)
    chosen[:, 0] = 1
    return weights, chosen


def halved(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = best(scores)
    return weights, chosen // 2


def of_others(scores: Tensor) -> tuple[Tensor, Tensor]:
    """In rows that are put together of halves of two."""
    weights, chosen = scores.topk(2 * CHOSEN if EXPERTS >= 2 * CHOSEN else EXPERTS)
    return weights[:, :CHOSEN], chosen.flatten().view(-1, CHOSEN)[: scores.shape[0]]


@pytest.mark.parametrize("choose", [rounded, best_of_tokens, written_to, halved, of_others])
def test_others_may_be_chosen_twice(choose: Choose) -> None:
    assert why_not(experts_of(choose)) is not None


@pytest.mark.parametrize("rows_of", [lambda mask: mask.any(0).nonzero().flatten(), lambda mask: mask.all(-1).nonzero()])
def test_other_rows_are_not_those_of_the_choices(rows_of: Rows) -> None:
    assert why_not(experts_of(rows_of=rows_of)) is not None
