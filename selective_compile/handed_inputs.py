"""Whether `generate` hands a model its tokens as they are: a model may prepare its inputs in a way of its own.

The graph is that of ids and positions from 0 on.  A model whose `prepare_inputs_for_generation` numbers positions
otherwise, or puts other ids in the places of those given, computes something else in `generate` than by itself; what it
is handed tells so exactly, where its logits could only be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.model_call import CANNOT
from selective_compile.model_facts import declared_positions, device_of
from selective_compile.module_state import own_attributes, unchanged
from selective_compile.one_token import TOKEN_IDS, vocabulary_of
from selective_compile.own_generation import TRIED, is_of_transformers, own_function
from selective_compile.passes import Refusal
from selective_compile.sequential_program import OneRequest, step_arguments, stepped, why_not_run
from selective_compile.where_refused import begin_of

STEPS = (5, 1, 1)  # tokens: a prompt, and two that are generated
LONGEST = 512  # tokens of a prompt that is one of those with every id


@torch.no_grad()
def handed_refusal(model: Any) -> Refusal | None:
    """What to say of ``model`` if `generate` hands it something else than its tokens; None if it does not."""
    if not isinstance(model, nn.Module) or why_not_run(model):
        return None
    if prepares_in_its_own_way(model) and (wrong := unlike_by_ids(model)):
        return refusal(model, wrong)
    ids = torch.randint(1, TOKEN_IDS, (1, sum(STEPS)), generator=torch.Generator().manual_seed(0), device="cpu").to(
        device_of(model)
    )
    one = OneRequest(tokens=ids[:, :0])
    with unchanged(model), own_attributes(model, {}):
        for part in ids.split(STEPS, dim=1):
            one.tokens = torch.cat([one.tokens, part], dim=1)
            try:
                if wrong := unlike(step_arguments(model, one.copy(model)), one):
                    return refusal(model, wrong)
                stepped(model, one)
            except CANNOT:  # `generate` cannot run it: the trials of one token tell what that means
                return None
    return None


def prepares_in_its_own_way(model: Any) -> bool:
    """Whether code that is not transformers' makes what `generate` hands the model."""
    found = [own_function(model, name) for name in TRIED]
    return any(function is not None and not is_of_transformers(function) for function in found)


def unlike_by_ids(model: Any) -> str:
    """Which input is other than those of the tokens in a prompt of some ids, and not in one, as long, of others.

    The prompts together have every id, of which a separator, say, may be one.
    """
    longest = min(LONGEST, declared_positions(model) or LONGEST)
    every = torch.randperm(vocabulary_of(model), generator=torch.Generator().manual_seed(0), device="cpu")
    with unchanged(model), own_attributes(model, {}):
        for part in every.split(longest):
            few = torch.arange(len(part), device="cpu") % (TOKEN_IDS - 1) + 1
            found, usual = unlike_of(model, part), unlike_of(model, few)
            if found != usual:
                return found or usual
    return ""


def unlike_of(model: Any, ids: Tensor) -> str:
    """As `unlike`, of a prompt; "inputs": `generate` cannot be run with it."""
    one = OneRequest(tokens=ids.to(device_of(model))[None])
    try:
        return unlike(step_arguments(model, one.copy(model)), one)
    except CANNOT:
        return "inputs"


def unlike(arguments: dict[str, Any], one: OneRequest) -> str:
    """Which of the ``arguments`` of a request's next step says something else than its tokens do; empty if none."""
    ids, end = arguments.get("input_ids"), one.tokens.shape[1]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] not in (end, end - one.seen):
        return "input_ids"
    first = end - ids.shape[1]
    if not torch.equal(ids.long(), one.tokens[:, first:]):
        return "input_ids"
    positions, mask = (arguments.get(name) for name in ("position_ids", "attention_mask"))
    numbers = torch.arange(first, end, device=ids.device)[None]
    if isinstance(positions, Tensor) and positions.dim() == 2 and not torch.equal(positions.long(), numbers):
        return "position_ids"
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 1).any()):
        return "attention_mask"
    types = arguments.get("token_type_ids")
    return "token_type_ids" if isinstance(types, Tensor) and bool(types.any()) else ""


def refusal(model: Any, name: str) -> Refusal:
    return Refusal(
        node="tokens",
        operator="inputs of generate",
        reason=f"generate hands the model other {name} than those of its tokens",
        source_line=begin_of(type(model).prepare_inputs_for_generation),
        module="",
    )
