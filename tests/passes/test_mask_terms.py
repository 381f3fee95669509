"""What masks allow together: what one hides no other may uncover."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx

from selective_compile.passes.attention_calls import MaskTerm
from selective_compile.passes.mask_reads import Unproved
from selective_compile.passes.mask_terms import MaskTerms

NODE = fx.Graph().placeholder("mask")
FIRST = torch.tensor([[True, False], [True, True]])  # [L, L]: each token sees itself and those before


def terms(*, steps: bool = False) -> MaskTerms:
    return MaskTerms(torch.ones(1, 2, 2, dtype=torch.bool), several=True, steps=[NODE] if steps else [])


def hiding(number: float) -> Tensor:
    """[1, 1, L, L] that adds so much to what `FIRST` hides."""
    return torch.zeros(1, 1, 2, 2).masked_fill(~FIRST, number)


def test_what_masks_add_is_hidden_or_a_bias() -> None:
    found = terms()
    found.take(MaskTerm(node=NODE, kind="add"), hiding(-math.inf))
    found.take(MaskTerm(node=NODE, kind="add", factor=2.0), torch.full((1, 3, 2, 2), 0.5))
    found.check_hidden(NODE)
    assert torch.equal(found.allowed[0], FIRST)
    assert torch.equal(found.bias, FIRST.double().expand(1, 3, 2, 2))


@pytest.mark.parametrize("steps", (True, False))
def test_a_small_number_hides_in_a_mask_of_steps_alone(steps: bool) -> None:
    found = terms(steps=steps)
    found.take(MaskTerm(node=NODE, kind="add"), hiding(-10000))
    assert torch.equal(found.allowed[0], FIRST if steps else torch.ones_like(FIRST))
    assert found.bias.shape[1] == (0 if steps else 1)


def test_what_is_added_must_not_uncover_what_was_hidden() -> None:
    found = terms(steps=True)
    found.take(MaskTerm(node=NODE, kind="add"), hiding(-10000))
    found.take(MaskTerm(node=NODE, kind="add"), hiding(9000))
    with pytest.raises(Unproved, match="uncovers those that another mask hides"):
        found.check_hidden(NODE)


def test_what_is_added_must_not_uncover_what_is_then_replaced() -> None:
    found = terms()
    found.take(MaskTerm(node=NODE, kind="add"), torch.full((1, 1, 2, 2), 500.0))
    found.take(MaskTerm(node=NODE, kind="keep", fill=-20000.0), FIRST[None, None])
    with pytest.raises(Unproved, match=r"replaced by -10000 uncovers them"):
        found.take(MaskTerm(node=NODE, kind="drop", fill=-10000.0), ~FIRST[None, None])


def test_a_replaced_score_loses_what_was_added_before() -> None:
    found = terms(steps=True)
    found.take(MaskTerm(node=NODE, kind="drop", fill=-math.inf), ~FIRST[None, None])
    found.take(MaskTerm(node=NODE, kind="add"), hiding(9000))
    found.check_hidden(NODE)
    assert torch.equal(found.allowed[0], FIRST) and not found.bias.any()


def test_heads_must_see_the_same_keys() -> None:
    kept = torch.stack([FIRST, torch.ones_like(FIRST)])[None]
    with pytest.raises(Unproved, match="differs between heads"):
        terms().take(MaskTerm(node=NODE, kind="keep"), kept)


def test_a_factor_of_nothing_hides_where_a_mask_does() -> None:
    found = terms()
    found.take(MaskTerm(node=NODE, kind="add"), hiding(-10000))
    found.take_factor(MaskTerm(node=NODE, kind="times"), FIRST.float()[None, None])
    assert torch.equal(found.allowed[0], FIRST)
    with pytest.raises(Unproved, match="multiplies scores that are not hidden"):
        terms().take_factor(MaskTerm(node=NODE, kind="times"), FIRST.float()[None, None])
