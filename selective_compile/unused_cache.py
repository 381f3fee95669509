"""Whether a model with a loop of its own makes nothing of the cache that transformers' loop would hand it.

Its own `generate` keeps keys and values in another form, or none, and what transformers hands its forward is dropped
there, as an argument that it does not know among its **kwargs.  In steps of transformers' a token then sees no other.
Nobody runs such a model so: these steps tell nothing of it, and where it runs whole, it does without a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationMixin

from selective_compile.model_call import CANNOT
from selective_compile.model_facts import device_of, known_ids
from selective_compile.module_state import own_attributes, unchanged
from selective_compile.own_generation import is_of_transformers, own_function
from selective_compile.sequential_program import OneRequest, stepped, why_not_run

PROMPT = 3  # tokens of each of two requests that share no token, and go on with the same one


@torch.no_grad()
def leaves_cache_unused(model: Any) -> bool:
    """Whether the step behind a prompt, with the cache that this left, gives the same logits whatever the prompt was;
    of a model whose `generate` is transformers' that is what it does, and not asked."""
    own = own_function(model, "generate") if isinstance(model, GenerationMixin) else None
    if own is None or is_of_transformers(own) or why_not_run(model):
        return False
    ids = torch.arange(1, 2 * PROMPT + 2, device=device_of(model)) % (known_ids(model) or 2 * PROMPT + 2)
    prompts, last = ids[:-1].view(2, 1, PROMPT), ids[None, -1:]
    with unchanged(model):
        try:
            one, other = (behind(model, prompt, last) for prompt in prompts)
        except CANNOT:  # it can do nothing with such a cache, which is said where it is run
            return False
    return torch.equal(one, other)


def behind(model: Any, prompt: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[V] of the token ``last`` ``[1, 1]``, in a step of its own behind ``prompt`` ``[1, S]``."""
    one = OneRequest(tokens=prompt)
    with own_attributes(model, {}):
        stepped(model, one)
        one.tokens = torch.cat([prompt, last], dim=1)
        return stepped(model, one)
