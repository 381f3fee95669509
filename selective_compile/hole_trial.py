"""Whether padding between the tokens of a row is as nothing to a model's own `generate`: a trial, as steps see none.

Most models number their tokens by the attention mask.  One that counts columns, as by a bias of distances between
them, has padding take places, and what is behind it is further from what is in front.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.autocast import without_autocast
from selective_compile.model_facts import device_of
from selective_compile.module_state import lock_of, unchanged
from selective_compile.one_token import Pair, departs, drawn, pairs, vocabulary_of

TOKENS = 4  # on each side of a hole
HOLES = (16, 1)  # tokens in it: the more, the further a model departs that counts them; but some have no more positions


@torch.no_grad()
def counts_holes(model: nn.Module) -> bool:
    """Whether the logits behind a row with a hole are others than behind its tokens alone, or cannot be had."""
    ids = drawn(model, vocabulary_of(model), 2 * TOKENS + max(HOLES), seed=0)
    with lock_of(model), unchanged(model), without_autocast(device_of(model)):
        for hole in HOLES:
            if found := pairs(partial(with_and_without, model, ids[: 2 * TOKENS + hole])):
                return departs(model, found)
    return True


def with_and_without(model: nn.Module, ids: Tensor) -> list[Pair]:
    """The logits behind ``ids`` with a hole in their middle, and behind those beside it."""
    mask = torch.ones_like(ids)
    mask[TOKENS:-TOKENS] = 0
    alone = ids[mask.bool()]
    return [(first_logits(model, ids, mask), first_logits(model, alone, torch.ones_like(alone)))]


def first_logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[V] of the first new token, by the `generate` of the model's class: its own may be that of `wrap`."""
    asked = {"do_sample": False, "num_beams": 1, "max_new_tokens": 1, "pad_token_id": 0}
    returned = {"output_logits": True, "return_dict_in_generate": True}
    found = type(model).generate(model, input_ids=ids[None], attention_mask=mask[None], **asked, **returned)
    return found.logits[0][0]
