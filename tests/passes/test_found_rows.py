"""Experts whose tokens are found by masks in any spelling, and asked about; those where tokens mix are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.passes.expert_loops import CHOSEN, EXPERTS, WEIGHTS, WIDTH, Experts, is_token_wise, masked, why_not

PRODUCTS = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]).requires_grad_(False)


def looked_up(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As Mixtral's code was in transformers 4.50: an index of one number, into a list of modules."""
    out, mask = torch.zeros_like(x), masked(chosen)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        places, rows = torch.where(mask[expert].squeeze(0))
        rows_out = PRODUCTS[expert](x[None, rows].reshape(-1, WIDTH)) * weights[rows, places, None]
        out.index_add_(0, rows, rows_out)
    return out


def added(
    *,
    skip: Callable[[Tensor, Tensor], Any] = lambda mask, rows: False,
    compute: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Experts:
    """As Mistral's own code is: added to the rows that were found."""

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, places = torch.where(chosen == expert)
            if skip(chosen == expert, rows):
                continue
            out[rows] += weights[rows, places, None] * compute(x[rows] @ WEIGHTS[expert])
        return out

    return experts


def written(
    *,
    of: Callable[[Tensor, int], Tensor] = lambda flat, expert: flat == expert,
    to: Callable[[Tensor, int], Tensor] = lambda flat, expert: flat == expert,
    compute: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Experts:
    """As DeepSeek's code for training is: each token once for each of its experts, by masks."""

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat, repeated = chosen.view(-1), x.repeat_interleave(CHOSEN, dim=0)
        out = torch.empty_like(repeated)
        for expert in range(EXPERTS):
            out[to(flat, expert)] = compute(repeated[of(flat, expert)] @ WEIGHTS[expert])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    return experts


def by_any_choice(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(dim=-1)
        if mask.any():
            weight = (weights * (chosen == expert)).sum(-1)[mask].unsqueeze(-1)
            out[mask] += (x[mask] @ WEIGHTS[expert]) * weight
    return out


def by_nonzero(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows = (chosen == expert).any(dim=-1).nonzero().squeeze(-1)
        if len(rows):
            out = out.index_add(0, rows, x[rows] @ WEIGHTS[expert])
    return out


INDEPENDENT = {
    "modules looked up": looked_up,
    "added to rows": added(),
    "no rows, by a length": added(skip=lambda mask, rows: len(rows) == 0),
    "no rows, by any": added(skip=lambda mask, rows: not mask.any()),
    "no rows, by any as a number": added(skip=lambda mask, rows: not torch.any(mask).item()),
    "no rows, by a sum": added(skip=lambda mask, rows: mask.sum() == 0),
    "no rows, by a sum as a number": added(skip=lambda mask, rows: not mask.sum().item() > 0),
    "no rows, by a whole number": added(skip=lambda mask, rows: int(mask.sum()) == 0),
    "no rows, by a count": added(skip=lambda mask, rows: torch.count_nonzero(mask) < 1),
    "written by masks": written(),
    "by any choice": by_any_choice,
    "by nonzero": by_nonzero,
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_found_rows_are_token_wise(name: str) -> None:
    assert why_not(INDEPENDENT[name]) is None
    assert is_token_wise(INDEPENDENT[name])


def added_by_lengths(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows, _ = torch.where(chosen == expert)
        out[rows] += x[rows] / max(len(rows), 1)
    return out


def skipping_by_another(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows, _ = torch.where(chosen == expert)
        if (chosen == (expert + 1) % EXPERTS).any():
            out[rows] += x[rows]
    return out


def scaled_by_a_sum(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return added()(x, chosen, weights) * (chosen == 0).sum()


def scaled_by_a_number(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return added()(x, chosen, weights) * (chosen == 0).sum().item()


def written_to_a_mask(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The mask that is computed first is no longer that which is computed again."""
    first = chosen[:, 0] == 0
    first.logical_or_(chosen[:, 1] == 0)
    return torch.zeros_like(x).masked_fill((chosen[:, 0] == 0)[:, None], 1.0) + first[:, None]


def written_to_one_of_two(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    first, second = chosen[:, 0] == 0, chosen[:, 0] == 0
    first.zero_()
    return x * second[:, None]


def to_rows_of_others(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows, _ = torch.where(chosen == 0)
    out = x.clone()
    out[rows] = x[: rows.shape[0]]
    return out


def to_one_choice(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What was found along the choices is no row."""
    out = torch.zeros_like(x)
    rows, places = torch.where(chosen == 0)
    out[places] = x[rows]
    return out


def asked_before_it_was_written(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mask = (chosen == 0).any(-1)
    some = mask.any()
    mask.logical_and_(x[:, 0] > 0)
    return x + 1 if some else x.index_add(0, torch.where(mask)[0], x[mask])


def in_chunks(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Of many tokens, all but the first thousand are left out."""
    out = torch.zeros_like(x)
    rows, _ = torch.where(chosen == 0)
    if len(rows) > 1000:
        rows = rows[:1000]
    out[rows] += x[rows]
    return out


LEAKING = {
    "divides by a length": (added_by_lengths, "another number of tokens"),
    "two tokens, by a length": (added(skip=lambda mask, rows: len(rows) == 2), "another number of tokens"),
    "one token, by a sum": (added(skip=lambda mask, rows: mask.sum() == 1), "cannot be traced"),
    "many tokens, by a length": (in_chunks, ""),
    "rows that another expert has": (skipping_by_another, ""),
    "times a sum": (scaled_by_a_sum, "combines values along dimension"),
    "times a number": (scaled_by_a_number, ""),
    "to rows of others": (to_rows_of_others, ""),
    "to one choice": (to_one_choice, ""),
    "asks before the mask is written": (asked_before_it_was_written, ""),
    "writes to one mask of two": (written_to_one_of_two, "writes to what it computes"),
    "writes rows in another order": (written(compute=lambda rows: rows.flip(0)), "combines values along dimension 0"),
    "writes the mean of rows": (written(compute=lambda rows: rows.mean(0, keepdim=True).expand_as(rows)), "combines"),
    "writes to another expert's rows": (written(to=lambda flat, expert: flat == (expert + 1) % EXPERTS), ""),
    "adds the mean of rows": (added(compute=lambda rows: rows - rows.mean(0)), "combines values along dimension 0"),
}


@pytest.mark.parametrize("name", LEAKING)
def test_found_rows_that_mix_are_refused(name: str) -> None:
    experts, part = LEAKING[name]
    reason = why_not(experts)
    assert reason is not None and part in reason


def test_a_mask_that_was_written_to_is_another() -> None:
    assert why_not(written_to_a_mask) is None
    assert is_token_wise(written_to_a_mask)
