"""Experts whose rows are sorted, and sliced at sizes that the host reads; those where tokens mix are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes.group_loops import Given
from selective_compile.passes.token_wise import why_not_token_wise
from tests.passes.expert_loops import CHOSEN, EXPERTS, TOKENS, WEIGHTS, WIDTH, chosen_of

Experts = Callable[[Tensor], Tensor]


def expert(rows: Tensor, group: int) -> Tensor:
    return rows @ WEIGHTS[group]


def marked(chosen: Tensor) -> Tensor:
    marks = chosen.new_zeros((chosen.shape[0], EXPERTS))
    marks.scatter_(1, chosen, 1)
    return marks.sum(dim=0)


def put_back(
    counts: Callable[[Tensor], Any] = lambda chosen: marked(chosen).cpu().numpy(),
    *,
    order: Callable[[Tensor], Tensor] = lambda chosen: chosen.view(-1).argsort(),
    compute: Callable[[Tensor, int], Tensor] = expert,
    skip: Callable[[Any], bool] = lambda count: bool(count == 0),
    to: Callable[[Tensor], Tensor] = lambda order: order,
) -> Experts:
    """As DeepSeek's code for inference is."""

    def experts(x: Tensor) -> Tensor:
        weights, chosen = chosen_of(x)
        ordered = order(chosen)
        rows, parts, start = x[ordered // CHOSEN], [], 0
        for group, count in enumerate(counts(chosen)):
            end = start + count
            if skip(count):
                continue
            parts.append(compute(rows[start:end], group))
            start = end
        results = torch.cat(parts, dim=0) if len(parts) else rows.new_empty(0)
        back = torch.empty_like(results)
        back[to(ordered)] = results
        return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    return experts


def scattered(minlength: int = 0) -> Experts:
    """As DeepSeek's code of its first mixture is: bounds of groups, of which the last may be left out."""

    def experts(x: Tensor) -> Tensor:
        weights, chosen = chosen_of(x)
        flat, flat_weights, out = chosen.view(-1), weights.view(-1, 1), torch.zeros_like(x)
        ordered = flat.argsort()
        ends = flat.bincount(minlength=minlength).cpu().numpy().cumsum(0)
        tokens = ordered // CHOSEN
        for group, end in enumerate(ends):
            start = 0 if group == 0 else ends[group - 1]
            if start == end:
                continue
            rows = tokens[start:end]
            results = expert(x[rows], group)
            results.mul_(flat_weights[ordered[start:end]])
            out.scatter_reduce_(0, rows.view(-1, 1).repeat(1, WIDTH), results, reduce="sum")
        return out

    return experts


def split(x: Tensor) -> Tensor:
    weights, chosen = chosen_of(x)
    flat = chosen.flatten()
    ordered = flat.sort(0)[1]
    rows = ordered.div(CHOSEN, rounding_mode="trunc")
    sizes = torch.nn.functional.one_hot(flat, EXPERTS).sum(0).tolist()
    parts = [expert(part, group) for group, part in enumerate(x[rows].split(sizes, dim=0))]
    return torch.zeros_like(x).index_add(0, rows, torch.cat(parts) * weights.flatten()[ordered][:, None])


def asked(count: Callable[[Tensor], Any], skip: Callable[[Any, int], Any]) -> Experts:
    """As DeepSeek's third code for inference is: sizes say alone which experts are left out."""

    def experts(x: Tensor) -> Tensor:
        weights, chosen = chosen_of(x)
        out, counts = torch.zeros_like(x), count(chosen)
        for group in range(EXPERTS):
            if skip(counts, group):
                continue
            rows, places = torch.where(chosen == group)
            out[rows] += expert(x[rows], group) * weights[rows, places, None]
        return out

    return experts


def bincounts(chosen: Tensor) -> Any:
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


INDEPENDENT = {
    "put back": put_back(),
    "put back, by a list": put_back(lambda chosen: marked(chosen).tolist()),
    "put back, by counts": put_back(lambda chosen: bincounts(chosen).tolist()),
    "put back, by counts up to the largest": put_back(lambda chosen: chosen.view(-1).bincount().tolist()),
    "put back, whether any or none": put_back(skip=lambda count: False),
    "scattered": scattered(),
    "scattered, all bounds": scattered(EXPERTS),
    "split": split,
    "asked": asked(lambda chosen: bincounts(chosen).tolist(), lambda counts, group: counts[group] == 0),
    "asked one by one": asked(bincounts, lambda counts, group: counts[group].item() < 1),
}


def why_not(experts: Experts) -> str | None:
    x = torch.randn(TOKENS, WIDTH)
    return why_not_token_wise(lambda tensors: [experts(*tensors)], [Given(value=x, token_dim=0)], {0: 0})


@pytest.mark.parametrize("name", INDEPENDENT)
def test_groups_of_rows_are_token_wise(name: str) -> None:
    experts, x = INDEPENDENT[name], torch.randn(TOKENS, WIDTH)
    assert why_not(experts) is None
    alone = torch.cat([experts(x[[token]]) for token in range(TOKENS)])
    assert torch.allclose(experts(x), alone, atol=1e-5)


def divided(counts: Any, group: int) -> bool:
    return bool(counts[group] < 2)


def scaled_by_counts(x: Tensor) -> Tensor:
    _, chosen = chosen_of(x)
    return put_back()(x) * bincounts(chosen).tolist()[0]


def with_room(x: Tensor) -> Tensor:
    """Each expert has room for so many tokens."""
    _, chosen = chosen_of(x)
    out, ordered, start = torch.zeros_like(x), chosen.view(-1).argsort(), 0
    for group, count in enumerate(bincounts(chosen).tolist()):
        rows = (ordered // CHOSEN)[start : start + min(count, 2)]
        out.index_add_(0, rows, expert(x[rows], group))
        start = start + count
    return out


def of_another_choice(x: Tensor) -> Tensor:
    """Rows in the order of one choice, and sizes of the other."""
    _, chosen = chosen_of(x)
    out, start = torch.zeros_like(x), 0
    ordered = chosen[:, 0].argsort()
    for group, count in enumerate(torch.bincount(chosen[:, 1], minlength=EXPERTS).tolist()):
        rows = ordered[start : start + count]
        out.index_add_(0, rows, expert(x[rows], group))
        start = start + count
    return out


def read_again(x: Tensor) -> Tensor:
    """What is read a second time is what was written meanwhile."""
    _, chosen = chosen_of(x)
    counts = bincounts(chosen)
    counts.tolist()
    counts.clamp_(max=2)
    out, ordered, start = torch.zeros_like(x), chosen.view(-1).argsort(), 0
    for group, count in enumerate(counts.tolist()):
        rows = (ordered // CHOSEN)[start : start + count]
        out.index_add_(0, rows, expert(x[rows], group))
        start = start + count
    return out


def by_rounds(x: Tensor) -> Tensor:
    _, chosen = chosen_of(x)
    return put_back()(x) / len(chosen.view(-1).bincount().tolist())


def skips_another(counts: Any, group: int) -> bool:
    return bool(counts[group - 1] == 0)


def mean_of_rows(rows: Tensor, group: int) -> Tensor:
    return expert(rows, group) - rows.mean(0, keepdim=True)


LEAKING = {
    "the mean of a group": (put_back(compute=mean_of_rows), "combines values along dimension 0"),
    "rows of a group in another order": (put_back(compute=lambda rows, _: rows.flip(0)), "along dimension 0"),
    "left out with few tokens": (put_back(skip=lambda count: bool(count < 2)), "cannot be traced"),
    "asks for few": (asked(bincounts, divided), "cannot be traced"),
    "left out where another has none": (
        asked(lambda chosen: bincounts(chosen).tolist(), skips_another),
        "where other groups have none",
    ),
    "sorted from the last": (put_back(order=lambda chosen: chosen.view(-1).argsort(descending=True)), ""),
    "not put back": (put_back(to=lambda order: torch.arange(order.shape[0])), ""),
    "put back elsewhere": (put_back(to=lambda order: (order + 1) % order.shape[0]), ""),
    "scaled by a size": (scaled_by_counts, ""),
    "with room for few": (with_room, ""),
    "sizes that were written since": (read_again, ""),
    "sizes of another choice": (of_another_choice, ""),
    "counts the sizes": (by_rounds, ""),
}


@pytest.mark.parametrize("name", LEAKING)
def test_groups_of_rows_that_mix_are_refused(name: str) -> None:
    experts, part = LEAKING[name]
    reason = why_not(experts)
    assert reason is not None and part in reason
