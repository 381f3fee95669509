"""An engine that keeps latents in place of keys and values: Hugging Face's tokens, whatever becomes of the blocks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import selective_compile as sc
from selective_compile.backend import Program, compile_step_program, report_of
from selective_compile.generate_states import CACHE
from selective_compile.int8_rows import dequantised, quantised
from selective_compile.programs import keeps_latents
from selective_compile.runtime.logit_error import prompt_logits
from tests.exactness import TOLERANCE, engine_error
from tests.models import LATENT_OWN, VOCABULARY, tiny
from tests.oracle import assert_generated_alone, assert_same_tokens, generated_alone
from tests.runtime.eager_rows import eager_rows as eager_rows

CONFIG = sc.EngineConfig(token_budget=7, max_requests=4, block_size=4, max_kv_tokens=56, compile=False)
SHARED = [(17 * place + 5) % VOCABULARY for place in range(14)]
PROMPTS = [SHARED[: 3 + n] + SHARED[n : n + 5] for n in range(5)] + [[*SHARED, 5, 6], [*SHARED, 7]]
ROW = 32 + 8


@pytest.fixture(scope="module")
def served() -> tuple[Any, Program]:
    model = tiny("deepseek_v3", attention="eager")
    return model, compile_step_program(model, CONFIG)


@pytest.mark.parametrize("family", LATENT_OWN)
def test_logits_and_what_is_kept(family: str) -> None:
    model = tiny(family, num_hidden_layers=1)
    program = compile_step_program(model, CONFIG)
    sites = [(site.num_kv_heads, site.key_head_size, site.value_head_size) for site in program.call_sites]
    assert sites == [(1, ROW, 0)]
    assert engine_error(model, vocabulary=VOCABULARY, program=program) < TOLERANCE  # type: ignore[arg-type]


def test_tokens_under_preemption_with_shared_prefixes_and_host_memory(served: tuple[Any, Program]) -> None:
    model, program = served
    for host in (0, 4 * 4 * 4 * ROW * 2):
        config = sc.EngineConfig(**{**vars(CONFIG), "host_kv_bytes": host})
        engine = sc.Engine(model, config, program=program)
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
        for prompt, request in zip(PROMPTS, requests, strict=True):
            assert_same_tokens(model, prompt, request.result().tokens)
        again = engine.submit(PROMPTS[-2], max_new_tokens=6)
        assert_same_tokens(model, PROMPTS[-2], again.result().tokens)
        assert engine.stats().preemptions > 0 and engine.stats().tokens_reused > 0


def test_samples_beams_and_drafts(served: tuple[Any, Program]) -> None:
    model, program = served
    config = sc.EngineConfig(**{**vars(CONFIG), "max_kv_tokens": 400, "token_budget": 64})
    engine = sc.Engine(model, config, program=program)
    drafted = engine.submit(SHARED * 2, max_new_tokens=16, prompt_lookup_num_tokens=4)
    assert_generated_alone(model, SHARED * 2, drafted.result().tokens)
    samples = engine.submit(PROMPTS[3], max_new_tokens=6, num_return_sequences=2, do_sample=True, top_k=1)
    alone = generated_alone(model, PROMPTS[3], 6)
    for each in samples.samples:
        assert list(each.result().tokens) == alone
    ids = torch.tensor([PROMPTS[4]])
    fields: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 7, "do_sample": False}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **fields)[0, ids.shape[1] :].tolist()
    (best,) = engine.submit(PROMPTS[4], **fields).result().hypotheses
    assert list(best.tokens) == theirs


def test_compiled_steps_are_native_calls(caplog: pytest.LogCaptureFixture) -> None:
    """Their logits are those of the compiled code to the bit, or they are not made: with int8 rows, as without."""
    with caplog.at_level(logging.INFO, logger="selective_compile.compiled_step"):
        compile_step_program(tiny("minicpm3", num_hidden_layers=1), sc.EngineConfig(kv_dtype="int8"))
    assert "native calls of a step are made without the code around them" in caplog.text


def test_a_weight_that_changes_is_seen_by_the_next_step() -> None:
    model: Any = tiny("deepseek_v3", attention="eager", num_hidden_layers=1)
    engine = sc.Engine(model, CONFIG)
    before = engine.submit(SHARED, max_new_tokens=8).result().tokens
    assert_generated_alone(model, SHARED, before)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight.mul_(-3)
    after = engine.submit(SHARED, max_new_tokens=8).result().tokens
    assert_generated_alone(model, SHARED, after)
    assert after != before


def test_what_is_kept_is_told_and_can_be_keys_and_values(served: tuple[Any, Program]) -> None:
    model, program = served
    assert f"latents, {4 * ROW} bytes a token and not {4 * 4 * (16 + 8 + 12)}" in str(report_of(program, model))
    assert sc.Engine(model, CONFIG, program=program).kv_bytes_per_token == 2 * 4 * ROW
    small = tiny("deepseek_v3", attention="eager", num_hidden_layers=1)
    config = sc.EngineConfig(**{**vars(CONFIG), "latents": "expanded"})
    expanded = compile_step_program(small, config)
    engine = sc.Engine(small, config, program=expanded)
    assert engine.kv_bytes_per_token == 4 * 4 * (16 + 8 + 12)
    assert "latents" not in str(report_of(expanded, small))
    assert_generated_alone(small, SHARED, engine.submit(SHARED, max_new_tokens=5).result().tokens)
    with pytest.raises(ValueError, match="latents must be that which the program was compiled for, 'compressed'"):
        sc.Engine(model, sc.EngineConfig(**{**vars(CONFIG), "latents": "expanded"}), program=program)


@pytest.mark.usefixtures("eager_rows")
def test_batch_invariance(served: tuple[Any, Program]) -> None:
    """The same bits alone and among others, in other chunks; expanded where a library multiplies by the maps."""
    model, program = served
    assert not any("head_products" in line for line in report_of(program, model).batch_dependent)
    found = []
    for options in ({"token_budget": 64}, {"token_budget": 5}):
        config = sc.EngineConfig(**{**vars(CONFIG), "batch_invariant": True, "max_kv_tokens": 400, **options})
        assert keeps_latents(model, config)
        engine = sc.Engine(model, config, program=program)
        others = [engine.submit(prompt, max_new_tokens=9) for prompt in PROMPTS[: len(found) * 3]]
        found.append(engine.submit(SHARED, max_new_tokens=6, output_logits=True, request_id="a").result())
        assert all(other.result().tokens for other in others)
    assert all(torch.equal(one, other) for one, other in zip(found[0].logits, found[1].logits, strict=True))
    assert not keeps_latents(model, sc.EngineConfig(batch_invariant=True, implementation="triton"))


class Rounding(DynamicCache):
    """Hands the model the latent and the shared key, [1, 1, S, n] each, as one row of int8 would keep them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        row = torch.cat([key_states, value_states], dim=-1)
        kept = dequantised(quantised(row), row.shape[-1], torch.float32)
        return super().update(*kept.split([key_states.shape[-1], value_states.shape[-1]], dim=-1), *args, **kwargs)


def test_rows_of_int8() -> None:
    model: Any = tiny("deepseek_v3", num_hidden_layers=1)
    config = sc.EngineConfig(compile=False, max_kv_tokens=400, block_size=8, kv_dtype="int8")
    engine = sc.Engine(model, config)
    assert engine.kv_bytes_per_token == ROW + 4
    ours = prompt_logits(engine, SHARED)
    with torch.no_grad():
        theirs = model(torch.tensor([SHARED]), **{CACHE: Rounding(config=model.config)}, use_cache=True).logits[0]
        exact = model(torch.tensor([SHARED])).logits[0]
    assert float((ours - theirs).abs().max()) < TOLERANCE < float((theirs - exact).abs().max())
