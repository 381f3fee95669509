"""A trial that a model has passed is not run again while nothing has changed that a call of it could depend on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from selective_compile import isolation, kept_files
from selective_compile.isolation import prove
from selective_compile.kept_trials import ENDING
from selective_compile.passes import Refusal, RefusedError
from selective_compile.told_models import MOST, ToldModel
from tests.decoders import Small
from tests.models import tiny


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    return tmp_path / "captures"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that trials were run with."""
    found: list[nn.Module] = []
    trials = isolation.departs_in_use

    def noted(model: nn.Module, *arguments: Any) -> Refusal | None:
        found.append(model)
        return trials(model, *arguments)

    monkeypatch.setattr(isolation, "departs_in_use", noted)
    return found


def proved(model: nn.Module, keep: bool = True) -> None:
    prove(model, "refuse", keep=keep)


def test_what_has_passed_is_not_tried_again(tried: list[nn.Module], own_folder: Path) -> None:
    proved(tiny("llama"))
    assert len(list(own_folder.glob(f"*{ENDING}"))) == 1
    proved(tiny("llama"))  # another object
    assert len(tried) == 1
    proved(tiny("llama"), keep=False)
    assert len(tried) == 2


def in_place(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 2] += 0.5


def uncounted(model: Any) -> None:
    model.model.norm.weight.data[1] *= 2


def moved(model: Any) -> None:
    """Two numbers change places."""
    weight = model.model.embed_tokens.weight
    weight[[0, 1]] = weight[[1, 0]]


def an_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.note = 3


def of_the_configuration(model: Any) -> None:
    model.config.note = {"of": [1, 2]}


def of_generation(model: Any) -> None:
    model.generation_config.suppress_tokens = [1]


def of_the_object(model: Any) -> None:
    model.prepare_inputs_for_generation = lambda *args, **kwargs: type(model).prepare_inputs_for_generation(
        model, *args, **kwargs
    )


def buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 1.01


def tensors_in_a_list(model: Any) -> None:
    model.model.layers[0].kept = [torch.ones(2)]


def numbers_in_an_object(model: Any) -> None:
    model.config.policy = SimpleNamespace(scales={"a": deque([1.0])})


def which_object(model: Any) -> None:
    for layer in model.model.layers:
        layer.policy = SimpleNamespace(scale=1)


