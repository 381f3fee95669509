"""What Dynamo guards of a trace, told from one process to the next: each change is seen by that alone."""

from __future__ import annotations

import abc
import enum
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import kept_captures, kept_files
from selective_compile.capture import capture
from selective_compile.kept_captures import capture_once
from tests.decoders import Small
from tests.models import tiny

FACTOR = 2.0
TABLE: dict[str, Any] = {"factor": 2.0}
NAMES = {"one", "two"}


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


def doubled(rows: Tensor) -> Tensor:
    return rows * 2


def tripled(rows: Tensor) -> Tensor:
    return rows * 3


def closed_over(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows * factor


class Wider:
    width = 1

    def times(self) -> int:
        return 1


class Likes(abc.ABC):
    """Of which others may become a kind."""

    @abc.abstractmethod
    def liked(self) -> None: ...


class Settings(Wider):
    def __init__(self) -> None:
        self.kind = Kind.PLAIN
        self.sizes = [1, 2]

    @property
    def count(self) -> int:
        return len(self.sizes)


class Reads(Small):
    """Reads whatever a forward may, and computes the same of all of it."""

    by_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.function, self.closed = Settings(), doubled, closed_over(2.0)
        self.constant: Any = lambda first, second: (first - second) * abs(len(b"a"))
        self.parts = nn.ModuleList([nn.Identity() for _ in range(3)])

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        rows = self.function(self.closed(self.embed(input_ids))) * FACTOR * TABLE["factor"] * scale * self.by_class
        if "other" in TABLE or "three" in NAMES or hasattr(self, "late") or self.settings.kind is Kind.DOUBLED:
            rows = rows * 7
        for part in self.parts:
            rows = part(rows)
        if os.environ.get("OF_THIS_TEST") == "1" or torch.get_default_dtype() == torch.float64:
            rows = rows * 5
        rows = rows * self.settings.times() * self.settings.width * self.constant(first=3, second=1)
        return self.head(rows * self.settings.count * (3 if isinstance(self.settings, Likes) else 1) * len(self.parts))


@pytest.fixture
def traced(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured by tracing; logits tell nothing."""
    found: list[nn.Module] = []

    def noted(model: nn.Module) -> Any:
        found.append(model)
        return capture(model)

    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kept_captures, "capture", noted)
    monkeypatch.setattr(kept_captures, "gives_logits_of", lambda *_: True)
    return found


def of_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "FACTOR", 3.0)


def in_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE, "factor", 3.0)


def into_global(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE, "other", 3.0)


def into_set(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "NAMES", {*NAMES, "three"})


def of_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.function = tripled


def of_closure(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.closed = closed_over(3.0)


def of_code(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doubled, "__code__", tripled.__code__)


def of_default(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads.forward, "__defaults__", (2.0,))


def of_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "by_class", 2.0)


def of_enum(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.settings.kind = Kind.DOUBLED


def of_list(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.settings.sizes.append(3)


def of_property(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Settings, "count", property(lambda self: 9))


def of_new_attribute(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.late = 1


def of_modules(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.parts = model.parts[:2]


def of_inherited_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wider, "times", lambda self: 2)


def of_inherited_value(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wider, "width", 2)


def of_new_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Settings, "times", lambda self: 2, raising=False)


def of_constant(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.constant = lambda first, second: (first - second) * abs(len(b"bc"))


def of_order(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.constant = lambda second, first: (second - first) * abs(len(b"a"))


def of_every_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    called = nn.Module.__call__
    patch.setattr(nn.Module, "__call__", lambda self, *args, **given: called(self, *args, **given))


def of_builtin(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "abs", lambda value: 5, raising=False)


def of_environment(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("OF_THIS_TEST", "1")


def of_default_dtype(model: Any, patch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)


CHANGES = (
    of_global,
    in_global,
    into_global,
    into_set,
    of_function,
    of_closure,
    of_code,
    of_default,
    of_class,
    of_enum,
    of_list,
    of_property,
    of_new_attribute,
    of_modules,
    of_inherited_method,
    of_inherited_value,
    of_new_method,
    of_constant,
    of_order,
    of_every_module,
    of_builtin,
    of_environment,
    of_default_dtype,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_other_than_it_was_is_traced(
    change: Callable[[Any, pytest.MonkeyPatch], None], traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_once(Reads().eval())
    capture_once(Reads().eval())
    assert len(traced) == 1
    model = Reads().eval()
    try:
        change(model, monkeypatch)
        capture_once(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(traced) == 2


@torch._dynamo.assume_constant_result
def constant() -> int:
    return 3


class ReadsConstant(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * constant())


class Named(Small):
    """Reads a variable of the environment whose name does not stand where it is read."""

    name = "OF_THIS_TEST"

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * (2 if os.environ.get(self.name) else 1))


class Made(Small):
    part = "TEST"

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * (2 if os.environ.get(f"OF_THIS_{self.part}") else 1))


@pytest.mark.parametrize("kind", [ReadsConstant, Named, Made])
def test_what_cannot_be_told_in_another_process_is_not_kept(kind: type[Small], traced: list[nn.Module]) -> None:
    for _ in range(2):
        capture_once(kind().eval())
    assert len(traced) == 2


def test_a_class_that_is_said_to_be_of_a_kind_is_another(traced: list[nn.Module]) -> None:
    capture_once(Reads().eval())
    Likes.register(Settings)  # for the rest of the process
    capture_once(Reads().eval())
    assert len(traced) == 2


def test_code_is_that_of_the_module_that_is_loaded(
    traced: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two modules of one name, both still where they were, of which the second one computes something else."""
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper_of_test.py").write_text(f"class Helper:\n    def of(self):\n        return {number}\n")
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("helper_of_test", None)
        helper = importlib.import_module("helper_of_test").Helper()
        capture_once(WithHelper(helper).eval())
        assert len(traced) == number


class WithHelper(Small):
    def __init__(self, helper: Any) -> None:
        super().__init__()
        self.helper = helper

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * self.helper.of())


def test_the_order_in_which_models_were_made_does_not_matter(traced: list[nn.Module]) -> None:
    """Transformers keeps a table of them, of which a model reads its own line."""
    capture_once(tiny("llama"))
    tiny("gpt2"), tiny("olmo2")
    capture_once(tiny("llama"))
    assert len(traced) == 1


def test_under_a_mode_nothing_is_kept(traced: list[nn.Module]) -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    capture_once(Reads().eval())
    with Mode():
        capture_once(Reads().eval())
    assert len(traced) == 2
