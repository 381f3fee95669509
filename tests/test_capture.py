"""Capture: one graph without running the model, and none where the model branches on the number of tokens."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging

import selective_compile as sc
from selective_compile.capture import capture
from selective_compile.model_facts import declared_positions
from tests.decoders import VOCABULARY, Decoder
from tests.exactness import engine_error, step_program
from tests.models import tiny

logger = logging.get_logger(__name__)


class Watched(nn.Module):
    """Counts the times its forward runs outside of tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.runs += 1
        return x


@functools.lru_cache
def halves() -> float:
    return 0.5


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * halves()


def test_cached_functions_are_traced_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Decoder(layers=1, mix=Halved()))


class Telling(nn.Module):
    """Tells people something in each forward, as older models do by `PreTrainedConfig.use_return_dict`."""

    def forward(self, x: Tensor) -> Tensor:
        logger.warning_once("once")  # type: ignore[attr-defined]
        logger.info("%d tokens", 3)
        warnings.warn("a warning", stacklevel=2)
        print("a line")
        return x


def test_what_code_tells_people_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Decoder(layers=1, mix=Telling()))
    assert capsys.readouterr().out == ""


def test_model_is_not_run_and_not_changed() -> None:
    watched = Watched()
    model = Decoder(layers=1, mix=watched)
    before = {name: (id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    forward = model.forward
    captured = capture(model)
    assert watched.runs == 0
    assert model.forward == forward and not model.training
    assert {name: (id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()} == before
    weights = [value for value in captured.examples if isinstance(value, nn.Parameter)]
    assert {id(value) for value in weights} == {id(value) for value in model.parameters()}


def test_configuration_of_a_hugging_face_model_stays() -> None:
    model = tiny("llama")
    before = model.config.to_dict()
    capture(model)
    assert model.config.to_dict() == before


def test_training_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"evaluation mode, got training mode"):
        capture(Decoder(layers=1).train())


def longer_is_doubled(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 700 else x


def odd_is_doubled(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] % 2 else x


def one_length_is_doubled(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 777 else x


def test_branch_on_the_number_of_tokens_is_refused() -> None:
    """A request goes through all lengths as it grows, and the engine has one graph."""
    with pytest.raises(sc.RefusedError) as refused:
        step_program(Decoder(layers=1, mix=odd_is_doubled))
    (refusal,) = refused.value.refusals
    assert "takes this branch only where" in refusal.reason
    assert "in odd_is_doubled" in refusal.source_line or "x.shape[1]" in refusal.source_line


@pytest.mark.parametrize(("branch", "last"), [(longer_is_doubled, 700), (one_length_is_doubled, 776)])
def test_branch_at_a_length_bounds_requests(branch: Callable[[Tensor], Tensor], last: int) -> None:
    assert step_program(Decoder(layers=1, mix=branch, positions=first_ten)).max_positions == last


def windows_backwards(x: Tensor) -> Tensor:
    """Of each token the sum of the last four; which of two equal strides of the copy is first, its sizes tell."""
    return F.pad(x.transpose(1, 2), (3, 0)).unfold(-1, 4, 1).flip(-1).sum(-1).transpose(1, 2)


def few_are_doubled(x: Tensor) -> Tensor:
    windows = windows_backwards(x)
    return windows * 2 if x.shape[1] < 4 else windows


def test_how_a_copy_lies_in_memory_is_no_branch() -> None:
    """The same question as the model's own is one."""
    assert capture(Decoder(layers=1, mix=windows_backwards)).max_tokens is None
    with pytest.raises(sc.RefusedError, match=r"takes this branch only where .* >= 4"):
        capture(Decoder(layers=1, mix=few_are_doubled))


class Scaled(nn.Module):
    """By a tensor that is a plain attribute."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.scale = torch.linspace(1, 2, groups)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (len(self.scale), -1)) * self.scale[:, None]).flatten(-2)


def test_models_of_one_code_may_have_tensors_of_other_sizes() -> None:
    """Of which Dynamo would take the second one's for a number that may be any."""
    for groups in (4, 8, 16):
        capture(Decoder(layers=1, mix=Scaled(groups)))


def causal_if_several(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As transformers 4.36 has it."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=mask is None and q.shape[2] > 1)
    return mixed.transpose(1, 2).flatten(2)


def test_what_is_true_of_every_length_is_no_symbol() -> None:
    model = Decoder(layers=1, attend=causal_if_several, mask=lambda ids, attention_mask: None)
    assert engine_error(model, vocabulary=VOCABULARY) < 1e-4


class ByTables(nn.Module):
    """Plain attributes of two and three dimensions, one of them read by the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(-1, 1, 64 * 32).view(64, 32)
        self.scale = torch.full((1, 1, 32), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.table[: x.shape[1]]


def test_tensors_that_are_plain_attributes_are_weights_of_any_rank() -> None:
    model = Decoder(layers=1, mix=ByTables())
    assert engine_error(model, vocabulary=VOCABULARY) < 1e-4
    (table,) = (module for module in model.modules() if isinstance(module, ByTables))
    table.table *= -2  # its values are read at each step
    assert engine_error(model, vocabulary=VOCABULARY) < 1e-4


class Inherited(nn.Module):
    """Its forward asks something of the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x * 2


class Inheriting(Inherited):
    pass


def test_a_method_that_a_module_inherits_is_its_own() -> None:
    """What is refused lies in the module, and not in the block around it, whose attention need not be isolated."""
    with pytest.raises(sc.RefusedError) as refused:
        capture(Decoder(layers=1, mix=Inheriting()))
    assert refused.value.refusals[0].module.endswith("mix")


def by_values(x: Tensor) -> Tensor:
    for sign in (x > 0).to(torch.int64).unique().tolist():
        x = x + sign
    return x


def test_loop_over_values_is_refused() -> None:
    """Dynamo lets its error about the loop's unknown length through as it is."""
    with pytest.raises(sc.RefusedError) as refused:
        step_program(Decoder(layers=1, mix=by_values))
    (refusal,) = refused.value.refusals
    assert "Dynamo cannot trace the model to one graph" in refusal.reason and ".tolist()" in refusal.source_line


def first_ten(ids: Tensor) -> Tensor:
    """Positions that never leave their table."""
    return torch.arange(ids.shape[1]).clamp(max=9)


@pytest.mark.parametrize(("declared", "known"), [(512, 512), (-1, None), (None, None)])
def test_positions_that_a_configuration_declares(declared: int | None, known: int | None) -> None:
    model = Decoder(layers=1)
    model.config = SimpleNamespace(max_position_embeddings=declared)  # type: ignore[assignment]
    assert declared_positions(model) == known
    assert declared_positions(Decoder(layers=1)) is None


class Assigning(Decoder):
    """Its forward assigns a buffer, as it is or changed, to the buffer's own name, as CTRL does."""

    def __init__(self, change: float) -> None:
        super().__init__(layers=1)
        self.change = change
        self.shift = nn.Buffer(torch.full((1,), 0.5), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.shift = self.shift.to(torch.float32) if not self.change else self.shift + self.change
        return super().forward(input_ids, attention_mask) + self.shift


def test_forward_may_assign_a_buffer_to_its_own_name() -> None:
    model = Assigning(0.0).eval()
    assert engine_error(model, vocabulary=97) < 1e-4
    assert isinstance(model.shift, nn.Buffer) and model.shift.item() == 0.5


def test_forward_that_stores_something_else_is_refused() -> None:
    model = Assigning(1.0).eval()
    with pytest.raises(sc.RefusedError, match=r"store nothing in the model, got a value that it stores"):
        step_program(model)
    assert model.shift.item() == 0.5


class OfItsTokens(nn.Module):
    """A table for exactly as many tokens as a call has, of what the first call with so many has."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.length:
            self.length, self.table = x.shape[1], x.cos()
        return x * self.table


def test_what_a_forward_stores_is_named() -> None:
    table = OfItsTokens()
    model = Decoder(layers=1, mix=table)
    stored = r"got 2 values that it stores in blocks\.0\.mix\.length, blocks\.0\.mix\.table"
    with pytest.raises(sc.RefusedError, match=stored):
        step_program(model)
    assert table.length == 0


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


KEEPING_DYNAMO_OFF: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "disable": lambda: torch._dynamo.config.patch(disable=True),
    "mode": SeesOperators,
    **{name: partial(torch.compiler.set_stance, name) for name in ("force_eager", "eager_on_recompile")},
    "fail_on_recompile": partial(torch.compiler.set_stance, "fail_on_recompile"),
}


@pytest.mark.parametrize("setting", KEEPING_DYNAMO_OFF)
def test_what_a_user_sets_for_other_code_does_not_keep_dynamo_from_it(setting: str) -> None:
    model = Decoder(layers=1)
    expected = [str(node.target) for node in capture(model).module.graph.nodes]
    torch._dynamo.reset()
    with KEEPING_DYNAMO_OFF[setting]():
        assert [str(node.target) for node in capture(model).module.graph.nodes] == expected


def test_where_dynamo_is_off_for_the_process_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ValueError, match="Dynamo must be on to trace the model, got TORCHDYNAMO_DISABLE=1"):
        capture(Decoder(layers=1))


def test_an_engine_computes_as_under_the_autocast_that_it_was_made_under() -> None:
    """Whatever is on where it runs."""
    model, config, in_half = tiny("gpt2"), sc.EngineConfig(compile=False), torch.autocast("cpu", dtype=torch.bfloat16)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "logprobs": True}
    plain = sc.Engine(model, config)
    expected = plain.submit([1, 2, 3], **asked).result().logprobs
    with in_half:
        engine = sc.Engine(model, config)
        assert plain.submit([1, 2, 3], **asked).result().logprobs == expected
        own = model(torch.tensor([[1, 2, 3]])).logits[0, -1].float().log_softmax(-1).amax().item()
        found = engine.submit([1, 2, 3], **asked).result().logprobs
        assert torch.is_autocast_enabled("cpu")
    assert engine.submit([1, 2, 3], **asked).result().logprobs == found != expected
    assert found is not None and found[0] == pytest.approx(own, abs=0.01)


def test_dynamo_says_nothing_of_its_own_settings(caplog: pytest.LogCaptureFixture) -> None:
    capture(Decoder(layers=1))
    assert [record for record in caplog.records if record.name.startswith("torch._dynamo")] == []


STRETCHED: dict[str, Callable[[int], float]] = {
    "more": lambda length: max(1.0, length / 20),
    "less": lambda length: min(2.0, length / 20),
}


@pytest.mark.parametrize("name", STRETCHED)
def test_a_number_made_of_the_length_is_refused_by_name(name: str) -> None:
    scale = STRETCHED[name]
    model = Decoder(layers=1, mix=lambda x: x * (torch.arange(x.shape[1]) / scale(x.shape[1]))[:, None])
    with pytest.raises(sc.RefusedError, match="number of tokens"):
        step_program(model)
