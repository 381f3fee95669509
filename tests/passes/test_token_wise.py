"""Expert loops that depend on the data: proved token-wise by their own Python, and refused where tokens mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selective_compile.passes.group_loops import Given
from selective_compile.passes.group_proof import left_out_in_turn
from selective_compile.passes.token_wise import why_not_token_wise
from tests.passes.expert_loops import (
    CHOSEN,
    EXPERTS,
    TOKENS,
    WEIGHTS,
    WIDTH,
    Experts,
    given,
    is_token_wise,
    masked,
    why_not,
)


def loop(
    *,
    hits: Callable[[Tensor], Tensor] = lambda mask: (mask.sum(dim=(-1, -2)) > 0).nonzero(),
    number: Callable[[Tensor], Any] = lambda expert: expert[0],
    compute: Callable[[Tensor, Any], Tensor] = lambda rows, expert: rows @ WEIGHTS[expert],
    weigh: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda weights, rows, places: weights[rows, places, None],
    skip: Callable[[Tensor], bool] = lambda rows: False,
    target: Callable[[Tensor], Tensor] = lambda rows: rows,
    finish: Callable[[Tensor, int], Tensor] = lambda out, rounds: out,
    classes: int = EXPERTS,
) -> Experts:
    """The loop of a mixture of experts, with parts that can be exchanged."""

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out, mask, rounds = torch.zeros_like(x), masked(chosen, classes), 0
        for found in hits(mask):
            expert = number(found)
            places, rows = torch.where(mask[expert])
            rounds += 1
            if skip(rows):
                continue
            out.index_add_(0, target(rows), compute(x[rows], expert) * weigh(weights, rows, places))
        return finish(out, rounds)

    return experts


def over_all_experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), masked(chosen)
    for expert in range(EXPERTS):
        places, rows = torch.where(mask[expert])
        out = out.index_add(0, rows, (x[rows] @ WEIGHTS[expert]) * weights[rows, places][:, None])
    return out


def over_experts_with_tokens(skip: Callable[[Tensor], bool] = lambda rows: rows.shape[0] == 0) -> Experts:
    """As Mixtral's code was, with experts left out that no token chose."""

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), masked(chosen)
        for expert in range(EXPERTS):
            places, rows = torch.where(mask[expert])
            if skip(rows):
                continue
            out.index_add_(0, rows, (x[None, rows].reshape(-1, WIDTH) @ WEIGHTS[expert]) * weights[rows, places, None])
        return out

    return experts


