"""The graph of the Triton kernels through Inductor: the logits of the same graph uncompiled, and no copy of a KV pool.

An operator that changes a pool goes through Inductor as one that gives a new pool, and Inductor finds out again that it
may have the old one. Where it does not, each layer copies its whole pool in each step, and the results are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import post_grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import selective_compile as sc
from selective_compile import ops
from selective_compile.backend import compile_step_program
from selective_compile.compiled_step import CompiledStep
from selective_compile.layered import Layered
from selective_compile.step_program import StepProgram
from tests.exactness import logits_in_chunks
from tests.kernels.ragged_cases import Case, make_inputs
from tests.models import VOCABULARY, tiny

CONFIG = sc.EngineConfig(max_kv_tokens=512, block_size=4, token_budget=9, implementation="triton")
PROMPTS = [[(13 * place + 7 * n) % VOCABULARY for place in range(length)] for n, length in enumerate((7, 3, 1))]
CHUNK, STEPS = 5, 2


class PoolsGiven(TorchDispatchMode):
    """Notes the operators of ours that get a pool, and where in memory it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.places: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        pools = [given[name] for name in ("key_pool", "value_pool") if name in given]
        if pools:
            self.calls.append(func._opname)
            self.places += [pool.data_ptr() for pool in pools]
        return func(*args, **(kwargs or {}))


def logits(program: StepProgram, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[str]]:
    """Of `PROMPTS`, and the operators that got pools, in the order of their calls. The pools are the caller's."""
    places: list[int] = []
    run, given = StepProgram.__call__, PoolsGiven()

    def noted(self: StepProgram, inputs: Any, pools: Any, states: Any = ()) -> Tensor:
        places.extend(pool.data_ptr() for pair in pools for pool in pair if pool.shape[-1])
        return run(self, inputs, pools, states)

    with monkeypatch.context() as patched, given:
        patched.setattr(StepProgram, "__call__", noted)
        found = logits_in_chunks(program, PROMPTS, CHUNK)
    assert places and given.places == places
    return found, given.calls


# What e4m3 keeps of a number may be another for one that differs in its last bit, as compiled code may give it.
@pytest.mark.parametrize(
    ("family", "kv_dtype", "operator", "layers", "tolerance"),
    [
        ("llama", "auto", "rotary_attention", 2, 1e-4),
        ("qwen3", "auto", "rotary_attention", 1, 1e-4),
        ("deepseek_v3", "auto", "latent_attention", 1, 1e-4),
        ("llama", "fp8", "rotary_attention", 1, 5e-2),
        ("llama", "auto", "rotary_attention", 8, 1e-4),
    ],
)
def test_logits_are_those_of_the_graph_and_no_pool_is_copied(
    family: str, kv_dtype: Any, operator: str, layers: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    # They stay 1: measuring takes 512 tokens.
    monkeypatch.setattr(StepProgram, "measure_kv_scales", lambda self, version: None)
    model = tiny(family, num_hidden_layers=layers, initializer_range=0.2)
    program: Any = compile_step_program(model, replace(CONFIG, kv_dtype=kv_dtype))
    assert isinstance(program._run._run, Layered) == (layers == 8)
    found, calls = logits(program, monkeypatch)
    assert calls == [operator] * layers * STEPS
    program._run = CompiledStep(program._flat.module.forward, program._flat.example_inputs, native=False)
    expected, calls = logits(program, monkeypatch)
    assert calls == [operator] * layers * STEPS
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("copied", (False, True))
def test_a_pool_that_is_copied_is_found(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without the pass of Inductor that finds out that it need not be."""
    if copied:
        monkeypatch.setattr(post_grad, "reinplace_inplaceable_ops", lambda *_: None)
    inputs, given = make_inputs(Case(name="", requests=((3, 5), (1, 9))), torch.float32), PoolsGiven()
    tensors = [value for value in inputs.ragged() if isinstance(value, Tensor)]
    graph = make_fx(lambda *args: (ops.ragged_attention(*args, 0.3, 0, 0.0),), tracing_mode="fake")(*tensors)
    with config.patch(force_disable_caches=True), torch.no_grad():
        run = compile_fx(graph, tensors)
    with given:
        run(*tensors)
    assert given.calls == ["ragged_attention"]
    assert (given.places != [inputs.key_pool.data_ptr(), inputs.value_pool.data_ptr()]) == copied
