"""Keys selected by a sparse indexer: what is recognised is exact, and what is not quite that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.passes.flatten import flatten
from selective_compile.passes.narrow_windows import narrow_windows
from tests.passes.graphs import WIDTH, analysed, error_of, ragged_error, reasons, refusals

HEADS, SIZE, COUNT = 6, 4, 3
LENGTHS = (5, 1, 12, 3, 31, 2)
Step = Callable[..., Any]


def weights(seed: int = 0) -> tuple[Tensor, ...]:
    """Projections of index queries, index keys and weights of heads."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(WIDTH, size, generator=generator) for size in (HEADS * SIZE, SIZE, HEADS))


def product(query: Tensor, key: Tensor) -> Tensor:
    """[B, S, heads, size], [B, S, size]: [B, S, heads, keys]."""
    return torch.matmul(query, key.transpose(-1, -2).unsqueeze(1)) * 0.5


def summed(of_heads: Tensor, scores: Tensor) -> Tensor:
    return torch.matmul(of_heads.unsqueeze(-2), scores).squeeze(-2)


def causal(scores: Tensor, offset: int = 0) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return places[None, :] <= places[:, None] + offset


def best(scores: Tensor) -> Tensor:
    return scores.topk(torch.sym_min(COUNT, scores.shape[-1]), dim=-1).indices


def kept(numbers: Tensor, scores: Tensor) -> Tensor:
    """[B, S, S]: True at the selected keys."""
    return ~torch.ones_like(scores, dtype=torch.bool).scatter(-1, numbers, False)


def sparse(
    *,
    multiply: Step = product,
    rectify: Step = F.relu,
    total: Step = summed,
    hide: Step = lambda scores: scores.masked_fill(~causal(scores), -torch.inf),
    select: Step = best,
    mark: Step = kept,
    mask: Step = lambda marks: (causal(marks) & marks)[:, None],
) -> Step:
    """An attention that sees the keys with the best index scores, with one of its steps replaced."""

    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, of_heads: Tensor) -> Tensor:
        batch, length, _ = x.shape
        index_query = (x @ queries).view(batch, length, HEADS, SIZE)
        scores = hide(total(x @ of_heads, rectify(multiply(index_query, x @ keys))))
        marks = mark(select(scores), scores)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask(marks)).transpose(1, 2)

    return function


def additive(marks: Tensor) -> Tensor:
    """As eager attentions have it: the least number where a key is hidden."""
    least = torch.finfo(torch.float32).min
    base = torch.zeros(marks.shape[-2:]).masked_fill(~causal(marks), least)
    return base.expand(marks.shape).masked_fill(~marks, least)[:, None]


EXACT: dict[str, Step] = {
    "as it is": sparse(),
    "einsum": sparse(
        multiply=lambda q, k: torch.einsum("bshd,btd->bsht", q, k),
        total=lambda w, scores: torch.einsum("bsh,bsht->bst", w, scores),
    ),
    "scores before weights": sparse(total=lambda w, scores: torch.einsum("bsht,bsh->bst", scores, w) * 3),
    "scaled behind relu": sparse(rectify=lambda scores: F.relu(scores) * 0.3),
    "negated twice": sparse(
        rectify=lambda s: -1.0 * F.relu(s), total=lambda w, s: torch.einsum("bsh,bsht->bst", w, s) * -2.0
    ),
    "added masks": sparse(hide=lambda s: s + torch.zeros(s.shape[-2:]).masked_fill(~causal(s), -1e30), mask=additive),
    "numbers cast": sparse(select=lambda scores: best(scores).to(torch.int32).long()),
    "marked with numbers": sparse(
        mark=lambda n, s: torch.full_like(s, -torch.inf).scatter(-1, n, 0.0),
        mask=lambda marks: (marks + torch.zeros(marks.shape[-2:]).masked_fill(~causal(marks), -torch.inf))[:, None],
    ),
    "as many as there are": sparse(select=lambda s: s.topk(torch.sym_min(1000, s.shape[-1]), dim=-1).indices),
    "one key": sparse(select=lambda s: s.topk(torch.sym_min(1, s.shape[-1]), dim=-1).indices),
}


@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_what_is_recognised_is_exact(function: Step) -> None:
    assert ragged_error(function, *weights(), lengths=LENGTHS) < 1e-4


def test_the_selection_bites() -> None:
    """Without it, the same attention gives something else: a graph that lost it would be told."""
    without = sparse(mark=lambda numbers, scores: torch.ones_like(scores, dtype=torch.bool))
    flat = flatten(analysed(sparse(), *weights()), paged=False)
    assert error_of(flat, without, *weights(), lengths=LENGTHS) > 0.1


def test_one_selection_serves_several_attentions() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        masks: list[Tensor] = []

        def mask(marks: Tensor) -> Tensor:
            masks.append((causal(marks) & marks)[:, None])
            return masks[0]

        first = sparse(mask=mask)(x, q, k, v, a, b, c)
        again = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (first, k, v)), masks[0])
        return again.transpose(1, 2)

    traced = analysed(function, *weights())
    assert len(traced.selections) == 1 and len(traced.calls) == 2
    assert error_of(flatten(traced, paged=False), function, *weights(), lengths=LENGTHS) < 1e-4