def counting_experts_with_tokens(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, mask, rounds = torch.zeros_like(x), masked(chosen), 0
    for expert in range(EXPERTS):
        _, rows = torch.where(mask[expert])
        if rows.shape[0] > 0:
            rounds += 1
            out.index_add_(0, rows, x[rows] @ WEIGHTS[expert])
    return out / max(rounds, 1)


def skipping_by_another(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The rows of one expert are left out where another has none."""
    out, mask = torch.zeros_like(x), masked(chosen)
    found = [torch.where(mask[expert])[1] for expert in range(EXPERTS)]
    for expert, rows in enumerate(found):
        if found[expert - 1].shape[0] == 0:
            continue
        out.index_add_(0, rows, x[rows] @ WEIGHTS[expert])
    return out


def with_one_if_nothing_is_found(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    rows = torch.where(masked(chosen)[0])[1]
    return x + 1 if rows.shape[0] == 0 else x.index_add(0, rows, x[rows])


def asked_of_large_values(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What is found is no group of the tokens that are added to."""
    large = x.flatten().nonzero()
    return x if large.shape[0] == 0 else x * 2


def shortcut_of_one(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Without weights where all tokens chose one expert."""
    mask = masked(chosen)
    found = [torch.where(mask[expert]) for expert in range(EXPERTS)]
    active = [expert for expert, (_, rows) in enumerate(found) if rows.shape[0] > 0]
    if len(active) == 1:
        return x @ WEIGHTS[active[0]]
    return over_experts_with_tokens()(x, chosen, weights)


def doubled_after_one_round(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, rounds = torch.zeros_like(x), 0
    for expert in (masked(chosen).sum(dim=(-1, -2)) > 0).nonzero():
        places, rows = torch.where(masked(chosen)[expert[0]])
        out.index_add_(0, rows, x[rows] * weights[rows, places, None])
        rounds += 1
    return out * 2 if rounds == 1 else out


def written_where_one_is_empty(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, empty = over_experts_with_tokens()(x, chosen, weights), False
    for expert in range(EXPERTS):
        empty = empty or torch.where(masked(chosen)[expert])[1].shape[0] == 0
    if empty:
        x.zero_()
    return out


def attention_of_all(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def attention_of_a_group(rows: Tensor, expert: Any) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(rows[None], rows[None], rows[None], is_causal=True)[0]


def norm(rows: Tensor, expert: Any) -> Tensor:
    return torch.nn.functional.layer_norm(rows @ WEIGHTS[expert], (WIDTH,)).softmax(-1)


def by_number(rows: Tensor, expert: int) -> Tensor:
    return rows if expert >= 2 else rows @ WEIGHTS[expert]


INDEPENDENT = {
    "hit experts": loop(),
    "every expert": over_all_experts,
    "every expert that has tokens": over_experts_with_tokens(),
    "every expert with a number of tokens": over_experts_with_tokens(lambda rows: not rows.numel()),
    "any in place of a sum": loop(hits=lambda mask: torch.any(mask.bool(), dim=(1, 2)).nonzero()),
    "not zero": loop(hits=lambda mask: mask.sum(dim=(1, 2)).ne(0).nonzero()),
    "the number read": loop(number=lambda expert: int(expert.item()), compute=by_number),
    "norm of each row": loop(compute=norm),
    "skips nothing found": loop(skip=lambda rows: rows.numel() == 0),
    "skips no rows": loop(skip=lambda rows: not rows.shape[0] > 0),
    "a class of no expert": loop(classes=EXPERTS + 1),
    "sums by a constant": loop(finish=lambda out, rounds: out / EXPERTS),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_loop_over_experts_is_token_wise(name: str) -> None:
    assert why_not(INDEPENDENT[name]) is None


def test_what_is_known_of_a_loop_is_so() -> None:
    for name, experts in INDEPENDENT.items():
        assert is_token_wise(experts), name


def mean_of_rows(rows: Tensor, expert: Any) -> Tensor:
    return rows @ WEIGHTS[expert] - rows.mean(0, keepdim=True)


def counted(rows: Tensor, expert: Any) -> Tensor:
    return rows @ WEIGHTS[expert] / rows.shape[0]


def next_rows(rows: Tensor) -> Tensor:
    return (rows + 1) % TOKENS


def added_when_empty(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), masked(chosen)
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        for choice in range(CHOSEN):
            (rows,) = torch.where(mask[expert[0], choice])
            if rows.numel() == 0:
                out = out + 1
                continue
            out = out.index_add(0, rows, x[rows])
    return out


def another_mask(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Goes over the experts that the first choices hit, and adds for both."""
    out, mask = torch.zeros_like(x), masked(chosen)
    first = masked(chosen[:, :1])
    for expert in (first.sum(dim=(-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[expert[0]])
        out = out.index_add(0, rows, x[rows])
    return out


def another_test(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Skips both choices of an expert where nobody's first choice is it."""
    out, mask = torch.zeros_like(x), masked(chosen)
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        (first,) = torch.where(mask[expert[0], 0])
        _, rows = torch.where(mask[expert[0]])
        if first.numel() == 0:
            continue
        out = out.index_add(0, rows, x[rows])
    return out


def carried(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What is added for an expert depends on how many rounds there were before."""
    out, mask, scale = torch.zeros_like(x), masked(chosen), 1.0
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[expert[0]])
        out = out.index_add(0, rows, x[rows] * scale)
        scale = scale / 2
    return out


def first_differs(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out, mask = None, masked(chosen)
    for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
        _, rows = torch.where(mask[expert[0]])
        before = torch.ones_like(x) if out is None else out
        out = before.index_add(0, rows, x[rows]) if out is None else before.index_add(0, rows, -x[rows])
    return torch.zeros_like(x) if out is None else out


def few_rounds(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Has no scale for as many rounds as there are experts."""
    out, mask, scales = torch.zeros_like(x), masked(chosen), [1.0] * (EXPERTS - 1)
    for rounds, expert in enumerate((mask.sum(dim=(-1, -2)) > 0).nonzero()):
        _, rows = torch.where(mask[expert[0]])
        out = out.index_add(0, rows, x[rows] * scales[rounds])
    return out


def numbered_tokens(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return loop()(x, chosen, weights) * torch.arange(x.shape[0])[:, None]


def mixed_before(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return loop()(x.cumsum(0), chosen, weights)


def written_back(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    out = loop()(x, chosen, weights)
    x.add_(1)
    return out


def rows_in_order(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The rows that were found, as they are: the first tokens get those of others."""
    _, rows = torch.where(masked(chosen)[0])
    return torch.cat([x[rows], x])[: x.shape[0]]


LEAKING = {
    "normalises over the rows": (loop(compute=mean_of_rows), "combines values along dimension 0"),
    "sums up over the rows": (loop(compute=lambda rows, _: rows.cumsum(0)), "combines values along dimension 0"),
    "the rows in another order": (loop(compute=lambda rows, _: rows.flip(0)), "combines values along dimension 0"),
    "softmax over the rows": (loop(compute=lambda rows, _: rows.softmax(0)), "combines values along dimension 0"),
    "rows times rows": (loop(compute=lambda rows, _: rows @ rows.T @ rows), ""),
    "divides by how many": (loop(compute=counted), "number of tokens"),
    "adds at other rows": (loop(target=next_rows), "numbers by which tokens are reordered"),
    "adds in another order": (loop(target=lambda rows: rows.flip(0)), ""),
    "adds at the choice": (loop(weigh=lambda w, rows, places: w[places, 0, None]), "not the token's own"),
    "weighs by the row's number": (loop(weigh=lambda w, rows, _: rows[:, None]), "reordered"),
    "only experts that several tokens chose": (
        loop(hits=lambda mask: (mask.sum(dim=(-1, -2)) > 1).nonzero()),
        "other groups than those that some token chose",
    ),
    "experts that nobody chose": (loop(hits=lambda mask: (mask.sum(dim=(-1, -2)) == 0).nonzero()), "other groups"),
    "experts by a sum with signs": (loop(hits=lambda mask: ((mask * 2 - 1).sum(dim=(-1, -2)) > 0).nonzero()), "other"),
    "experts by a sum of few bits": (
        loop(hits=lambda mask: (mask.sum(dim=(-1, -2), dtype=torch.int8) > 0).nonzero()),
        "other groups",
    ),
    "skips experts with few tokens": (loop(skip=lambda rows: rows.numel() < 2), "cannot be traced"),
    "skips experts with two tokens": (loop(skip=lambda rows: rows.shape[0] == 2), "cannot be traced"),
    "counts the rounds": (loop(finish=lambda out, rounds: out / max(rounds, 1)), "where other groups have none"),
    "counts the hits": (lambda x, c, w: loop()(x, c, w) / (masked(c).sum(dim=(-1, -2)) > 0).sum(), "combines"),
    "adds where nothing was found": (added_when_empty, ""),
    "another mask": (another_mask, "where other groups have none"),
    "another test": (another_test, "something else than what a group of tokens is"),
    "handed from round to round": (carried, "where other groups have none"),
    "the first round": (first_differs, "where other groups have none"),
    "fails after some rounds": (few_rounds, "after some others"),
    "fails for several": (loop(classes=EXPERTS + 2), "fails for some groups"),
    "numbers of tokens": (numbered_tokens, "numbers the tokens of all requests"),
    "mixes before": (mixed_before, "combines values along dimension 0"),
    "changes what it is given": (written_back, "in place"),
    "rows as they come": (rows_in_order, ""),
    "attention of all tokens": (attention_of_all, "attends to the tokens of all requests"),
    "attention of a group": (loop(compute=attention_of_a_group), "attends to the tokens of all requests"),
    "a shortcut for one group": (shortcut_of_one, ""),
    "doubled after one round": (doubled_after_one_round, "where other groups have none"),
    "written where a group has none": (written_where_one_is_empty, ""),
    "of the first rows of a group": (over_experts_with_tokens(lambda rows: rows[:1].shape[0] == 0), "cannot be traced"),
    "counts the experts that have tokens": (counting_experts_with_tokens, "where other groups have none"),
    "left out where another has none": (skipping_by_another, "where other groups have none"),
    "another value where nothing is found": (with_one_if_nothing_is_found, "where other groups have none"),
    "asks of large values": (asked_of_large_values, "something else than what a group of tokens is"),
    "leaves out an expert of one token": (over_experts_with_tokens(lambda rows: rows.shape[0] < 2), "cannot be traced"),
    "leaves out experts with tokens": (over_experts_with_tokens(lambda rows: rows.shape[0] > 0), ""),
}


@pytest.mark.parametrize("name", LEAKING)
def test_a_loop_that_leaks_between_tokens_is_refused(name: str) -> None:
    experts, part = LEAKING[name]
    reason = why_not(experts)
    assert reason is not None and part in reason


def test_loops_that_ask_something_of_the_values_are_refused() -> None:
    reason = why_not(lambda x, chosen, weights: x if x.sum() > 0 else -x)
    assert reason is not None and "cannot be traced" in reason


def test_another_dimension_than_the_tokens_is_refused() -> None:
    reason = why_not_token_wise(lambda tensors: [tensors[0].T.contiguous()], given()[:1], {0: 0})
    assert reason == "its result 0 does not have tokens in dimension 0 alone"


def test_few_groups() -> None:
    """One expert, and one that nobody can choose but it."""
    one = [given()[0], Given(value=torch.zeros(TOKENS, 1, dtype=torch.int64), token_dim=0), given()[2]]
    assert why_not_token_wise(lambda tensors: [loop(classes=1)(*tensors)], one, {0: 0}) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 9])
def test_any_two_groups_are_told_apart(count: int) -> None:
    groups = frozenset(range(count))
    tried = left_out_in_turn(groups)
    assert groups in tried and len(tried) == len(set(tried))
    assert all(any(a in part and b not in part for part in tried) for a in groups for b in groups - {a})
    assert all(any(len(part) == left for part in tried) for left in {count, count - 1, 1} - {0})
