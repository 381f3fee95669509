"""A batch-invariant engine on the Triton kernels, in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.invariance import check_invariance
from selective_compile.runtime.records import _aligned
from selective_compile.step_program import StepProgram
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.eager_rows import eager_rows as eager_rows
from tests.runtime.test_step_graphs import tiny_mixtral

pytest.importorskip("triton")
even_dots = pytest.importorskip("tests.kernels.even_dots").even_dots
INTERPRETED = sc.EngineConfig(compile=False, max_kv_tokens=512, batch_invariant=True, implementation="triton")
PROMPT = [(13 * place + 7) % 97 for place in range(11)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


pytestmark = pytest.mark.usefixtures("eager_rows")  # the interpreter takes long enough


def compiled(
    family: str, dtype: torch.dtype, config: sc.EngineConfig, device: str = "cpu", **changes: Any
) -> tuple[Any, Any]:
    model: Any = tiny(family, **changes).to(device, dtype)
    return model, compile_step_program(model, config)


def request_among(
    served: tuple[Any, Any],
    config: sc.EngineConfig,
    rng: Random,
    *,
    others: int,
    longest: int = 5,
    prompt: list[int] = PROMPT,
) -> Any:
    """What comes of the request, with others of random sizes coming before and while it runs."""
    model, program = served
    engine = sc.Engine(model, config, program=program)
    for _ in range(others):
        random_prompt = [rng.randrange(199) for _ in range(rng.randint(1, longest))]
        engine.submit(rng.choice([[], prompt[: rng.randint(1, len(prompt))]]) + random_prompt, max_new_tokens=2)
    for _ in range(rng.randint(0, 2) if others else 0):
        engine.step()
    handle = engine.submit(prompt, max_new_tokens=2, output_logits=True, logprobs=True, prompt_logprobs=True)
    result = handle.result()
    assert engine.score(prompt, result.tokens) == result.logprobs
    return result


def assert_same_bits(found: Any, alone: Any) -> None:
    assert found.tokens == alone.tokens
    assert all(torch.equal(ours, first) for ours, first in zip(found.logits, alone.logits, strict=True))
    assert found.prompt_logprobs == alone.prompt_logprobs and found.logprobs == alone.logprobs


def test_experts_give_the_same_bits_however_many_tokens_they_have() -> None:
    model, prompt = tiny_mixtral(layers=1), PROMPT[:5]
    served, budget = (model, compile_step_program(model, INTERPRETED)), replace(INTERPRETED, token_budget=4)
    alone = request_among(served, INTERPRETED, Random(0), others=0, prompt=prompt)
    assert_same_tokens(model, prompt, alone.tokens)
    assert_same_bits(request_among(served, budget, Random(1), others=2, prompt=prompt), alone)


@pytest.mark.parametrize(
    ("family", "dtype", "budgets"),
    [("llama", torch.float32, (3, 30)), ("llama", torch.bfloat16, (5,)), ("mistral", torch.float16, (7,))],
    ids=str,
)
def test_random_batches_give_the_same_bits_in_the_interpreter(
    family: str, dtype: torch.dtype, budgets: tuple[int, ...]
) -> None:
    """And nearly the model's own.  Mistral has a window that is shorter than the prompt."""
    model, program = compiled(family, dtype, INTERPRETED, num_hidden_layers=1)
    alone = request_among((model, program), INTERPRETED, Random(0), others=0)
    rng = Random(1)
    for budget in budgets:
        sizes = {"token_budget": budget, "max_requests": rng.choice([2, 8]), "block_size": rng.choice([4, 16])}
        found = request_among((model, program), replace(INTERPRETED, **sizes), rng, others=2)
        assert_same_bits(found, alone)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(alone.tokens)])).logits[0, len(PROMPT) - 1 : -1]
    near = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(torch.stack(list(alone.logits)), logits.float(), rtol=near, atol=near)


@pytest.mark.parametrize("invariant", (True, False), ids=("invariant", "ordinary"))
def test_keys_are_split_but_for_a_batch_invariant_engine(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many splits there are would depend on the other requests. Both layers of a step have one plan."""
    cuts = pytest.importorskip("selective_compile.kernels.ragged_attention_cut_triton")
    plans = pytest.importorskip("selective_compile.kernels.split_plan_triton")
    asked, plan, found, find = [], cuts.plan, [], plans._plan
    monkeypatch.setattr(cuts, "plan", lambda *args, **sizes: asked.append(sizes) or plan(*args, **sizes))
    monkeypatch.setattr(plans, "_plan", lambda *args: found.append(args) or find(*args))
    config = replace(INTERPRETED, batch_invariant=invariant)
    model, program = compiled("llama", torch.float32, config, num_hidden_layers=2)
    sc.Engine(model, config, program=program).submit(PROMPT, max_new_tokens=2).result()
    assert len(asked) == 2 * len(found) and bool(asked) is not invariant


def test_a_program_that_splits_keys_is_refused_for_a_batch_invariant_engine() -> None:
    model, program = compiled("llama", torch.float32, replace(INTERPRETED, batch_invariant=False), num_hidden_layers=1)
    with pytest.raises(ValueError, match="must be that which the program was compiled for on cpu, False, got True"):
        sc.Engine(model, INTERPRETED, program=program)


def test_what_is_not_invariant_on_a_gpu_is_refused() -> None:
    model, program = compiled("llama", torch.bfloat16, INTERPRETED, num_hidden_layers=1)
    assert isinstance(program, StepProgram)
    check_invariance(program)
    program.device = torch.device("cuda")
    program.config = replace(INTERPRETED, compile=True)
    check_invariance(program)
    program.config = replace(program.config, implementation="reference")
    with pytest.raises(ValueError, match="must be False but for .*got torch.bfloat16 on cuda with the kernels 'refer"):
        check_invariance(program)
    program.config = replace(program.config, batch_invariant=False)
    with pytest.raises(ValueError, match="must be that which the program was compiled for on cuda, False, got True"):
        check_invariance(program)
    reference = replace(INTERPRETED, implementation="reference")
    with pytest.raises(ValueError, match="got torch.bfloat16 on cpu with the kernels 'reference'"):
        sc.Engine(model, reference)


@pytest.mark.parametrize("size", (1, 7, 8, 199))
def test_rows_of_any_vocabulary_are_made_to_begin_alike(size: int) -> None:
    """As a GPU's log_softmax needs them, whose values the added entries leave as they are."""
    rows = torch.randn(3, size)
    aligned = _aligned(rows)
    assert aligned.stride(0) % 4 == 0 and torch.equal(aligned[:, :size], rows)
    torch.testing.assert_close(aligned.log_softmax(-1)[:, :size], rows.log_softmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_random_batches_give_the_same_bits_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    config = sc.EngineConfig(max_kv_tokens=4096, batch_invariant=True)
    model, program = compiled(family, dtype, config, "cuda")
    prompt = [(13 * place + 7) % 97 for place in range(37)]
    alone = request_among((model, program), config, Random(0), others=0, prompt=prompt)
    rng = Random(1)
    for _ in range(40):
        sizes = {"token_budget": rng.choice([5, 16, 40, 200]), "max_requests": rng.choice([2, 8, 30])}
        changed = replace(config, **sizes, block_reuse=rng.random() < 0.7)
        found = request_among((model, program), changed, rng, others=rng.randint(0, 6), longest=60, prompt=prompt)
        assert_same_bits(found, alone)
