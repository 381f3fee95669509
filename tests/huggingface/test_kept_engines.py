"""One engine for a model and a configuration, kept between calls, and gone with the model."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from selective_compile import kept_engines
from selective_compile.generate_requests import ENGINES
from selective_compile.kept_engines import KeptEngines
from selective_compile.module_state import lock_of
from selective_compile.options import EngineConfig
from tests.huggingface.models import CONFIG, assert_idle, random_ids, tiny


def test_engine_is_kept_and_grows_without_compiling_again(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG)
    engine = ENGINES.engine_for(model, CONFIG, [1])
    # Two requests of 6 + 3 tokens in blocks of 4.
    assert engine.stats().blocks_max == 6
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    assert ENGINES.engine_for(model, CONFIG, [1]) is engine
    result = sc.generate(model, ids, max_new_tokens=30, engine_config=CONFIG)
    assert ENGINES.engine_for(model, CONFIG, [1]).stats().blocks_max == 18
    assert torch.equal(result, model.generate(ids, max_new_tokens=30))
    assert len(compiled) == 1


def test_configured_pool_is_taken_as_it_is(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(4, 6)
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=64, token_budget=8)
    result = sc.generate(model, ids, max_new_tokens=40, engine_config=config)
    stats = ENGINES.engine_for(model, config, [1]).stats()
    assert stats.blocks_max == 16
    assert stats.preemptions > 0
    assert torch.equal(result, model.generate(ids, max_new_tokens=40))
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    assert compiled == [config, CONFIG]


def test_weights_are_those_of_the_moment(compiled: list[Any]) -> None:
    """Changed in place; moved to another dtype; a layer replaced by one of the same shape."""
    model, ids = tiny(), random_ids(2, 6)
    options = {"max_new_tokens": 6, "engine_config": CONFIG}
    before = sc.generate(model, ids, **options)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = sc.generate(model, ids, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(ids, max_new_tokens=6))
    assert len(compiled) == 1
    model.lm_head = nn.Linear(64, 199, bias=False)
    assert torch.equal(sc.generate(model, ids, **options), model.generate(ids, max_new_tokens=6))
    assert len(compiled) == 2
    model.to(torch.bfloat16)
    assert sc.generate(model, ids, **options).shape == (2, 12)
    assert len(compiled) == 3


def test_weights_changed_through_data_between_calls_are_seen() -> None:
    """PyTorch counts no such change; keys and values of the call before are not reused for the same prompt."""
    model, ids = tiny(), random_ids(2, 13)
    options = {"max_new_tokens": 6, "engine_config": CONFIG}
    before = sc.generate(model, ids, **options)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(-3)
    after = sc.generate(model, ids, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(ids, max_new_tokens=6))


def test_first_call_in_inference_mode_does_not_spoil_the_next(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(2, 6)
    with torch.inference_mode():
        inside = sc.generate(model, ids, max_new_tokens=5, engine_config=CONFIG)
    assert torch.equal(sc.generate(model, ids, max_new_tokens=5, engine_config=CONFIG), inside)
    assert len(compiled) == 1


def test_model_is_freed_with_its_engine() -> None:
    model = tiny()
    sc.wrap(model, CONFIG)
    model.generate(random_ids(1, 6), max_new_tokens=2)
    gone, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    gc.collect()  # the engine has cycles of its own, and goes after the model
    assert gone() is None
    assert weight() is None


def test_calls_from_several_threads_share_the_engine(model: Any) -> None:
    prompts = [random_ids(1, length, seed=length) for length in range(4, 12)]

    def call(ids: Tensor) -> Tensor:
        return sc.generate(model, ids, max_new_tokens=10, engine_config=CONFIG)

    call(random_ids(8, 20))  # room for all of them, so that nobody brings a larger pool
    with ThreadPoolExecutor(max_workers=len(prompts)) as executor:
        results = list(executor.map(call, prompts))
    for ids, result in zip(prompts, results, strict=True):
        assert torch.equal(result, model.generate(ids, max_new_tokens=10))
    assert_idle(model)


def test_an_engine_that_a_fork_has_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), random_ids(2, 6)
    expected = sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG)
    engine = ENGINES.engine_for(model, CONFIG, [1])
    monkeypatch.setattr(engine._stepping._in_forks, "lost", True)
    with pytest.raises(RuntimeError, match="forked within a step"):
        engine.submit([3, 4], max_new_tokens=2).result()
    assert torch.equal(sc.generate(model, ids, max_new_tokens=3, engine_config=CONFIG), expected)
    assert ENGINES.engine_for(model, CONFIG, [1]) is not engine


def test_a_call_waits_for_nobody_who_runs_another_model() -> None:
    one, other = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1)
    for model in (one, other):
        ENGINES.engine_for(model, CONFIG, [1])
    with ThreadPoolExecutor(2) as pool, lock_of(one):
        waits = pool.submit(ENGINES.engine_for, one, CONFIG, [1])
        with pytest.raises(TimeoutError):
            waits.result(timeout=0.3)
        assert pool.submit(ENGINES.engine_for, other, CONFIG, [1]).result(timeout=30)
        assert not waits.done()


def test_unwrap_frees_what_generate_alone_has_made(compiled: list[Any]) -> None:
    model, ids = tiny(), random_ids(1, 4)
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    sc.generate(model, inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2, engine_config=CONFIG)
    assert len(compiled) == 2 and sc.unwrap(model) is model
    with pytest.raises(ValueError, match="model must be wrapped"):
        sc.unwrap(model)
    sc.generate(model, ids, max_new_tokens=2, engine_config=CONFIG)
    assert len(compiled) == 3


class Waiting:
    """In place of a `KeptEngine`: takes until it may end."""

    made: list[nn.Module]
    begun: threading.Event
    may_end: threading.Event

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.made.append(model)
        self.begun.set()
        assert self.may_end.wait(60)

    def fits(self, model: nn.Module, config: EngineConfig) -> bool:
        return True

    def engine_for(self, model: nn.Module, lengths: list[int]) -> Any:
        return self


@pytest.mark.parametrize("same", [True, False], ids=["same model", "another"])
def test_a_model_is_compiled_once_and_others_do_not_wait(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_engines, "KeptEngine", Waiting)
    Waiting.made, Waiting.begun, Waiting.may_end = [], threading.Event(), threading.Event()
    engines, model, config = KeptEngines(), nn.Linear(1, 1), EngineConfig()
    other = model if same else nn.Linear(1, 1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(engines.engine_for, model, config, [1])
        assert Waiting.begun.wait(60)
        Waiting.begun.clear()
        second = threads.submit(engines.engine_for, other, config, [1])
        assert Waiting.begun.wait(0.5 if same else 60) is not same
        Waiting.may_end.set()
        assert (first.result(60) is second.result(60)) is same
    assert len(Waiting.made) == (1 if same else 2)
