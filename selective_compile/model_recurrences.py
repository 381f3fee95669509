"""Which functions of a model are known recurrences, and whether steps behind a prompt limit the time step as they do.

Mamba-2's chunked scan takes limits of its time step, and what transformers steps a single token with does not, so that
`generate` computes the tokens of Zamba2 and Nemotron-H that it generates without them.  No graph tells, being of a
prompt's tokens; but a step that does not read the limits gives the same logits, bit for bit, if they are others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.model_call import CANNOT, logits_call
from selective_compile.module_state import own_attributes, unchanged
from selective_compile.one_token import PROMPT, drawn, vocabulary_of
from selective_compile.passes.constant_arguments import kept, number_pair
from selective_compile.passes.recurrence_match import Recognised
from selective_compile.sequential_program import OneRequest, stepped, why_not_run
from selective_compile.skeleton import skeleton
from selective_compile.whole_functions import Place, known_recurrences

Limits = tuple[float, float]
OTHERS = 7.0  # at which a state forgets what was: far from the time steps of any model


@torch.no_grad()
def recurrences_of(model: nn.Module) -> dict[Place, Recognised]:
    """The model's own functions that are known recurrences; it is run on a few tokens.  One that has limits is none
    where it cannot be told whether steps of `generate` have them."""

    def run(ids: Tensor) -> None:
        call, arguments = logits_call(model, ids)
        call(*arguments)

    try:
        with unchanged(model):
            found = known_recurrences(model, run)
    except CANNOT:  # the model itself cannot be called so, as those that know only some lengths
        return {}
    every = {known.limits for known in found.values()}
    unlimited = {limits: limits is not None and unlimited_in_steps(model, limits) for limits in every}
    return {
        place: replace(known, unlimited_steps=told)
        for place, known in found.items()
        if (told := unlimited[known.limits]) is not None
    }


@torch.no_grad()
def unlimited_in_steps(model: nn.Module, limits: Limits) -> bool | None:
    """Whether steps of `generate` are the same whatever the ``limits`` are that the model's modules have; None where
    prompts are, too, so that the model has them from elsewhere.  False for one that has no `generate`."""
    if why_not_run(model):
        return False
    prompt, step = drawn(model, vocabulary_of(model), PROMPT + 1, seed=0).split(PROMPT)
    with unchanged(model):
        try:
            prompts = [last_logits(model, prompt, instead_of=given) for given in (None, limits)]
            steps = [last_logits(model, prompt, step, instead_of=given) for given in (None, limits)]
        except CANNOT:
            return None
    return None if torch.equal(*prompts) else torch.equal(*steps)


def last_logits(model: nn.Module, *parts: Tensor, instead_of: Limits | None) -> Tensor:
    """``[V]`` of the last token, with a prompt and what is stepped behind it as ``parts``, where modules have others in
    the place of these limits while the last part runs."""
    copy, one = skeleton(model, {}), OneRequest(tokens=parts[0][None, :0])
    with own_attributes(copy, {}):
        for part in parts:
            if part is parts[-1] and instead_of is not None:
                change(copy, instead_of)
            one.tokens = torch.cat([one.tokens, part[None]], dim=1)
            logits = stepped(copy, one)
    return logits


def change(copy: nn.Module, limits: Limits) -> None:
    for module in copy.modules():
        attributes: dict[str, Any] = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, (tuple, list)) and number_pair(kept(value)) == limits:
                attributes[name] = type(value)((OTHERS, OTHERS))
