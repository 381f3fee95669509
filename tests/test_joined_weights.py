"""Weights that lie one behind the other for the graph: they stay the model's own, and every change of them is seen."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import selective_compile as sc
from selective_compile import joined_weights, passes
from selective_compile.backend import compile_step_program
from selective_compile.joined_weights import JoinedWeights, lie_in_order
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.step_loop import StepLoop
from selective_compile.step_program import StepProgram
from selective_compile.tensor_state import states
from tests.models import tiny
from tests.oracle import assert_generated_alone, generated_alone
from tests.runtime.played_stream import TapedStream

CONFIG = EngineConfig(compile=False, max_kv_tokens=512, block_size=4, implementation="reference")
PROMPT = [1, 5, 9, 3, 7]


@pytest.fixture(autouse=True)
def left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Linear layers stay what they are, as on a GPU."""
    monkeypatch.setattr(passes, "REWRITES", passes.REWRITES[:2])
    yield


def joined_program(model: nn.Module, config: EngineConfig = CONFIG) -> StepProgram:
    program = compile_step_program(model, config)
    assert isinstance(program, StepProgram) and program.rewritten.flat is not None
    assert program.rewritten.flat.joined
    return program


def layer_of(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj


def tokens_of(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    return list(engine.submit(prompt, max_new_tokens=8).result().tokens)


def storages(*tensors: Tensor) -> dict[int, int]:
    """Bytes of each memory that these lie in."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def gathered(joined: JoinedWeights, weights: list[nn.Parameter]) -> tuple[Tensor, ...]:
    joined.gather(weights, states(weights))
    return joined.of(weights, states(weights))


def test_parameters_stay_what_they_are_and_nothing_is_held_twice(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("qwen2")
    before = dict(model.named_parameters())
    told = {name: (p.shape, p.dtype, p.stride(), p.requires_grad) for name, p in before.items()}
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    with caplog.at_level(logging.INFO, "selective_compile"):
        program = joined_program(model)
    assert "16 weights of 0 MB were moved to lie one behind the other" in caplog.text
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items()) and len(after) == len(before)
    assert {n: (p.shape, p.dtype, p.stride(), p.requires_grad) for n, p in after.items()} == told
    assert all(torch.equal(after[name], value) for name, value in values.items())
    operands = program.joined_weights.of(*program.weights.seen)
    assert len(operands) == 6  # of each layer, a weight and a bias of query, key and value, and gate and up
    held = storages(*after.values(), *operands)
    assert sum(held.values()) == sum(parameter.nbytes for parameter in after.values())
    assert len(held) == len(after) - 2 * (2 + 2 + 1)


def test_memory_that_weights_leave_is_free_before_the_next_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[nn.Parameter(torch.randn(4, 8)) for _ in range(2)] for _ in range(3)]
    left = [weight.untyped_storage() for group in groups for weight in group]
    held = list(map(holders, left))
    free: list[int] = []
    put = joined_weights.put_in_order

    def noted(group: Any) -> None:
        free.append(sum(holders(storage) < count for storage, count in zip(left, held, strict=True)))
        put(group)

    monkeypatch.setattr(joined_weights, "put_in_order", noted)
    joined_weights.joined(groups)
    assert free == [0, 2, 4]


def test_memory_that_all_weights_have_left_is_free_before_they_are_joined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(4)]
    joined = JoinedWeights([(0, 1), (2, 3)])
    old = [weakref.ref(operand) for operand in gathered(joined, weights)]
    for weight in weights:
        weight.data = torch.randn(4, 8)
    alive: list[int] = []
    put = joined_weights.put_in_order

    def noted(group: Any) -> None:
        alive.append(sum(operand() is not None for operand in old))
        put(group)

    monkeypatch.setattr(joined_weights, "put_in_order", noted)
    gathered(joined, weights)
    assert alive == [0, 0]


def holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        layer_of(model).weight.add_(torch.randn_like(layer_of(model).weight))


def load(model: Any) -> None:
    model.load_state_dict(tiny("llama", num_hidden_layers=1, initializer_range=0.3).state_dict())


def assign(model: Any) -> None:
    other = tiny("llama", num_hidden_layers=1, initializer_range=0.3)
    with torch.no_grad():
        layer_of(other).weight.neg_()
    model.load_state_dict(other.state_dict(), assign=True)


def give_other_memory(model: Any) -> None:
    layer_of(model).weight.data = torch.randn_like(layer_of(model).weight)


def give_other_memory_to_all(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 4


def replace_parameter(model: Any) -> None:
    layer_of(model).weight = nn.Parameter(torch.randn_like(layer_of(model).weight))


def optimise(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    assert layer_of(model).weight.grad is not None


def exchange_two(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


CHANGES = (
    add_in_place,
    load,
    assign,
    give_other_memory,
    give_other_memory_to_all,
    replace_parameter,
    optimise,
    exchange_two,
)


@pytest.mark.parametrize("captured", [False, True])
def test_a_change_is_seen_by_the_next_step(captured: bool) -> None:
    """Of an engine on the CPU, and of one whose captured steps know nothing but memory."""
    model: Any = tiny("llama", num_hidden_layers=1, initializer_range=0.3)
    stream = TapedStream(captures=True) if captured else None
    engine = Engine(model, CONFIG, program=joined_program(model), stream=stream)
    before = tokens_of(engine)
    assert before == generated_alone(model, PROMPT, 8)
    for change in CHANGES:
        change(model)
        after = tokens_of(engine)
        assert after == generated_alone(model, PROMPT, 8), change
        assert after != before, change
        before = after
    assert stream is None or stream.replayed > 3 * len(CHANGES)


def test_prefixes_of_before_are_dropped_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining anew gives weights other addresses, which is no change of theirs."""
    drops: list[StepLoop] = []
    drop = StepLoop.drop_computed
    monkeypatch.setattr(StepLoop, "drop_computed", lambda loop: (drops.append(loop), drop(loop)))
    model: Any = tiny("llama", num_hidden_layers=1)
    engine = Engine(model, CONFIG, program=joined_program(model))
    long = PROMPT * 4
    tokens_of(engine, long)
    give_other_memory(model)
    reused = engine.stats().tokens_reused
    assert tokens_of(engine, long) == generated_alone(model, long, 8)
    assert engine.stats().tokens_reused == reused
    assert tokens_of(engine, long) == generated_alone(model, long, 8)
    assert engine.stats().tokens_reused > reused and len(drops) == 1


def test_what_was_given_shares_no_memory_any_more_and_the_old_is_free() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    program = joined_program(model)
    given = torch.randn_like(layer_of(model).weight)
    layer_of(model).weight.data = given
    program.weights_version()
    assert program.gather_weights() and not program.gather_weights()
    assert torch.equal(layer_of(model).weight, given) and layer_of(model).weight.data_ptr() != given.data_ptr()
    gc.collect()
    held = storages(*model.parameters(), *program.joined_weights.of(*program.weights.seen))
    assert sum(held.values()) == sum(parameter.nbytes for parameter in model.parameters())


def test_an_engine_that_looks_later_knows_that_values_are_others() -> None:
    """The weight lies where it lay when it looked last, though it has been moved twice since."""
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    joined = JoinedWeights([(0, 1)])
    gathered(joined, weights)
    versions = [weight._version for weight in weights]
    weights[1].data = torch.randn(4, 8)
    gathered(joined, weights)
    assert all(weight._version > version for weight, version in zip(weights, versions, strict=True))


class Own(nn.Parameter):
    """A class that may do something else with a product."""


def made_in_inference_mode(weights: list[nn.Parameter]) -> nn.Parameter:
    with torch.inference_mode():
        return nn.Parameter(torch.randn(4, 8))


@pytest.mark.parametrize(
    "other", [lambda weights: weights[0], lambda weights: Own(torch.randn(4, 8)), made_in_inference_mode]
)
def test_what_cannot_be_joined_any_more_is_refused_and_moves_nothing(other: Any) -> None:
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    joined = JoinedWeights([(0, 1)])
    gathered(joined, weights)
    now = [weights[0], other(weights)]
    addresses = [weight.data_ptr() for weight in now]
    for _ in range(2):
        with pytest.raises(ValueError, match="must stay plain tensors, each another one"):
            joined.gather(now, states(now))
    assert [weight.data_ptr() for weight in now] == addresses
    assert torch.equal(gathered(joined, weights)[0], torch.cat([w.detach() for w in weights]))


def test_weights_are_read_where_they_lie_and_moved_by_nobody_in_a_step() -> None:
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(2)]
    joined = JoinedWeights([(0, 1)])
    gathered(joined, weights)
    weights[1].data = torch.randn(4, 8)
    addresses = [weight.data_ptr() for weight in weights]
    assert torch.equal(joined.of(weights, states(weights))[0], torch.cat([w.detach() for w in weights]))
    assert [weight.data_ptr() for weight in weights] == addresses


def of_inference_mode(mlp: Any) -> None:
    with torch.inference_mode():
        mlp.up_proj.weight = nn.Parameter(torch.randn_like(mlp.up_proj.weight))


def without_memory(mlp: Any) -> None:
    """The first time that there is something to join."""
    mlp.up_proj.weight.data = torch.randn_like(mlp.up_proj.weight)
    put = joined_weights.put_in_order

    def once(group: Any) -> None:
        setattr(joined_weights, "put_in_order", put)  # noqa: B010 - to mypy a function is no variable
        raise torch.OutOfMemoryError("out of memory, played")

    setattr(joined_weights, "put_in_order", once)  # noqa: B010


@pytest.mark.parametrize(("change", "again"), [(of_inference_mode, False), (without_memory, True)])
def test_a_join_that_fails_leaves_no_captured_step_of_the_old_weights(change: Any, again: bool) -> None:
    model: Any = tiny("llama", num_hidden_layers=1, initializer_range=0.3)
    engine = Engine(model, CONFIG, program=joined_program(model), stream=TapedStream(captures=True))
    assert tokens_of(engine) == generated_alone(model, PROMPT, 8)
    change(model.model.layers[0].mlp)
    assert_fails(engine)
    if again:
        assert tokens_of(engine) == generated_alone(model, PROMPT, 8)
    else:
        assert_fails(engine)


def assert_fails(engine: Engine) -> None:
    result = engine.submit(PROMPT, max_new_tokens=8).result()
    assert result.finish_reason == "error" and result.error is not None
    assert "plain tensors" in result.error or "out of memory" in result.error


def test_nothing_becomes_a_tensor_of_inference_mode() -> None:
    model: Any = tiny("llama", num_hidden_layers=1, initializer_range=0.3)
    engine = Engine(model, CONFIG, program=joined_program(model))
    tokens_of(engine)
    give_other_memory(model)
    with torch.inference_mode():
        assert tokens_of(engine) == generated_alone(model, PROMPT, 8)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    ids = torch.tensor([PROMPT])
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_changes_that_were_not_looked_for_are_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`drop_computed` finds the weights moved before a step does."""
    model: Any = tiny("llama", num_hidden_layers=1, initializer_range=0.3)
    engine = Engine(model, CONFIG, program=joined_program(model))
    tokens_of(engine)
    drops: list[int] = []
    drop = engine._steps.drop_computed
    monkeypatch.setattr(engine._steps, "drop_computed", lambda: (drops.append(1), drop())[1])
    give_other_memory(model)
    engine.drop_computed()
    program = engine._program
    assert isinstance(program, StepProgram) and all(
        lie_in_order([program.weights.seen[0][place] for place in group]) for group in program._flat.joined
    )
    assert tokens_of(engine) == generated_alone(model, PROMPT, 8) and drops == [1]


def test_two_programs_over_a_model_agree_where_its_weights_lie() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    engines = [Engine(model, CONFIG, program=joined_program(model)) for _ in range(2)]
    engines.append(Engine(model, EngineConfig(**{**vars(CONFIG), "join_weights": False})))
    for turn in range(3):
        for engine in engines[turn:] + engines[:turn]:
            assert tokens_of(engine) == generated_alone(model, PROMPT, 8)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        for engine in engines:
            tokens_of(engine)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        give_other_memory(model)
    operands = [tensor for engine in engines[:2] for tensor in operands_of(engine)]
    assert sum(storages(*model.parameters(), *operands).values()) == sum(p.nbytes for p in model.parameters())


def operands_of(engine: Engine) -> tuple[Tensor, ...]:
    program = engine._program
    assert isinstance(program, StepProgram)
    tokens_of(engine)
    return program.joined_weights.of(*program.weights.seen)


def test_nobody_gets_weights_that_are_half_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs over one model, each in a thread, find it moved."""
    weights = [nn.Parameter(torch.randn(4, 8)) for _ in range(4)]
    begun, go_on = threading.Event(), threading.Event()
    put = joined_weights.put_in_order
    calls: list[Any] = []

    def slow(group: Any) -> None:
        calls.append(group)
        begun.set()
        assert go_on.wait(10)
        put(group)

    monkeypatch.setattr(joined_weights, "put_in_order", slow)
    found: list[Any] = []
    wanted = torch.cat([weight.detach().clone() for weight in weights])

    def look() -> None:
        found.append(gathered(JoinedWeights([(0, 1), (2, 3)]), weights))

    threads = [threading.Thread(target=look) for _ in range(2)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 2 and len(found) == 2
    assert all(torch.equal(torch.cat(operands), wanted) for operands in found)
    assert [operand.data_ptr() for operand in found[0]] == [operand.data_ptr() for operand in found[1]]


def test_the_model_outlives_the_engine() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    before = generated_alone(model, PROMPT, 8)
    engine = Engine(model, CONFIG, program=joined_program(model))
    assert tokens_of(engine) == before
    del engine
    gc.collect()
    assert generated_alone(model, PROMPT, 8) == before
    again = Engine(model, CONFIG, program=joined_program(model))
    assert_generated_alone(model, PROMPT, tokens_of(again))


def test_copies_and_files_hold_each_weight_by_itself(tmp_path: Path) -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    joined_program(model)
    copied = copy.deepcopy(model)
    assert not storages(*copied.parameters()).keys() & storages(*model.parameters()).keys()
    save_file(dict(model.state_dict()), tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert (tmp_path / "weights.pt").stat().st_size < 1.5 * size
    for other in (copied, again):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert tokens_of(Engine(model, CONFIG)) == generated_alone(copied, PROMPT, 8)
    assert model.to(torch.float32) is model and tokens_of(Engine(model, CONFIG)) == generated_alone(model, PROMPT, 8)


def test_inductor_compiles_it() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    config = EngineConfig(max_kv_tokens=512, block_size=4, implementation="reference")
    engine = Engine(model, config, program=joined_program(model, config))
    assert tokens_of(engine) == generated_alone(model, PROMPT, 8)
    give_other_memory(model)
    assert tokens_of(engine) == generated_alone(model, PROMPT, 8)


def test_the_triton_kernels_read_parts_of_the_product() -> None:
    """In their interpreter, which rotates queries and keys in the launch that writes them."""
    pytest.importorskip("triton")
    model: Any = tiny("llama", num_hidden_layers=1)
    config = EngineConfig(compile=False, max_kv_tokens=512, block_size=4, implementation="triton")
    program = joined_program(model, config)
    assert {record.name: record.count for record in program.rewritten.records}["fuse rotary"] == 1
    engine = Engine(model, config, program=program)
    tokens = engine.submit(PROMPT, max_new_tokens=3, do_sample=False).result().tokens
    assert_generated_alone(model, PROMPT, tokens)


def test_a_program_serves_only_engines_that_want_it_so() -> None:
    model = tiny("llama", num_hidden_layers=1)
    program = joined_program(model)
    with pytest.raises(ValueError, match="join_weights must be that which the program was compiled for, True"):
        Engine(model, EngineConfig(**{**vars(CONFIG), "join_weights": False}), program=program)


def test_generate_joins_too() -> None:
    model: Any = tiny("llama", num_hidden_layers=1)
    ids = torch.tensor([PROMPT])
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(sc.generate(model, ids, max_new_tokens=8, do_sample=False, engine_config=CONFIG), theirs)
    mlp = model.model.layers[0].mlp
    assert joined_weights.lie_in_order([mlp.gate_proj.weight, mlp.up_proj.weight])