def moved(numbers: Tensor) -> Tensor:
    return numbers[:, torch.arange(numbers.shape[1]) * 0]


REFUSED: dict[str, tuple[Step, str]] = {
    "index scores not causal": (sparse(hide=lambda s: s), "no mask family"),
    "index scores see one key ahead": (sparse(hide=lambda s: s.masked_fill(~causal(s, 1), -torch.inf)), "no mask fam"),
    "index scores miss the own key": (sparse(hide=lambda s: s.masked_fill(~causal(s, -1), -torch.inf)), "no mask fam"),
    "index scores see a window": (
        sparse(hide=lambda s: s.masked_fill(~causal(s) | causal(s, -4), -torch.inf)),
        "must be all keys",
    ),
    "attention sees a window": (
        sparse(mask=lambda m: (causal(m) & ~causal(m, -4) & m)[:, None]),
        "must be all keys",
    ),
    "attention not causal": (sparse(mask=lambda m: m[:, None]), "no mask family"),
    "hidden by too little": (sparse(hide=lambda s: s.masked_fill(~causal(s), -10.0)), "must be at most"),
    "the lowest scores": (
        sparse(select=lambda s: s.topk(torch.sym_min(COUNT, s.shape[-1]), dim=-1, largest=False).indices),
        "lowest scores",
    ),
    "negated": (sparse(rectify=lambda s: F.relu(s) * -1.0), "negated"),
    "not rectified": (sparse(rectify=lambda s: s), "it must be relu"),
    "another activation": (sparse(rectify=F.silu), "no reading for aten.silu"),
    "more keys for longer requests": (
        sparse(select=lambda s: s.topk(torch.sym_min(COUNT, (s.shape[-1] + 1) // 2), dim=-1).indices),
        "which is not the smaller of a constant and the number of tokens",
    ),
    "weights of the keys": (
        sparse(total=lambda w, s: torch.einsum("bth,bsht->bst", w, s)),
        "queries before keys",
    ),
    "heads summed alike": (sparse(total=lambda w, s: s.sum(2) + 0 * w.sum(-1, keepdim=True)), ""),
    "numbers computed with": (sparse(select=lambda s: (best(s) - 1).clamp(min=0)), "numbers by which tokens"),
    "keys selected for the first query": (sparse(select=lambda s: moved(best(s))), ""),
    "keys not selected": (sparse(mask=lambda m: (causal(m) & ~m)[:, None]), "more or less than hide"),
    "selected keys ignored far away": (
        sparse(mask=lambda m: (causal(m) & (m | causal(m, -200)))[:, None]),
        "more or less than hide",
    ),
    "selected keys preferred": (
        sparse(mask=lambda m: torch.where(causal(m), m * 0.5, torch.finfo(torch.float32).min)[:, None]),
        "",
    ),
    "marked by their scores": (
        sparse(
            select=lambda s: s.topk(torch.sym_min(COUNT, s.shape[-1]), dim=-1),
            mark=lambda t, s: torch.zeros_like(s).scatter(-1, t.indices, t.values) != 0,
        ),
        "",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_quite_that_is_refused(function: Step, reason: str) -> None:
    found = reasons(function, *weights())
    assert found and any(reason in one for one in found), found


def test_scores_that_are_read_elsewhere_are_refused() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def select(scores: Tensor) -> Tensor:
            top = scores.topk(torch.sym_min(COUNT, scores.shape[-1]), dim=-1)
            seen.append(top.values)
            return top.indices

        return sparse(select=select)(x, q, k, v, a, b, c) + seen[0].sum(-1)[:, :, None, None]

    assert refusals(function, *weights())


def test_rounded_scores_are_refused() -> None:
    """In bfloat16 many scores are equal, and which of them are selected is left open by the model."""
    rounding = sparse(total=lambda w, s: summed(w, s).to(torch.bfloat16).float())
    assert any("rounded to less than float32" in reason for reason in reasons(rounding, *weights()))


def test_index_keys_are_kept_before_they_are_widened() -> None:
    widening = sparse(
        multiply=lambda q, k: product(q.to(torch.bfloat16).float(), k.to(torch.bfloat16).float()),
    )
    (selection,) = analysed(widening, *weights()).selections
    assert {selection.query.node.meta["val"].dtype, selection.key.node.meta["val"].dtype} == {torch.bfloat16}
    assert ragged_error(widening, *weights(), lengths=LENGTHS) < 1e-4


def test_selected_keys_cannot_be_narrowed_to_a_window() -> None:
    """The best keys may all lie in front of it."""
    traced = analysed(sparse(), *weights())
    assert narrow_windows(traced, 4) == 0
    assert any("cannot be narrowed to 4" in refusal.reason for refusal in traced.refusals)
