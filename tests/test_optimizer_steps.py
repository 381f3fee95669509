"""Optimizers whose fused kernels change weights, which PyTorch does not count, beside an engine that keeps blocks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.backend import compile_step_program
from tests.decoders import Decoder
from tests.test_live_settings import PROMPTS, RAGGED, small

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=512)


def trained(model: Any, kind: type[torch.optim.Optimizer], **options: Any) -> None:
    optimizer = kind(model.parameters(), lr=0.2, **options)  # type: ignore[call-arg]
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_step_is_a_change_of_the_weights(kind: type[torch.optim.Optimizer]) -> None:
    model = Decoder(layers=1)
    program = compile_step_program(model, CONFIG)
    before = program.weights_version()  # type: ignore[union-attr]
    other = Decoder(layers=1)
    trained(other, kind, fused=True)
    assert program.weights_version() is before  # type: ignore[union-attr]
    assert max(weight._version for weight in other.parameters()) <= max(w._version for w in model.parameters())
    trained(model, kind, fused=True)
    assert program.weights_version() is not before  # type: ignore[union-attr]


def test_what_an_engine_has_computed_before_a_step_is_not_used_behind_it() -> None:
    model = small()
    prompt = [*PROMPTS[1], *range(3, 40)]
    engine = sc.Engine(model, RAGGED)

    def found() -> list[int]:
        return list(engine.submit(prompt, max_new_tokens=6, do_sample=False).result().tokens)

    def expected() -> list[int]:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0]
        return list(ids[len(prompt) :].tolist())

    before = found()
    assert before == expected()
    trained(model, torch.optim.AdamW, fused=True)
    assert found() == expected() != before
    assert engine.stats().tokens_reused == 0


def test_readers_and_their_weights_are_let_go() -> None:
    model = Decoder(layers=1)
    program = compile_step_program(model, CONFIG)
    alive = weakref.ref(model.head.weight)
    del model, program
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