CHANGES = (
    *(in_place, uncounted, moved, buffer, an_attribute, of_the_configuration, of_generation, of_the_object),
    *(tensors_in_a_list, numbers_in_an_object, which_object),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_change_is_told(change: Callable[[Any], None]) -> None:
    changed = tiny("llama")
    change(changed)
    assert ToldModel(changed).digest != ToldModel(tiny("llama")).digest


@torch.no_grad()
def test_a_change_has_it_tried_again(tried: list[nn.Module]) -> None:
    proved(tiny("llama"))
    changed = tiny("llama")
    in_place(changed)
    proved(changed)
    assert len(tried) == 2


def with_values(make: Callable[[Any, Any], None], *values: Any) -> list[str]:
    """The digests of models that are given these."""
    found = []
    for value in values:
        make(model := tiny("llama"), value)
        found.append(ToldModel(model).digest)
    return found


class Plan(dict[str, int]):
    def __init__(self, scale: float) -> None:
        super().__init__(a=1)
        self.scale = scale


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda x: x * value


def with_default(value: Any) -> Callable[..., Any]:
    return lambda x, factor=value: x * factor


@dataclass
class Policy:
    scale: float


FACTOR = 1.0
GIVEN: dict[str, Callable[[Any], Any]] = {
    "closure": closing_over,
    "default": with_default,
    "partial": lambda value: partial(closing_over(2), value),
    "in a list": lambda value: [Policy(value)],
    "in a dictionary of a class of its own": Plan,
    "tensor": lambda value: {"a": (torch.tensor([1.0, value]),)},
    "method of an object": lambda value: Policy(value).__eq__,
    "range": lambda value: range(int(value)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_attributes_hold_is_told(name: str) -> None:
    def give(model: Any, value: Any) -> None:
        model.model.layers[0].own = GIVEN[name](value)

    one, again, other = with_values(give, 1.0, 1.0, 2.0)
    assert one == again != other


def test_a_second_reference_says_to_which_object() -> None:
    def give(model: Any, pattern: tuple[int, ...]) -> None:
        policies = [Policy(1.0), Policy(1.0)]
        model.owns = [*policies, *(policies[place] for place in pattern)]

    one, again, other = with_values(give, (0, 0), (0, 0), (0, 1))
    assert one == again != other


def reads_a_global(x: Any) -> Any:
    return x * FACTOR


def test_what_is_put_into_a_class_of_a_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama")
    found = []
    for value in (1.0, 1.0, 2.0):
        monkeypatch.setattr(type(model), "own", closing_over(value), raising=False)
        found.append(ToldModel(model).digest)
    one, again, other = found
    assert one == again != other


def test_globals_of_own_functions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama")
    model.own = reads_a_global
    before = ToldModel(model).digest
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert ToldModel(model).digest != before


def reads_the_environment(x: Any) -> Any:
    return x * float(os.environ["FACTOR"])


class Slots:
    __slots__ = ("scale",)


@pytest.mark.parametrize("value", [reads_the_environment, Slots(), numpy.ones(2), object(), [0] * MOST], ids=range(5))
def test_what_cannot_be_told_is_tried_each_time(value: Any, tried: list[nn.Module]) -> None:
    for _ in range(2):
        model: Any = tiny("llama")
        model.own = value
        proved(model)
    assert len(tried) == 2


def test_what_a_trial_was_asked_is_told(tried: list[nn.Module]) -> None:
    prove(tiny("llama"), "refuse", 64, keep=True)
    proved(tiny("llama"))
    assert len(tried) == 2


def test_a_method_of_a_class_that_is_replaced_has_it_tried_again(
    tried: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    proved(model := tiny("llama"))
    inherited = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
    replaced = lambda self, *args, **kwargs: inherited(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", replaced)
    proved(tiny("llama"))
    assert len(tried) == 2


def test_caches_of_transformers_are_told(tried: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    proved(tiny("llama"))
    update = DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda self, *args, **kwargs: update(self, *args, **kwargs))
    proved(tiny("llama"))
    assert len(tried) == 2


class OtherAlone(Small):
    """Something else of one token."""

    def forward(self, input_ids: Tensor) -> Any:
        found = self.head(self.embed(input_ids))
        return found * 2 if input_ids.shape[1] == 1 else found


def test_what_is_refused_is_not_kept(tried: list[nn.Module], own_folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(RefusedError):
            proved(OtherAlone().eval())
    assert len(tried) == 2 and not list(own_folder.glob(f"*{ENDING}"))


def test_a_file_that_is_not_whole_has_it_tried_again(tried: list[nn.Module], own_folder: Path) -> None:
    proved(tiny("llama"))
    (file,) = own_folder.glob(f"*{ENDING}")
    file.write_bytes(b"")
    proved(tiny("llama"))
    assert len(tried) == 2


PROCESS = """
import sys
from pathlib import Path
from selective_compile import isolation, kept_files
from tests.models import tiny

tried = []
trials = isolation.departs_in_use
isolation.departs_in_use = lambda *arguments: tried.append(1) or trials(*arguments)
kept_files.cache_folder = lambda: Path(sys.argv[1])
isolation.prove(tiny("llama"), "refuse", keep=True)
print(len(tried))
"""


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Whose hashes of strings are others.  Not this one, where other tests have left something in classes."""
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    found = [
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True).stdout
        for _ in range(2)
    ]
    assert [lines.split()[-1] for lines in found] == ["1", "0"]
