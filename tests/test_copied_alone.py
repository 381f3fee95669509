"""Models whose deep copy would not be on its own are not run without data."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile.copied_alone import unregistered_tensors
from selective_compile.fake_run import operators_of
from tests.decoders import Small
from tests.models import FAMILIES, tiny


class Plain(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class Owner:
    def __init__(self) -> None:
        self.handle = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.handle)


class Forgets:
    def __init__(self) -> None:
        self.factor = 3.0

    def __getstate__(self) -> dict[str, Any]:
        return {}


def with_weak_reference(model: Any) -> None:
    model.up = weakref.ref(model.embed)


def with_closure(model: Any) -> None:
    own = model.head.forward

    def forward(rows: Tensor) -> Tensor:
        model.head.table = rows
        return own(rows)

    model.head.forward = forward


def with_owner(model: Any) -> None:
    model.owners = [{"a": Owner()}]


def with_forgetful(model: Any) -> None:
    model.factors = (Forgets(),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_weak_reference, "share nothing with it, got a ReferenceType as .up"),
        (with_closure, "share nothing with it, got a function as head.forward"),
        (with_owner, "as it is, got Owner.__del__ of .owners.0.a"),
        (with_forgetful, "as it is, got Forgets.__getstate__ of .factors.0"),
    ],
)
def test_what_a_copy_would_share_or_lose_is_refused(change: Callable[[Any], None], said: str) -> None:
    model = Plain().eval()
    change(model)
    with pytest.raises(ValueError, match=said):
        operators_of(model)
    if change is with_owner:
        os.fstat(model.owners[0]["a"].handle)  # it is open


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_can_be_copied(family: str) -> None:
    assert unregistered_tensors(tiny(family)) == []


def test_tensors_beside_the_registered_ones_are_not_copied() -> None:
    model = Plain().eval()
    model.drafts = [nn.Linear(8, 8)]
    found = unregistered_tensors(model)
    assert {id(weight) for weight in model.drafts[0].parameters()} <= {id(tensor) for tensor in found}
    operators_of(model)
    model.table = torch.ones(8)
    assert any(tensor is model.table for tensor in unregistered_tensors(model))
