"""Mixtures of experts: tokens sorted by expert, multiplied group by group, put back; and what merely resembles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped product that its models call on a CPU)
from torch import Tensor

from selective_compile.passes.axes import Axis, Permuted
from selective_compile.passes.token_axes import mark_token_axes
from tests.passes.graphs import marked, ragged_error, reasons, trace

EXPERTS, TOP, WIDTH = 5, 2, 8
Function = Callable[..., Any]
generator = torch.Generator().manual_seed(0)
ROUTER = torch.randn(EXPERTS, WIDTH, generator=generator)
UP = torch.randn(EXPERTS, WIDTH, 12, generator=generator)
DOWN = torch.randn(EXPERTS, 12, WIDTH, generator=generator)
BIAS = torch.randn(EXPERTS, 12, generator=generator)
WEIGHTS = (ROUTER, UP, DOWN, BIAS)


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def ends_of(experts: Tensor, bins: int = EXPERTS) -> Tensor:
    return torch.histc(experts.float(), bins=bins, min=0, max=bins - 1).cumsum(0, dtype=torch.int32)


def by_writing(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return inverse


def routed(x: Tensor, router: Tensor, top: int = TOP) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, h], and of each the scores and numbers of its experts [R, top]."""
    rows = x.reshape(-1, WIDTH)
    scores, experts = F.linear(rows, router).softmax(-1).topk(top, dim=-1)
    return rows, scores, experts


