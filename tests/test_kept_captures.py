"""A capture that is kept is the model's own, or it is not taken."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selective_compile import kept_captures, kept_files, programs
from selective_compile.capture import capture
from selective_compile.coverage.random_model import random_model
from selective_compile.kept_captures import ENDING, capture_once, save
from selective_compile.model_call import ATTENTION_MASK
from selective_compile.options import EngineConfig
from selective_compile.passes import RefusedError, rewrite
from selective_compile.same_logits import written_inputs
from tests.decoders import Small
from tests.models import tiny

FAMILIES = ("llama", "gemma3_text", "gpt2", "phi3", "gpt_neox")  # the engines of all others take kept ones, too
# A model whose code the tests can write to.
SOURCE = """
import torch
from torch import nn

class Own(nn.Module):
    scale, quiet, kinds = 2.0, 1.0, {"a": [1.0]}

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, input_ids):
        rows = self.embed(input_ids) * self.scale + self.shift
        if torch.compiler.is_dynamo_compiling() and self.quiet != 1.0:
            rows = rows * self.quiet
        return self.head(rows * self.kinds["a"][0])
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "selective_compile")
    return tmp_path / "selective_compile" / "captures"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    (tmp_path / "own_model_of_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made_of(importlib.import_module("own_model_of_test"))
    sys.modules.pop("own_model_of_test", None)


def made_of(module: types.ModuleType) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = module.Own()
    return model.eval()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured by tracing."""
    found: list[nn.Module] = []

    def noted(model: nn.Module) -> Any:
        found.append(model)
        return capture(model)

    monkeypatch.setattr(kept_captures, "capture", noted)
    return found


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_rewritten_as_what_was_traced(family: str, traced: list[nn.Module], own_folder: Path) -> None:
    first, second = tiny(family), tiny(family)
    graphs = []
    for model in (first, second):
        captured = capture_once(model)
        rewritten = rewrite(captured.module, captured.examples, paged=True, ones=ATTENTION_MASK)
        assert rewritten.flat is not None
        assert captured.read == graphs[0][2] if graphs else True
        weights = {id(weight): name for name, weight in model.named_parameters(remove_duplicate=False)}
        names = [weights.get(id(given.example)) for given in rewritten.flat.weights]
        graphs.append((rewritten.flat.module.code, names, captured.read, captured.max_tokens))
    assert traced == [first] and len(kept(own_folder)) == 1
    assert graphs[0] == graphs[1]


def test_what_is_kept_gives_the_models_logits(traced: list[nn.Module]) -> None:
    capture_once(tiny("qwen3"))
    model, ids = tiny("qwen3"), torch.arange(3, 15)[None]
    captured = capture_once(model)
    assert len(traced) == 1
    inputs = [
        12 if isinstance(example, torch.SymInt) else ids if example.shape == (1, 12) and number < 2 else example
        for number, example in enumerate(captured.examples)
    ]
    torch.testing.assert_close(captured.module(*inputs)[0], model(ids, use_cache=False).logits)


def of_instance(model: nn.Module) -> None:
    model.scale = 3.0  # type: ignore[assignment]


def of_class(model: nn.Module) -> None:
    type(model).scale = 3.0  # type: ignore[attr-defined]


def in_container(model: nn.Module) -> None:
    model.kinds["a"][0] = 4.0  # type: ignore[index, operator]


def seen_by_dynamo_alone(model: nn.Module) -> None:
    model.quiet = 5.0  # type: ignore[assignment]


def of_a_forward(model: nn.Module) -> None:
    own = model.forward
    model.forward = lambda input_ids: own(input_ids) * 2


def of_a_child(model: nn.Module) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model.head.__class__ = Doubled


def of_a_tie(model: nn.Module) -> None:
    model.head.weight = model.embed.weight  # type: ignore[union-attr]


def of_a_dtype(model: nn.Module) -> None:
    model.bfloat16()


def of_a_buffer(model: nn.Module) -> None:
    model.register_buffer("shift", torch.ones(1))


def of_a_function(model: nn.Module) -> None:
    nn.functional.linear, made = lambda x, w, b: made(x, w, b) + 1, nn.functional.linear  # type: ignore[assignment]


CHANGES = (
    of_instance,
    of_class,
    in_container,
    seen_by_dynamo_alone,
    of_a_forward,
    of_a_child,
    of_a_tie,
    of_a_dtype,
    of_a_buffer,
    of_a_function,
)


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_traced(
    change: Callable[[nn.Module], None], own: nn.Module, traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "linear", nn.functional.linear)  # as it is again afterwards
    capture_once(own)
    capture_once(own)
    assert len(traced) == 1
    change(own)
    capture_once(own)
    assert len(traced) == 2


def test_other_code_is_traced(own: nn.Module, traced: list[nn.Module]) -> None:
    """Even where it does the same: what it read may be other than what was read."""
    capture_once(own)
    module = sys.modules[type(own).__module__]
    assert module.__file__ is not None
    Path(module.__file__).write_text(SOURCE + "# another\n")
    capture_once(own)
    assert len(traced) == 2
    capture_once(made_of(importlib.reload(module)))
    assert len(traced) == 2  # the same operators, and by now that file


def test_other_values_of_weights_are_the_live_ones(own: nn.Module, traced: list[nn.Module]) -> None:
    capture_once(own)
    own.embed.weight = nn.Parameter(torch.zeros(11, 8))  # type: ignore[union-attr]
    captured = capture_once(own)
    assert len(traced) == 1 and any(example is own.embed.weight for example in captured.examples)  # type: ignore[union-attr]


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.held = nn.Embedding(11, 8), [torch.ones(8)]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids) * self.held[0]


def test_a_tensor_that_is_no_weight_is_not_kept(traced: list[nn.Module], own_folder: Path) -> None:
    model = WithConstant().eval()
    capture_once(model)
    capture_once(model)
    assert len(traced) == 2 and not kept(own_folder)


def test_a_broken_file_is_no_capture(own: nn.Module, traced: list[nn.Module], own_folder: Path) -> None:
    capture_once(own)
    (file,) = kept(own_folder)
    file.write_bytes(b"broken")
    capture_once(own)
    capture_once(own)
    assert len(traced) == 2


def test_a_folder_that_cannot_be_made_is_done_without(
    own: nn.Module, traced: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kept_files, "cache_folder", lambda: tmp_path / "file")
    capture_once(own)
    capture_once(own)
    assert len(traced) == 2


def test_the_oldest_go(own: nn.Module, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MOST", 2)
    for scale in (1.0, 2.0, 3.0):
        own.scale = scale  # type: ignore[assignment]
        capture_once(own)
    assert len(list(own_folder.iterdir())) == 2


def test_captures_are_kept_unless_it_is_asked_for_none(
    own_folder: Path, traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "step_program", lambda *_: None)  # nothing is compiled

    def start(**options: bool) -> int:
        """How many captures there are then."""
        programs.compile_step_program(tiny("llama"), EngineConfig(**options))
        return len(kept(own_folder))

    assert start(keep_captures=False) == start(keep_captures=False) == len(traced) == 0  # traced by `capture` itself
    assert [start(), len(traced), start(compile=False), len(traced)] == [1, 1, 1, 1]


def test_a_model_in_training_mode_is_refused(own: nn.Module) -> None:
    capture_once(own)
    with pytest.raises(ValueError, match="evaluation mode"):
        capture_once(own.train())


class WithMark(Small):
    """Of the weight, as widths of muP are."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.head.weight.times = times  # type: ignore[assignment]

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * getattr(self.head.weight, "times", 1.0))


