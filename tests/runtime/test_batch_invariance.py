"""With `batch_invariant`, a request's logits are the same bits in every batch, chunking and with every prefix hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.invariance import check_invariance
from selective_compile.sequential_program import SequentialProgram
from tests.decoders import Decoder
from tests.models import tiny
from tests.runtime.eager_rows import eager_rows as eager_rows
from tests.runtime.test_step_graphs import tiny_mixtral
from tests.test_isolation import Decay, Mixed
from tests.test_sequential_program import unproved
from tests.test_whole_functions import Recurrent

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=2048, batch_invariant=True)
COMPILED = sc.EngineConfig(max_kv_tokens=2048, batch_invariant=True)
PROMPT = [(13 * place + 7) % 97 for place in range(37)]


@pytest.fixture(scope="module")
def llama() -> Any:
    """Of a width that leaves something behind the last whole vector."""
    model = tiny("llama", attention="eager", intermediate_size=97)
    return model, compile_step_program(model, COMPILED)


def engine_of(served: Any, **options: Any) -> sc.Engine:
    model, program = served
    return sc.Engine(model, replace(program.config, **options), program=program)


def request_among(engine: sc.Engine, rng: Random) -> Any:
    """The request with its logits, others of random sizes coming before and while it runs."""
    for _ in range(rng.randint(0, 6)):
        prompt = [rng.randrange(199) for _ in range(rng.randint(1, 60))]
        engine.submit(rng.choice([prompt, PROMPT[: rng.randint(1, 37)] + prompt]), max_new_tokens=rng.randint(1, 9))
    for _ in range(rng.randint(0, 3)):
        engine.step()
    drafts = rng.choice([{}, {"prompt_lookup_num_tokens": 4}])
    handle = engine.submit(PROMPT, max_new_tokens=6, output_logits=True, logprobs=True, prompt_logprobs=True, **drafts)
    while not handle.finished:
        if rng.random() < 0.2:
            engine.submit([rng.randrange(199) for _ in range(rng.randint(1, 30))], max_new_tokens=3)
        engine.step()
    return handle.result()


def test_two_hundred_random_batches_give_the_same_bits(llama: Any) -> None:
    alone = request_among(engine_of(llama), Random(31))
    rng = Random(0)
    for _ in range(200):
        engine = engine_of(
            llama,
            token_budget=rng.choice([5, 16, 40, 200]),
            max_requests=rng.choice([2, 8, 30]),
            block_size=rng.choice([4, 16]),
            block_reuse=rng.random() < 0.7,
        )
        found = request_among(engine, rng)
        assert found.tokens == alone.tokens
        assert all(torch.equal(ours, first) for ours, first in zip(found.logits, alone.logits, strict=True))
        assert found.prompt_logprobs == alone.prompt_logprobs and found.logprobs == alone.logprobs


@pytest.mark.parametrize("make", [tiny_mixtral, lambda: tiny("gpt2")], ids=["experts", "layers by columns"])
def test_experts_and_layers_by_columns_give_the_same_bits_in_every_batch(make: Callable[[], Any]) -> None:
    model = make()
    served = model, compile_step_program(model, COMPILED)
    alone = request_among(engine_of(served), Random(31))
    rng = Random(2)
    for _ in range(30):
        found = request_among(engine_of(served, token_budget=rng.choice([5, 16, 200])), rng)
        assert found.tokens == alone.tokens
        assert all(torch.equal(ours, first) for ours, first in zip(found.logits, alone.logits, strict=True))
        assert found.prompt_logprobs == alone.prompt_logprobs


def test_a_program_of_experts_that_was_compiled_without_it_is_refused() -> None:
    """In it the number of an expert's tokens tells how their rows are summed."""
    model = tiny_mixtral(layers=1)
    ordinary = model, compile_step_program(model, replace(CONFIG, batch_invariant=False))
    with pytest.raises(ValueError, match="must be that which the program was compiled for on cpu, False, got True"):
        engine_of(ordinary, batch_invariant=True)


def test_scores_are_the_bits_reported_while_generating(llama: Any) -> None:
    engine = engine_of(llama)
    result = request_among(engine, Random(3))
    assert engine.score(PROMPT, result.tokens) == result.logprobs
    assert engine.score(PROMPT[:1], PROMPT[1:]) == result.prompt_logprobs