def mixture(
    top: int = TOP,
    undo: Function = by_writing,
    ends: Function = ends_of,
    owner: Function | None = None,
    descending: bool = False,
) -> Function:
    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        rows, scores, experts = routed(x, router, top)
        sorted_experts, order = torch.sort(experts.reshape(-1), descending=descending)
        chosen = rows[order // top if owner is None else owner(order)]
        bounds = ends(sorted_experts)
        hidden = grouped(chosen, up, bounds).add_(bias[sorted_experts]).relu()
        weighted = grouped(hidden, down, bounds) * scores.reshape(-1)[order][:, None]
        return weighted[undo(order)].view(rows.shape[0], top, WIDTH).sum(1).reshape(x.shape)

    return run


def by_adding(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    rows, scores, experts = routed(x, router)
    sorted_experts, order = torch.sort(experts.flatten())
    bounds = ends_of(sorted_experts)
    hidden = grouped(rows[order // TOP], up, bounds).relu()
    weighted = grouped(hidden, down, bounds) * scores.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(rows).index_add(0, order // TOP, weighted).view(x.shape)


def by_batches(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Every pair has its expert's weights read for it."""
    rows, scores, experts = routed(x, router)
    chosen = rows.repeat_interleave(TOP, dim=0)
    hidden = torch.bmm(chosen[:, None], up[experts.reshape(-1)]).relu()
    weighted = torch.bmm(hidden, down[experts.reshape(-1)])[:, 0] * scores.reshape(-1)[:, None]
    return weighted.view(rows.shape[0], TOP, WIDTH).sum(1).reshape(x.shape)


def by_every_expert(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """All experts run on all tokens, weighted by scores that are mostly 0."""
    rows, scores, experts = routed(x, router)
    full = torch.zeros(rows.shape[0], EXPERTS).scatter_(1, experts, scores)
    each = torch.einsum("rh,ehm->erm", rows, up).relu() @ down
    return (each * full.t()[:, :, None]).sum(0).reshape(x.shape)


def by_maxima(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """The experts found one after another, their numbers concatenated."""
    rows = x.reshape(-1, WIDTH)
    scores = F.linear(rows, router).softmax(-1)
    first, expert = scores.max(dim=-1, keepdim=True)
    second, other = scores.scatter(-1, expert, -1.0).max(dim=-1, keepdim=True)
    both, experts = torch.cat([first, second], -1), torch.concat([expert, other], -1)
    sorted_experts, order = torch.sort(experts.reshape(-1))
    product = grouped(grouped(rows[order // 2], up, ends_of(sorted_experts)).relu(), down, ends_of(sorted_experts))
    return (product[by_writing(order)].view(-1, 2, WIDTH) * both[..., None]).sum(1).reshape(x.shape)


def split_by_expert(
    counted: Function = lambda gates: gates.long().sum(0),
    choose: Function = lambda sizes: sizes,
    gate: Function = lambda rows, experts: torch.zeros(rows.shape[0], EXPERTS).scatter(1, experts, 1),
    parts: Function = lambda parts: parts,
    rows_of: Function = lambda rows, order: rows[order // TOP],
    sorted_as: torch.dtype = torch.int64,
) -> Function:
    """Each expert's rows are cut out and multiplied by themselves, as JetMoE does."""

    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        rows, scores, experts = routed(x, router)
        counts = counted(gate(rows, experts))
        sizes = choose([counts[expert].item() for expert in range(EXPERTS)])
        for size in sizes:
            torch._check(size >= 0)
        order = experts.flatten().to(sorted_as).sort(0)[1]
        cut = rows_of(rows, order).split(sizes, dim=0)
        product = torch.cat([part @ weight for part, weight in zip(parts(cut), up, strict=False)], dim=0)
        weighted = product @ down[0] * scores.flatten()[order][:, None]
        return torch.zeros_like(rows).index_add(0, order // TOP, weighted).view(x.shape)

    return run


def by_numbers(x: Tensor, numbers: Tensor, up: Tensor) -> Tensor:
    """Rows grouped by any number, one for each."""
    sorted_numbers, order = torch.sort(numbers)
    product = grouped(x.reshape(-1, WIDTH)[order], up, ends_of(sorted_numbers))
    return product[by_writing(order)].reshape(*x.shape[:2], -1)


def replaced_by(number: int) -> Function:
    """Each token's one expert, or ``number`` in place of the last."""

    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        _, scores, experts = routed(x, router, 1)
        found = experts.masked_fill(experts == EXPERTS - 1, number).reshape(-1)
        return by_numbers(x, found, up) * scores.reshape(*x.shape[:2], 1)

    return run


EXACT: dict[str, Function] = {
    "sorted by expert": mixture(),
    "one expert each": mixture(1),
    "inverse by sorting": mixture(undo=torch.argsort),
    "added at their tokens": by_adding,
    "weights read for each pair": by_batches,
    "every expert": by_every_expert,
    "experts by maxima": by_maxima,
    "rows cut by expert": split_by_expert(),
    "an expert that stands for none": replaced_by(0),
}


@pytest.mark.parametrize("name", EXACT)
def test_mixture_is_token_wise_and_exact(name: str) -> None:
    assert ragged_error(EXACT[name], *WEIGHTS) < 1e-4


def wrong_inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0]) + 1
    return inverse


def with_sorted(use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    """``use`` of the sorted rows, the sorted numbers of experts and the order gives what is added to every token."""

    def run(x: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        rows, _, experts = routed(x, router)
        sorted_experts, order = torch.sort(experts.reshape(-1))
        return x + use(rows[order // TOP], sorted_experts, order)

    return run


def counts_of(experts: Tensor) -> Tensor:
    return torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


REFUSED: dict[str, tuple[Function, str]] = {
    "sorted rows multiplied with each other": (
        with_sorted(lambda rows, experts, order: (rows.t() @ rows).sum(0)),
        "sums over",
    ),
    "the share of an expert": (with_sorted(lambda rows, experts, order: counts_of(experts)[0]), "reordered"),
    "the shares of experts": (
        with_sorted(lambda rows, experts, order: counts_of(experts)[None, :, None].mean(1)),
        "sizes of groups",
    ),
    "a table read at the sizes of groups": (
        lambda x, router, up, down, bias: (
            x + router.repeat(9, 1)[counts_of(routed(x, router)[2].reshape(-1).sort()[0]).long()].sum(0)
        ),
        "reordered",
    ),
    "a table read at places in the order": (
        lambda x, router, up, down, bias: (
            x + router.repeat(99, 1)[routed(x, router, 1)[2].reshape(-1).argsort().argsort()].view(*x.shape)
        ),
        "reordered",
    ),
    "split at sizes in another order": (split_by_expert(choose=lambda sizes: sizes[::-1]), "sizes of their groups"),
    "split at the sizes of other groups": (
        split_by_expert(gate=lambda rows, e: torch.zeros(rows.shape[0], EXPERTS).scatter(1, (e + 1) % EXPERTS, 1)),
        "",
    ),
    "groups counted twice": (split_by_expert(counted=lambda gates: (2 * gates).long().sum(0)), ""),
    "groups counted by features": (split_by_expert(counted=lambda gates: gates.long().sum(1)[:EXPERTS]), ""),
    "parts in another order": (split_by_expert(parts=lambda parts: parts[::-1]), "parts of sorted tokens"),
    "parts left out": (split_by_expert(parts=lambda parts: parts[1:]), "parts of sorted tokens"),
    "rows that are not sorted": (
        split_by_expert(rows_of=lambda rows, order: rows.repeat_interleave(TOP, dim=0)),
        "sizes of their groups",
    ),
    "not put back": (mixture(undo=lambda order: order), "not the token's own"),
    "put back by something else": (mixture(undo=lambda order: torch.arange(order.shape[0])), "not the token's own"),
    "put back one further": (mixture(undo=wrong_inverse), "reordered"),
    "put back backwards": (mixture(undo=lambda order: order.argsort(descending=True)), "reordered"),
    "experts sorted from the last": (mixture(descending=True), "begin with the last"),
    "split by experts sorted as true and false": (split_by_expert(sorted_as=torch.bool), "sizes of their groups"),
    "rows of other tokens": (mixture(owner=lambda order: order // 4), "reordered"),
    "rows of no token": (mixture(owner=lambda order: order), "not the token's own"),
    "an expert that may become -1": (replaced_by(-1), "not known to be indices"),
    "experts counted in pairs": (mixture(ends=lambda e: ends_of(e // 2)), "other values"),
    "ends that are not summed": (
        mixture(ends=lambda e: torch.histc(e.float(), EXPERTS, 0, EXPERTS - 1).int()),
        "groups",
    ),
    "too few experts counted": (
        mixture(ends=lambda e: torch.histc(e.float(), bins=EXPERTS, min=0, max=2).cumsum(0, dtype=torch.int32)),
        "several group numbers as one",
    ),
    "groups by a value that may be negative": (
        lambda x, router, up, down, bias: by_numbers(x, (x.reshape(-1, WIDTH)[:, 0] * 2).long(), up),
        "not known to be indices",
    ),
    "order as a feature": (
        lambda x, router, up, down, bias: (
            x.reshape(-1, WIDTH) + routed(x, router, 1)[2].reshape(-1).argsort()[:, None]
        ).reshape(x.shape),
        "different meaning",
    ),
    "inverse as a feature": (
        lambda x, router, up, down, bias: (
            x.reshape(-1, WIDTH) + routed(x, router, 1)[2].reshape(-1).argsort().argsort()[:, None]
        ).reshape(x.shape),
        "reordered",
    ),
    "tokens sorted by their first feature": (
        lambda x, router, up, down, bias: x.reshape(-1, WIDTH)[x.reshape(-1, WIDTH)[:, 0].argsort()].reshape(x.shape),
        "",
    ),
    "a count as a feature": (
        lambda x, router, up, down, bias: x + torch.histc(routed(x, router)[2].reshape(-1).float(), 8, 0, 7),
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lets_tokens_meet_is_refused(name: str) -> None:
    function, reason = REFUSED[name]
    given = reasons(function, *WEIGHTS)
    assert given and any(reason in text for text in given), given


@pytest.mark.parametrize(("last", "proved"), [(EXPERTS - 1, True), (EXPERTS - 2, False)])
def test_integers_are_counted_as_on_a_gpu(last: int, proved: bool) -> None:
    """No CPU counts integers, so that neither the trace nor the proof may ask it to."""
    traced = trace(
        mixture(ends=lambda e: torch.histc(e.float(), EXPERTS, 0, last).cumsum(0, dtype=torch.int32)), *WEIGHTS
    )
    (counts,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.histc.default)
    counts.args = (counts.args[0].args[0], *counts.args[1:])
    assert not counts.args[0].meta["val"].is_floating_point()
    mark_token_axes(traced)
    assert (counts in traced.axes and traced.axes[counts].groups is not None) == proved


def test_sorted_dimension_says_what_it_holds() -> None:
    traced = marked(mixture(), *WEIGHTS)
    named = {node.name: axes for node, axes in traced.axes.items()}
    (order,) = [axes for name, axes in named.items() if axes.is_permuted and len(axes.numbers) == 3]
    ((factor,),) = order.dims
    assert isinstance(factor, Permuted)
    assert factor.of == order.numbers == (Axis.BATCH, Axis.TOKEN, TOP)


def by_table(ids: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor, buffer: Tensor) -> Tensor:
    """Which expert a token goes to is looked up by its id."""
    return by_numbers(router[ids.clamp(0, EXPERTS - 1)], buffer[ids.reshape(-1)], up)


def test_experts_may_be_looked_up_in_a_buffer_that_then_must_stay() -> None:
    table = torch.arange(16) % EXPERTS
    assert ragged_error(by_table, *WEIGHTS, table) < 1e-4
    assert [given.example is table for given in marked(by_table, *WEIGHTS, table).proved_from] == [True]
    table = table.clone()
    table[3] = -1
    assert any("not known to be indices" in reason for reason in reasons(by_table, *WEIGHTS, table))


def test_experts_looked_up_in_a_weight_are_refused() -> None:
    def run(ids: Tensor, router: Tensor, up: Tensor, down: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        return by_table(ids, router, up, down, bias, table)

    table = torch.arange(16) % EXPERTS
    assert any("not known to be indices" in reason for reason in reasons(run, *WEIGHTS, table))
