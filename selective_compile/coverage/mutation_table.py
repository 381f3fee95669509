"""Every changed attention of `MUTATED` types tried, and the page that shows it: `docs/mutations.md`."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from selective_compile.coverage.mutations import MUTATED, MUTATIONS, Outcome, outcome
from selective_compile.coverage.page import table

Outcomes = Mapping[str, Mapping[str, Outcome]]  # by model type and mutation

INTRO = """# Changed masks

{types} model types, with random weights, whose attention was changed in {ways} ways while it was traced: every score
on its way into the softmax, every mask on its way into `scaled_dot_product_attention`. Each must come out *exact*, the
logits of requests that come and go being those of the changed model's own forward, or be *refused* by name. Written by
`selective-compile coverage --mutations`.

*non-causal*: every key is seen. *shifted*: a token does not see itself. *widened*: a token sees the next one.
*dropped row*: the token at position 7 sees itself alone. *bias added*: half of the distance modulo 3 is added to each
score. *window added*: the last three keys alone are seen, which is a mask that can be proved.
"""


def outcomes_of(model_type: str) -> tuple[str, dict[str, Outcome]]:
    torch.set_num_threads(1)
    return model_type, {mutation: outcome(model_type, mutation) for mutation in MUTATIONS}


def tried(types: Sequence[str] = MUTATED, *, jobs: int, tell: Callable[[str], None]) -> Outcomes:
    """All mutations of ``types``, in ``jobs`` processes; ``tell`` is called with each type that is done."""
    found: dict[str, dict[str, Outcome]] = {}
    context = multiprocessing.get_context("spawn")  # a fork of a process that has run torch may hang
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in as_completed([pool.submit(outcomes_of, name) for name in types]):
            name, outcomes = done.result()
            found[name] = outcomes
            tell(name)
    return {name: found[name] for name in types}


def mutation_page(outcomes: Outcomes) -> str:
    """Markdown: how many came out how, a table of types by mutations, and the reasons."""
    counts = Counter(one.kind for of_type in outcomes.values() for one in of_type.values())
    intro = INTRO.format(types=len(outcomes), ways=len(MUTATIONS))
    lines = [*intro.splitlines(), "", ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())), ""]
    rows = [(name, *(shown(of_type[mutation]) for mutation in MUTATIONS)) for name, of_type in outcomes.items()]
    lines += [*table(("type", *MUTATIONS), rows), "", "## Why", ""]
    reasons = [
        (name, mutation, one.reason)
        for name, of_type in outcomes.items()
        for mutation, one in of_type.items()
        if one.reason
    ]
    return "\n".join([*lines, *table(("type", "mutation", "refused because"), reasons)]) + "\n"


def shown(one: Outcome) -> str:
    if one.kind == "wrong":
        return f"**wrong** ({one.error:.0e})"
    return f"{one.kind} ({one.error:.0e})" if one.kind == "exact" else one.kind


def wrong_ones(outcomes: Outcomes) -> list[str]:
    """What is neither exact nor refused, or was not changed by its mutation."""
    return [
        f"{name} {mutation}: {one.kind}"
        for name, of_type in outcomes.items()
        for mutation, one in of_type.items()
        if one.kind not in ("exact", "refused")
    ]