@pytest.mark.usefixtures("eager_rows")
def test_layers_with_windows_give_the_same_bits() -> None:
    model = tiny("gemma3_text")
    windowed = model, compile_step_program(model, CONFIG)
    alone = request_among(engine_of(windowed), Random(31))
    rng = Random(1)
    for _ in range(20):
        sizes = {"token_budget": rng.choice([5, 16, 40]), "block_size": rng.choice([4, 16])}
        found = request_among(engine_of(windowed, **sizes, max_requests=rng.choice([2, 8])), rng)
        assert found.tokens == alone.tokens
        assert all(torch.equal(ours, first) for ours, first in zip(found.logits, alone.logits, strict=True))
        assert found.prompt_logprobs == alone.prompt_logprobs


def test_steps_that_are_not_compiled_are_refused(llama: Any) -> None:
    """What is left behind the last whole vector of all rows is computed by other instructions."""
    rows = torch.randn(54, 97, generator=torch.Generator().manual_seed(0))
    silu, whole = torch.nn.functional.silu, torch.nn.functional.silu(rows)
    assert any(not torch.equal(silu(rows[:count])[-1], whole[count - 1]) for count in range(1, 54))
    with pytest.raises(ValueError, match="batch_invariant must be False with compile=False on cpu: PyTorch's own"):
        sc.Engine(llama[0], CONFIG)
    program: Any = compile_step_program(llama[0], CONFIG)
    program.device = torch.device("cuda")
    with pytest.raises(ValueError, match="batch_invariant must be False with compile=False on cuda"):
        check_invariance(program)


def test_recurrences_and_isolated_modules_are_refused_by_name() -> None:
    for make in (Recurrent, lambda: Mixed(Decay)):
        with pytest.raises(ValueError, match="batch_invariant must be False for recurrences and for .*:"):
            sc.Engine(make().eval(), CONFIG)


def test_without_it_the_bits_differ(llama: Any) -> None:
    """Else the test above could not fail."""
    model, _ = llama
    ordinary = model, compile_step_program(model, sc.EngineConfig(compile=False))
    rng = Random(0)
    engines = [engine_of(ordinary, batch_invariant=False, token_budget=budget) for budget in (3, 5, 40, 200)]
    found = [request_among(engine, rng).prompt_logprobs for engine in engines]
    assert len(set(found)) > 1
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[-1]), atol=1e-4)


class ByColumns(nn.Module):
    """A product that is not written as a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_what_depends_on_the_batch_is_named_and_refused_where_it_would_stay() -> None:
    report = sc.explain(tiny("llama"))
    assert len(report.batch_dependent) == 11
    text = str(report)
    assert "11 operations depend on the batch in the last bits, without batch_invariant=True:" in text
    assert (
        "4 x selective.linears.default: linears_default ... linears_default_3\n" in text
        and "5 x selective.linear.default: linear_3 ... linear_14\n" in text
        and "modeling_llama.py" in text
        and "= self.q_proj(" in text
    )
    assert "2 x selective.ragged_attention.default: ragged_attention, ragged_attention_1\n" in text
    assert not any("unknown" in line for line in report.batch_dependent)
    assert sum("selective.ragged_attention" in line for line in report.batch_dependent) == 2
    model = Decoder(layers=1)
    model.blocks[0].down = ByColumns(model.blocks[0].down)
    with pytest.raises(ValueError, match="batch_invariant must be False for products .*matmul.*test_batch_invariance"):
        sc.Engine(model.eval(), CONFIG)
    model = Decoder(layers=1)
    wide = torch.cat([model.blocks[0].down.weight.detach()] * 2, 1)
    model.blocks[0].down.weight = nn.Parameter(wide[:, : wide.shape[1] // 2])
    with pytest.raises(ValueError, match="batch_invariant must be False for products .*linear"):
        sc.Engine(model.eval(), CONFIG)
    with pytest.raises(ValueError, match="batch_invariant must be False but for float32 .*got torch.bfloat16 on cpu"):
        sc.Engine(tiny("llama", num_hidden_layers=1).to(torch.bfloat16), CONFIG)
    with pytest.raises(ValueError, match="batch_invariant must be True or False, got 'yes'"):
        sc.EngineConfig(batch_invariant="yes")  # type: ignore[arg-type]


def test_a_model_that_runs_whole_is_invariant_by_itself() -> None:
    model = unproved("mamba")
    engine = sc.Engine(model, CONFIG, program=SequentialProgram(model, ()))
    first = engine.submit(PROMPT[:9], max_new_tokens=4, logprobs=True).result()
    others = [engine.submit(PROMPT[:5], max_new_tokens=4) for _ in range(2)]
    assert engine.submit(PROMPT[:9], max_new_tokens=4, logprobs=True).result().logprobs == first.logprobs
    assert all(request.result().error is None for request in others)