def test_what_python_puts_on_a_weight_is_told(traced: list[nn.Module]) -> None:
    for times in (1.0, 1.0, 2.0):
        capture_once(WithMark(times).eval())
        torch._dynamo.reset()
    assert len(traced) == 2


LIMIT = [20]


class WithLength(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        return self.head(rows * 0.5 if int(input_ids.shape[1]) > limit() else rows)


class WithFactor(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids) * (1 + len(input_ids[0]) // limit()))


def limit() -> int:
    return LIMIT[0]


@pytest.mark.parametrize("kind", [WithLength, WithFactor])
def test_what_a_trace_read_of_its_globals_must_be_as_it_was(
    kind: type[Small], traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (20, 20, 4):
        monkeypatch.setattr(sys.modules[__name__], "LIMIT", [limit])
        with contextlib.suppress(RefusedError):  # it is for some lengths alone
            capture_once(kind().eval())
    assert len(traced) == 2


class AsksForDynamo(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.embed(input_ids)
        return self.head(rows * limit() if torch.compiler.is_dynamo_compiling() else rows)


def test_a_trace_that_is_not_what_the_model_computes_is_not_kept(own_folder: Path) -> None:
    capture_once(AsksForDynamo().eval())
    assert not kept(own_folder)


def test_a_trace_with_sizes_that_values_tell_is_kept(traced: list[nn.Module]) -> None:
    """As how many tokens each expert has."""
    for _ in range(2):
        capture_once(random_model("jetmoe"))
    assert len(traced) == 1


class SetsUp(Small):
    """Changes a weight when it is first called."""

    how, ready = "", False

    def forward(self, input_ids: Tensor) -> Tensor:
        if not self.ready:
            weight = self.head.weight
            with torch.no_grad():
                if self.how == "in place":
                    weight.mul_(2)
                elif self.how == "a part":
                    weight[1:] = weight[1:] * 2
                elif self.how == "as an operator":
                    weight *= 2
                elif self.how == "given to write to":
                    torch.mul(weight, 2, out=weight)
                else:
                    weight.data = weight.data * 2
            self.ready = True
        return self.head(self.embed(input_ids))


@pytest.mark.parametrize("how", ["in place", "a part", "as an operator", "given to write to", "other memory"])
def test_a_trace_that_changes_weights_is_neither_kept_nor_tried(how: str, own_folder: Path) -> None:
    """What a first call sets up is set up once; that trace is kept which is behind it."""
    model, called = SetsUp().eval(), SetsUp().eval()
    model.how = called.how = how
    called(torch.tensor([[1, 2, 3]]))
    before = model.head.weight.detach().clone()
    with contextlib.suppress(RefusedError):  # where Dynamo cannot follow it
        captured = capture(model)
        with pytest.raises(ValueError, match="must write to nothing"):
            save(captured, model, own_folder, "parts")
    assert not kept(own_folder) and torch.equal(model.head.weight, before) and not model.ready
    with contextlib.suppress(RefusedError):
        assert not written_inputs(capture_once(model), model) and model.ready
    assert torch.equal(model.head.weight, called.head.weight if model.ready else before)


def test_a_file_of_which_a_bit_is_another_is_not_taken(
    own: nn.Module, traced: list[nn.Module], own_folder: Path
) -> None:
    capture_once(own)
    (file,) = kept(own_folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    capture_once(own)
    assert len(traced) == 2


def test_a_folder_that_others_can_write_to_is_not_used(
    own: nn.Module, traced: list[nn.Module], own_folder: Path
) -> None:
    capture_once(own)
    own_folder.chmod(0o777)
    capture_once(own)
    assert len(traced) == 2


def test_a_folder_that_cannot_be_written_is_of_use(
    own: nn.Module, traced: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_once(own)

    def refused(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "touch", refused)
    capture_once(own)
    assert len(traced) == 1
