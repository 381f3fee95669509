"""A model that goes by how many calls there were runs whole, each request with its own count, or is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.models import tiny
from tests.oracle import generated_alone

LATER = 11  # calls: more than any trial makes of one request
PROMPTS = [[3, 5, 7], [11] * 9]
NEW_TOKENS = 16
CONFIG = sc.EngineConfig(compile=False)
OF_ALL = {"calls": 0}
Count = Callable[[Any], int]  # of the calls, this one among them


class Counting(nn.Module):
    """An MLP that gives another result from some call on."""

    def __init__(self, mlp: nn.Module, count: Count) -> None:
        super().__init__()
        self.mlp, self.count = mlp, count
        self.calls, self.listed, self.text = 0, [], ""
        self.number, self.tensor = np.zeros(1), torch.zeros(())
        self.object, self.numbers = SimpleNamespace(calls=0), itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (3 if self.count(self) > LATER else 1)


def attribute(own: Any) -> int:
    own.calls += 1
    return own.calls


def in_turn(own: Any) -> int:
    own.calls += 1
    return LATER + 1 if own.calls % 9 == 0 else 0


def listed(own: Any) -> int:
    own.listed.append(1)
    return len(own.listed)


def text(own: Any) -> int:
    own.text += "."
    return len(own.text)


def tensor(own: Any) -> Any:
    own.tensor = own.tensor + 1
    return int(own.tensor)


def array(own: Any) -> int:
    own.number += 1
    return int(own.number[0])


def in_object(own: Any) -> int:
    own.object.calls += 1
    return own.object.calls


def iterated(own: Any) -> int:
    return next(own.numbers)


def of_all(own: Any) -> int:
    OF_ALL["calls"] += 1
    return OF_ALL["calls"]


def only_counted(own: Any) -> int:
    own.calls += 1
    return 0


def model_with(count: Count) -> Any:
    model = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    model.model.layers[0].mlp = Counting(model.model.layers[0].mlp, count)
    return model


@pytest.mark.parametrize("count", [attribute, in_turn, listed, text, tensor])
def test_each_request_has_a_count_of_its_own(count: Count) -> None:
    model = model_with(count)
    wanted = [generated_alone(copy.deepcopy(model), prompt, NEW_TOKENS) for prompt in PROMPTS]
    engine = sc.Engine(model, CONFIG)
    assert engine.report.verdict == "sequential"
    requests = [engine.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [list(request.result().tokens) for request in requests] == wanted


@pytest.mark.parametrize("count", [array, in_object, iterated, of_all])
def test_a_count_that_no_request_can_have_of_its_own_is_refused_by_name(count: Count) -> None:
    OF_ALL["calls"] = 0
    with pytest.raises(sc.RefusedError, match=r"each call changes .*, by which a later one may go"):
        sc.Engine(model_with(count), CONFIG)


def test_what_is_only_counted_is_ragged() -> None:
    model = model_with(only_counted)
    assert sc.explain(model).verdict == "ragged" and model.model.layers[0].mlp.calls == 0


@pytest.mark.parametrize("fallback", ["isolated", "refuse"])
def test_nothing_is_isolated_for_it(fallback: Any) -> None:
    with pytest.raises(sc.RefusedError, match=r"each call changes model\.model\.layers\.0\.mlp\.calls"):
        sc.Engine(model_with(attribute), sc.EngineConfig(compile=False, fallback=fallback))


class Scaling(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mlp(x) * (1 + self.calls // LATER)


def test_what_logits_are_made_of_is_not_only_counted() -> None:
    model = model_with(only_counted)
    model.model.layers[0].mlp = Scaling(model.model.layers[0].mlp.mlp, only_counted)
    assert sc.explain(model).verdict == "sequential"
