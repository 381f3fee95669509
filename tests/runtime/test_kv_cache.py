"""KV pools: their shapes, and how many blocks there are for which memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from selective_compile.backend import CallSite, compile_step_program
from selective_compile.options import EngineConfig
from selective_compile.runtime import kv_cache
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.empty_steps import largest_step
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.kv_cache import allocate_pools, bytes_per_block, free_memory, num_blocks
from selective_compile.runtime.model_runner import ModelRunner
from tests.models import tiny
from tests.runtime.simulated import CPU


def site(kv_heads: int, key_size: int, value_size: int, dtype: torch.dtype = torch.float32) -> CallSite:
    return CallSite(
        name="call",
        num_query_heads=kv_heads,
        num_kv_heads=kv_heads,
        key_head_size=key_size,
        value_head_size=value_size,
        window=0,
        dtype=dtype,
        device=CPU,
    )


SITES = (site(2, 8, 8), site(1, 4, 6, torch.bfloat16))
BLOCK_BYTES = 16 * (2 * 16 * 4 + 1 * 10 * 2)


def blocks(monkeypatch: pytest.MonkeyPatch, free: int, max_positions: int | None = None, **config: Any) -> int:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: free)
    (found,) = num_blocks(SITES, EngineConfig(block_size=16, **config), max_positions=max_positions, device=CPU)
    return found


def test_pools_have_the_shape_of_their_call_site() -> None:
    pools = allocate_pools(SITES, (5,), 16)
    assert [(tuple(keys.shape), tuple(values.shape), keys.dtype) for keys, values in pools] == [
        ((5, 2, 16, 8), (5, 2, 16, 8), torch.float32),
        ((5, 1, 16, 4), (5, 1, 16, 6), torch.bfloat16),
    ]
    assert bytes_per_block(SITES, 16) == BLOCK_BYTES
    assert sum(tensor.nbytes for pool in pools for tensor in pool) == 5 * BLOCK_BYTES
    assert not any(tensor.any() for pool in pools for tensor in pool)


def test_max_kv_tokens_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, free=0, max_kv_tokens=160) == 10
    assert blocks(monkeypatch, free=0, max_kv_tokens=175) == 10


def test_otherwise_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, free=100 * BLOCK_BYTES, kv_memory_fraction=0.5) == 50


def test_no_more_than_the_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, free=2**40, max_positions=33, max_requests=4) == 12


def test_a_cpu_is_shared_with_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks(monkeypatch, free=2**40) * BLOCK_BYTES <= 4 * 2**30


def test_not_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"must hold a block of {BLOCK_BYTES} bytes, got 0 bytes"):
        blocks(monkeypatch, free=1)


def test_the_free_memory_of_this_machine() -> None:
    assert 2**20 < free_memory(CPU) < 2**50


class CountingStream(DeviceStream):
    """Of a device with memory of its own, of which a step takes so many bytes."""

    def __init__(self, taken: int, *, captures: bool = False) -> None:
        self.taken, self.steps, self.captures = taken, 0, captures

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        self.steps += 1
        return self.taken


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_pools_leave_free_what_the_largest_step_takes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    config = EngineConfig(compile=False, max_requests=3, token_budget=40)
    program = compile_step_program(model, config)
    block = bytes_per_block(program.call_sites, config.block_size)
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: int(20 * block / 0.9) + 1)
    without, with_step = CountingStream(0), CountingStream(8 * block)
    few, many = (ModelRunner(model, config, program, stream=stream) for stream in (with_step, without))
    assert with_step.steps == without.steps == 1
    step = largest_step(config, max_requests=3, max_positions=64, num_tables=1, device=CPU)
    assert len(step.logit_rows) == len(step.input_ids) == 40, (
        "a request may ask for the log probabilities of its prompt"
    )
    assert few.num_blocks != many.num_blocks
    assert many.kv_bytes - few.kv_bytes <= 9 * block and many.kv_bytes - few.kv_bytes >= 7 * block
    graphs = [
        ModelRunner(model, replace(config, cuda_graphs=each), program, stream=CountingStream(4 * block, captures=True))
        for each in (True, False)
    ]
    half = ModelRunner(model, config, program, stream=CountingStream(4 * block))
    found = [runner.num_blocks for runner in (*graphs, few, half)]
    assert found[0] == found[2] != found[1] == found[3], "captured steps compute in memory of their own, as much again"
    told = CountingStream(0)
    ModelRunner(model, EngineConfig(compile=False, max_kv_tokens=64, block_size=32), program, stream=told)
    assert told.steps == 0, "how large the pools are is said"


@pytest.mark.parametrize(("device", "name"), [(None, "max_kv_tokens"), (torch.device("cpu"), "host_kv_bytes")])
def test_more_than_the_memory_that_there_is_is_refused(device: torch.device | None, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must ask for no more memory than cpu has, got .* bytes"):
        allocate_pools(SITES, (2**36,), 16, device)  # which a system may promise, and kill whom it promised it


def test_pools_of_engines_that_were_dropped_are_freed_before_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "LARGE", 1)
    model, config = tiny("llama"), EngineConfig(compile=False, max_kv_tokens=256)
    program = compile_step_program(model, config)
    gc.collect()
    engines = []
    for _ in range(3):
        engine = Engine(model, config, program=program)
        engine.submit([5, 7], max_new_tokens=9)  # nobody reads it: the engine and its request hold each other
        engines.append(weakref.ref(engine))
        del engine
    assert [engine() is None for engine in engines] == [True, True, False]
