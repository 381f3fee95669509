"""Two thousand compiled steps of random traffic: one graph, no recompile, flat memory, every block back."""

from __future__ import annotations

import random
import resource
from pathlib import Path

from torch._dynamo.utils import counters
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile.compiling import give_back_memory
from tests.models import tiny
from tests.oracle import assert_same_tokens

STEPS = 2000
WARM_UP = 500
GROWTH_ALLOWED = 8 * 2**20  # bytes: allocator noise; a leak of one step's logits each would be 1500 times 25 kB


def resident_bytes() -> int:
    give_back_memory()  # or what tests before this one left free would count
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def traced_and_compiled() -> dict[str, int]:
    """Dynamo's and Inductor's counts of graphs, which any trace or compile raises."""
    return {f"{kind}.{name}": count for kind in ("stats", "inductor") for name, count in counters[kind].items()}


def test_random_traffic_neither_recompiles_nor_grows() -> None:
    model = tiny("llama")
    engine = sc.Engine(model, sc.EngineConfig(token_budget=48, max_requests=12, max_kv_tokens=16 * 12))
    assert engine.stats().graphs == 1
    draw = random.Random(0)
    checked = []
    before, compiles = 0, {}
    for step in range(STEPS):
        if step == WARM_UP:
            before, compiles = resident_bytes(), traced_and_compiled()
        if draw.random() < 0.25:
            prompt = [draw.randrange(199) for _ in range(draw.randint(1, 90))]
            sampled = draw.random() < 0.3
            config = GenerationConfig(max_new_tokens=draw.randint(1, 30), do_sample=sampled)
            request = engine.submit(prompt, config)
            if draw.random() < 0.1:
                request.cancel()
            elif not sampled and step % 10 == 0:
                checked.append((prompt, request))
        engine.step()
    growth = resident_bytes() - before
    assert traced_and_compiled() == compiles
    assert growth < GROWTH_ALLOWED, f"{growth / 2**20:.1f} MiB"
    while engine.step():
        pass
    stats = engine.stats()
    assert stats.blocks_used == 0
    assert stats.preemptions > 0
    for prompt, request in checked:
        assert_same_tokens(model, prompt, request.tokens)
