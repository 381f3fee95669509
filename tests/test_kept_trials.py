"""A trial that a model has passed is not run again while nothing has changed that a call of it could depend on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import isolation, kept_files
from selective_compile.isolation import prove
from selective_compile.kept_trials import ENDING
from selective_compile.passes import Refusal, RefusedError
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


CHANGES = (in_place, uncounted, moved, an_attribute, of_the_configuration, of_generation, of_the_object, buffer)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_change_has_it_tried_again(change: Callable[[Any], None], tried: list[nn.Module]) -> None:
    proved(tiny("llama"))
    changed = tiny("llama")
    change(changed)
    proved(changed)
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
from selective_compile import kept_files
from selective_compile.isolation import prove
from tests.models import tiny

kept_files.cache_folder = lambda: Path(sys.argv[1])
prove(tiny("llama"), "refuse", keep=True)
"""


def test_another_process_finds_it(tmp_path: Path, tried: list[nn.Module], own_folder: Path) -> None:
    """Whose hashes of strings are others."""
    subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path)], check=True, cwd=Path(__file__).parents[1])
    proved(tiny("llama"))
    assert not tried and len(list(own_folder.glob(f"*{ENDING}"))) == 1
