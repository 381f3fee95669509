"""Whether `generate` goes on behind a prefix as the engine does: a trial, as a graph is of all tokens at once.

Of a model whose first tokens see later ones, a token that is generated among these is seen by those behind it alone:
the others were computed before it was there.  So it is with a cache; a model that computes all its tokens anew in each
step lets them see it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selective_compile.isolation_trial import by_program
from selective_compile.model_facts import device_of
from selective_compile.module_state import unchanged
from selective_compile.one_token import TOKEN_IDS, Pair, by_generate, departs, pairs
from selective_compile.passes import Refusal
from selective_compile.sequential_program import why_not_run
from selective_compile.step_program import StepProgram
from selective_compile.where_refused import begin_of

GENERATED = 3


@torch.no_grad()
def prefix_refusal(model: nn.Module, program: StepProgram) -> Refusal | None:
    """What to say of ``model`` if `generate` gives other logits than its ``program``, of prompts of one token, of some
    that end within the prefix and of one that ends behind it; None if it gives the same."""
    seen = f"the first {program.prefix} tokens see one another"
    if reason := why_not_run(model):
        return not_as_computed(
            model, f"{seen}, and it is not known how the model goes on from a prompt that is shorter: {reason}"
        )
    longest = program.prefix + 1
    ids = torch.randint(0, TOKEN_IDS, (longest + GENERATED,), generator=torch.Generator().manual_seed(0), device="cpu")
    ids = ids.to(device_of(model))
    with unchanged(model):
        for prompt in sorted({1, max(1, program.prefix // 2), program.prefix, longest}):
            counts = [prompt] + [1] * GENERATED
            found = pairs(lambda counts=counts: both(model, program, ids, counts))  # type: ignore[misc]
            if departs(model, found):
                return not_as_computed(
                    model, f"{seen}, and generate goes on otherwise than with a cache, from {prompt} of them"
                )
    return None


def both(model: nn.Module, program: StepProgram, ids: Tensor, counts: list[int]) -> list[Pair]:
    """Logits of the last token of each step of so many tokens, by `generate` and by the program."""
    tokens = ids[: sum(counts)]
    return list(zip(by_generate(model, tokens, counts), by_program(program, tokens, counts), strict=True))


def not_as_computed(model: nn.Module, reason: str) -> Refusal:
    return Refusal(
        node="tokens",
        operator="prefix",
        reason=reason,
        source_line=begin_of(type(model).forward),
        module="",
    )
