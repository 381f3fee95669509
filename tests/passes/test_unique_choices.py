"""Loops over the experts that `unique` finds among what tokens chose; those where tokens mix are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes.group_loops import Given
from selective_compile.passes.token_wise import why_not_token_wise
from tests.passes.expert_loops import EXPERTS, GATE, TOKENS, WEIGHTS, WIDTH, chosen_of

Experts = Callable[[Tensor], Tensor]
Loop = Callable[[Tensor], Any]


def looping(
    groups: Loop,
    compute: Callable[[Tensor, int], Tensor] = lambda rows, group: rows @ WEIGHTS[group],
    ready: Callable[[Tensor], Any] = lambda chosen: None,
) -> Experts:
    def experts(x: Tensor) -> Tensor:
        weights, chosen = chosen_of(x)
        out = torch.zeros_like(x)
        ready(chosen)
        for group in groups(chosen):
            rows, places = torch.where(chosen == group)
            out[rows] += compute(x[rows], int(group)) * weights[rows, places, None]
        return out

    return experts


def gathered(x: Tensor) -> Tensor:
    """As courses write it: whatever may be asked is asked, and a token's weight is gathered."""
    weights, chosen = chosen_of(x)
    out = torch.zeros_like(x)
    for group in torch.unique(chosen):
        number = int(group.item())
        mask = chosen == number
        if not mask.any():
            continue
        rows = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
        if rows.numel() == 0:
            continue
        place = mask[rows].int().argmax(dim=-1, keepdim=True)
        given = torch.gather(weights.index_select(0, rows), dim=-1, index=place)
        out.index_add_(0, rows, x.index_select(0, rows) @ WEIGHTS[number] * given)
    return out


def one_each(x: Tensor) -> Tensor:
    weights, chosen = (x @ GATE).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for group in chosen.unique().cpu().numpy():
        mask = chosen == int(group)
        out[mask] = (x[mask] @ WEIGHTS[int(group)]) * weights[mask].unsqueeze(-1)
    return out


INDEPENDENT = {
    "torch.unique": looping(torch.unique),
    "a method": looping(lambda chosen: chosen.unique()),
    "unsorted": looping(lambda chosen: chosen.unique(sorted=False)),
    "a list": looping(lambda chosen: chosen.unique().tolist()),
    "of one row": looping(lambda chosen: torch.unique(chosen.flatten())),
    "of another type": looping(lambda chosen: torch.unique(chosen).int().tolist()),
    "gathered": gathered,
    "one each": one_each,
}


def first_alone(chosen: Tensor) -> Any:
    return chosen.unique().tolist()[:1]


def by_rank(x: Tensor) -> Tensor:
    """The factor of an expert is how many others with a smaller number were chosen."""
    weights, chosen = chosen_of(x)
    out = torch.zeros_like(x)
    for rank, group in enumerate(torch.unique(chosen)):
        rows, places = torch.where(chosen == group)
        out[rows] += (x[rows] @ WEIGHTS[int(group)]) * weights[rows, places, None] * (rank + 1)
    return out


def by_count(x: Tensor) -> Tensor:
    _, chosen = chosen_of(x)
    return looping(torch.unique)(x) / len(chosen.unique())


def copied_before(x: Tensor) -> Tensor:
    """Whether a group has a round is said by other numbers than those of which it finds its tokens."""
    weights, chosen = chosen_of(x)
    out, flat = torch.zeros_like(x), chosen.t().reshape(-1)
    chosen.copy_(chosen.flip(1) * 0)
    for group in torch.unique(flat):
        rows, places = torch.where(chosen == group)
        out[rows] += (x[rows] @ WEIGHTS[int(group)]) * weights[rows, places, None]
    return out


def counted_on(x: Tensor) -> Tensor:
    """A group's tokens are those of the next one."""
    weights, chosen = chosen_of(x)
    out = torch.zeros_like(x)
    for group in torch.unique(chosen):
        group.remainder_(EXPERTS - 1).add_(1)
        rows, places = torch.where(chosen == group)
        out[rows] += (x[rows] @ WEIGHTS[0]) * weights[rows, places, None]
    return out


def of_rows(x: Tensor) -> Tensor:
    """A token's own choices are compared with those of each kind of token that there is."""
    weights, chosen = chosen_of(x)
    out = torch.zeros_like(x)
    for row in torch.unique(chosen, dim=0):
        rows, places = torch.where(chosen == row)
        out[rows] += (x[rows] @ WEIGHTS[0]) * weights[rows, places, None]
    return out


def counted_on_before(chosen: Tensor) -> Any:
    return torch.unique(chosen).remainder_(EXPERTS - 1).add_(1)


def copy_counted_on(chosen: Tensor) -> Any:
    return torch.unique(chosen).clone().mul_(0).add_(1)


MIXING = {
    "counted on before": looping(counted_on_before),
    "a copy counted on": looping(copy_counted_on),
    "rows": of_rows,
    "copied before": copied_before,
    "counted on": counted_on,
    "as truth": looping(lambda chosen: chosen.unique().to(torch.bool)),
    "of truth": looping(lambda chosen: chosen.to(torch.bool).unique()),
    "the mean of an expert's tokens": looping(torch.unique, lambda rows, group: rows - rows.mean(0)),
    "by rank": by_rank,
    "by how many": by_count,
    "the first alone": looping(first_alone),
    "of numbers that were shifted": looping(torch.unique, ready=lambda chosen: chosen.add_(1)),
    "counts": looping(lambda chosen: torch.unique(chosen, return_counts=True)[1]),
    "of rows": looping(lambda chosen: torch.unique(chosen, dim=0)[:, 0]),
    "other numbers": looping(lambda chosen: torch.unique(chosen * 2)),
}


def why_not(experts: Experts) -> str | None:
    x = torch.randn(TOKENS, WIDTH)
    return why_not_token_wise(lambda tensors: [experts(*tensors)], [Given(value=x, token_dim=0)], {0: 0})


@pytest.mark.parametrize("name", INDEPENDENT)
def test_groups_that_were_chosen_are_token_wise(name: str) -> None:
    experts, x = INDEPENDENT[name], torch.randn(TOKENS, WIDTH)
    assert why_not(experts) is None
    alone = torch.cat([experts(x[[token]]) for token in range(TOKENS)])
    assert torch.allclose(experts(x), alone, atol=1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_what_tells_more_than_which_group_is_refused(name: str) -> None:
    assert why_not(MIXING[name])
