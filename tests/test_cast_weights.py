"""Weights that are cast once, as under autocast: every change of the model's own is seen."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import selective_compile as sc
from selective_compile import passes
from selective_compile.backend import compile_step_program
from selective_compile.cast_weights import CastWeights
from selective_compile.options import EngineConfig
from selective_compile.passes.flat_graph import Cast
from selective_compile.runtime.engine import Engine
from selective_compile.step_program import StepProgram
from selective_compile.tensor_state import states
from tests.models import tiny
from tests.runtime.played_stream import TapedStream
from tests.test_joined_weights import (
    CONFIG,
    PROMPT,
    add_in_place,
    assign,
    give_other_memory,
    layer_of,
    load,
    optimise,
    tokens_of,
)


@pytest.fixture(autouse=True)
def mixed_precision() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def small() -> Any:
    """With tokens that change where a weight does."""
    return tiny("llama", num_hidden_layers=1, initializer_range=0.3)


def cast_program(model: nn.Module, config: EngineConfig = CONFIG) -> StepProgram:
    program = compile_step_program(model, config)
    assert isinstance(program, StepProgram) and program._flat.cast
    return program


def engine_of(model: Any, *, captured: bool = False) -> Engine:
    stream = TapedStream(captures=True) if captured else None
    return Engine(model, CONFIG, program=cast_program(model), stream=stream)


def alone(model: Any, *, captured: bool = False) -> list[int]:
    """By a program that has seen no other weights; sums of bfloat16 are others where steps are filled up."""
    return tokens_of(engine_of(model, captured=captured))


CHANGES = (add_in_place, load, assign, give_other_memory, optimise)


@pytest.mark.parametrize("captured", [False, True])
def test_a_change_is_seen_by_the_next_step(captured: bool) -> None:
    """Of an engine on the CPU, and of one whose captured steps know nothing but memory."""
    model = small()
    stream = TapedStream(captures=True) if captured else None
    program = cast_program(model)
    if captured:
        program.cast_weights = CastWeights(program._flat.cast, in_place=True)
        program.gather_weights()
    engine = Engine(model, CONFIG, program=program, stream=stream)
    addresses = [tensor.data_ptr() for tensor in program.cast_weights.operands]
    before = tokens_of(engine)
    for change in CHANGES:
        change(model)
        after = tokens_of(engine)
        assert after == alone(model, captured=captured) and after != before, change
        before = after
    assert ([tensor.data_ptr() for tensor in program.cast_weights.operands] == addresses) == captured
    assert stream is None or stream.replayed > 3 * len(CHANGES)


@pytest.mark.parametrize("captured", [False, True])
def test_values_put_in_place_through_data_are_used_once_what_was_computed_is_dropped(captured: bool) -> None:
    model = small()
    engine = engine_of(model, captured=captured)
    before = tokens_of(engine)
    layer_of(model).weight.data.neg_()
    assert tokens_of(engine) == before  # as docs/limits.md says: nothing tells of it
    engine.drop_computed()
    assert tokens_of(engine) == alone(model, captured=captured) != before


@pytest.mark.gpu
def test_captured_steps_of_a_gpu_read_what_was_cast_anew() -> None:
    model, config = small().cuda(), EngineConfig(compile=False, max_kv_tokens=4096, max_requests=4)
    with torch.autocast("cuda", torch.bfloat16):
        program = cast_program(model, config)
        engine = Engine(model, config, program=program)
        engine.warm_up()
        addresses = [tensor.data_ptr() for tensor in program.cast_weights.operands]
        before = tokens_of(engine)
        for change in (add_in_place, give_other_memory):
            change(model)
            after = tokens_of(engine)
            assert after == tokens_of(Engine(model, config, program=cast_program(model, config))) != before, change
            before = after
        assert [tensor.data_ptr() for tensor in program.cast_weights.operands] == addresses
    assert engine.stats().captured > 0


class Wide(nn.Module):
    """A layer whose weight has more bits than its rows."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(own.weight.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def test_no_step_casts_where_other_weights_were_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "REWRITES", passes.REWRITES[:2])  # linear layers stay what they are, as on a GPU
    model: Any = tiny("llama").to(torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.o_proj = Wide(layer.self_attn.o_proj)
    with torch.autocast("cpu", enabled=False):
        program = cast_program(model)
    assert program._flat.joined

    def are_kept() -> bool:
        seen = program.weights.seen
        cast = zip(program.cast_weights.of(*seen), program.cast_weights.operands, strict=True)
        joined = zip(program.joined_weights.of(*seen), program.joined_weights.of(*seen), strict=True)
        return all(one is other for one, other in (*cast, *joined))

    assert are_kept()
    give_other_memory(model)
    program.weights.version()
    assert program.gather_weights()
    assert are_kept()


def test_generate_sees_values_put_in_place_through_data() -> None:
    model = small()

    def generated() -> list[int]:
        ids = torch.tensor([PROMPT])
        return sc.generate(model, ids, max_new_tokens=8, do_sample=False, engine_config=CONFIG).tolist()[0][5:]  # type: ignore[no-any-return]

    before = generated()
    layer_of(model).weight.data.neg_()
    assert generated() == alone(model) != before


def test_steps_read_what_was_cast_and_the_log_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    model = small()
    with caplog.at_level(logging.INFO, "selective_compile.cast_weights"):
        program = cast_program(model)
    assert "8 weights are cast once" in caplog.text
    operands = program.cast_weights.operands
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert sum(each.nbytes for each in operands) * 2 == sum(weight.nbytes for weight in linear)
    engine = Engine(model, CONFIG, program=program)
    tokens_of(engine)
    assert all(a is b for a, b in zip(program.cast_weights.of(*program.weights.seen), operands, strict=True))


def test_programs_without_autocast_cast_nothing() -> None:
    with torch.autocast("cpu", enabled=False):
        program = compile_step_program(small(), CONFIG)
    assert isinstance(program, StepProgram) and program._flat.cast == ()


def some_weights(*, in_place: bool = False) -> tuple[list[Tensor], CastWeights]:
    cast = CastWeights([Cast(place, torch.bfloat16) for place in range(3)], in_place=in_place)
    return [torch.randn(4, 5) for _ in range(3)], cast


def test_a_step_reads_weights_that_are_others_than_at_the_last_look() -> None:
    weights, cast = some_weights()
    cast.gather(weights, states(weights))
    weights[1] = torch.randn(4, 5)
    found = cast.of(weights, states(weights))
    assert torch.equal(found[1], weights[1].bfloat16()) and found[0] is not cast.operands[0]


def test_the_old_ones_go_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, cast = some_weights()
    cast.gather(weights, states(weights))
    old = [weakref.ref(tensor) for tensor in cast.operands]
    alive: list[int] = []
    make = CastWeights._cast
    monkeypatch.setattr(
        CastWeights, "_cast", lambda *given: (alive.append(sum(one() is not None for one in old)), make(*given))[1]
    )
    weights[2].mul_(2)
    cast.gather(weights, states(weights))
    assert alive == [0] and torch.equal(cast.operands[2], weights[2].bfloat16())


def of_another_size(weights: list[Tensor]) -> None:
    weights[1].data = torch.randn(3, 7)


def test_a_cast_that_fails_leaves_nothing_that_is_half_made() -> None:
    weights, cast = some_weights(in_place=True)
    cast.gather(weights, states(weights))
    of_another_size(weights)
    with pytest.raises(RuntimeError):
        cast.gather(weights, states(weights))
    assert cast.operands == ()


@pytest.mark.parametrize("change", [lambda weight: weight, Tensor.clone], ids=["from the start", "later"])
def test_of_weights_in_inference_mode_none_are_kept(change: Callable[[Tensor], Tensor]) -> None:
    weights, cast = some_weights()
    with torch.inference_mode():
        weights[1] = change(torch.randn(4, 5))
        cast.gather(weights, states(weights))
        assert cast.operands == ()
        weights[1].neg_()
        assert torch.equal(cast.of(weights, states(weights))[1], weights[1].bfloat16())


def test_nothing_is_made_in_inference_mode() -> None:
    model = small()
    with torch.inference_mode():
        program = cast_program(model)
        tokens_of(Engine(model, CONFIG, program=program))
    assert not any(tensor.is_inference() for tensor in program.cast_weights.operands)
