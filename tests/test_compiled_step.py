"""A compiled step whose native calls are made by themselves: the same bits, or they are given up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import Program
from selective_compile.call_sequence import CallSequence
from selective_compile.compiled_step import CompiledStep, native_kernels_run
from selective_compile.programs import compile_step_program
from selective_compile.runtime import StepError
from tests.models import tiny
from tests.oracle import generated_alone

CONFIG = sc.EngineConfig(max_kv_tokens=1024, token_budget=32, max_requests=8)

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="there is no C++ compiler here")


@pytest.fixture(scope="module")
def served() -> tuple[Any, Program]:
    """A model, and its program, whose first steps are behind it."""
    model = tiny("qwen3", num_hidden_layers=2)
    program = compile_step_program(model, CONFIG)
    step = program._run
    assert isinstance(step, CompiledStep) and isinstance(step.sequence, CallSequence)
    assert step._agreed == {5, 10}
    return model, program


def generated(model: Any, program: Program, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    engine = sc.Engine(model, CONFIG, program=program)
    handles = [engine.submit(prompt, max_new_tokens=new, do_sample=False) for prompt in prompts]
    while engine.step():
        pass
    return [list(handle.result().tokens) for handle in handles]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (1 + 7 * n % 23,), generator=dice).tolist() for n in range(count)]


class BothWays:
    """Compares the bits in each step."""

    def __init__(self, step: CompiledStep) -> None:
        self.step, self.rows = step, set[int]()

    def __call__(self, arguments: Sequence[Tensor], num_weights: int, seen: Any) -> Tensor:
        assert self.step.sequence is not None
        found = self.step.sequence(arguments, seen)
        wanted = self.step._as_compiled(arguments)
        assert found.shape == wanted.shape and torch.equal(found, wanted)
        self.rows.add(arguments[num_weights].shape[-1])
        return found


def test_every_step_has_the_same_bits(served: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, program = served
    both = BothWays(program._run)
    monkeypatch.setattr(program, "_run", both)
    found = generated(model, program, prompts(13), 9)
    assert len(both.rows) > 4 and {2, 32} < both.rows
    assert found == [generated_alone(model, prompt, 9) for prompt in prompts(13)]


def test_weights_are_live(served: tuple[Any, Any]) -> None:
    model, program = served
    weight = model.model.layers[0].mlp.down_proj.weight
    kept = weight.data
    asked = prompts(3, seed=1)
    before = generated(model, program, asked, 6)
    try:
        with torch.no_grad():
            weight.mul_(-3)
        assert generated(model, program, asked, 6) == [generated_alone(model, prompt, 6) for prompt in asked] != before
        weight.data = torch.randn_like(kept)
        assert generated(model, program, asked, 6) == [generated_alone(model, prompt, 6) for prompt in asked] != before
    finally:
        weight.data = kept.div_(-3)
    assert generated(model, program, asked, 6) == before


def test_engines_in_several_threads_share_it(served: tuple[Any, Any]) -> None:
    model, program = served
    asked = [prompts(4, seed=number) for number in range(6)]
    alone = [generated(model, program, each, 8) for each in asked]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda each: generated(model, program, each, 8), asked)) == alone


def test_calls_that_give_other_logits_are_given_up(
    served: tuple[Any, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, program = served
    step = CompiledStep(program._run._run, program._flat.example_inputs, native=True)
    monkeypatch.setattr(program, "_run", step)
    engine = sc.Engine(served[0], CONFIG, program=program)
    handle = engine.submit([5, 6, 7], max_new_tokens=4, do_sample=False)
    engine.step()
    right = step.sequence
    assert right is not None
    monkeypatch.setattr(step, "sequence", lambda arguments, seen: right(arguments, seen) + 1e-6)
    with caplog.at_level(logging.WARNING):
        while engine.step():
            pass
    assert step.sequence is None and "other logits" in caplog.text
    assert list(handle.result().tokens) == generated_alone(served[0], [5, 6, 7], 4)


def test_steps_beside_one_another_and_one_that_fails_spoil_no_look(
    served: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, program = served
    asked = prompts(4, seed=9)
    expected = generated(model, program, asked, 5)
    run, beside = program._run._run, CompiledStep(program._run._run, program._flat.example_inputs, native=False)
    failures = [RuntimeError("no memory")]

    def ran(*arguments: Tensor) -> Any:
        if failures:
            raise failures.pop()
        if not step.sequence:
            beside([argument.clone() for argument in arguments], 0, ())
        return run(*arguments)

    step = CompiledStep(ran, program._flat.example_inputs, native=True)
    monkeypatch.setattr(program, "_run", step)
    with pytest.raises(StepError, match="no memory"):
        generated(model, program, asked, 5)
    assert generated(model, program, asked, 5) == expected
    assert step.sequence is not None


def test_what_is_not_followed_runs_as_it_was_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def ran(*arguments: Tensor) -> tuple[Tensor]:
        return (arguments[0] + 1,)

    step = CompiledStep(ran, [torch.zeros(2)], native=True)
    with caplog.at_level(logging.INFO, logger="selective_compile.compiled_step"):
        for number in range(3):
            assert torch.equal(step([torch.full((2,), float(number))], 0, ()), torch.full((2,), number + 1.0))
    assert step.sequence is None and caplog.text.count("0 compiled graphs") == 1
