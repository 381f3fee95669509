"""Keys and values kept as int8, next to Hugging Face with a cache that rounds what it is given in the same way."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import selective_compile as sc
from selective_compile import kept_engines, tiny_model
from selective_compile.backend import CallSite, Program, compile_step_program
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.generate_states import CACHE
from selective_compile.int8_rows import dequantised, quantised
from selective_compile.kept_engines import KeptEngines
from selective_compile.options import EngineConfig
from selective_compile.runtime import kv_cache, logit_error
from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.kv_cache import allocate_pools, bytes_per_block, num_blocks
from selective_compile.runtime.logit_error import LogitError, prompt_logits
from selective_compile.runtime.replay import EventLog
from selective_compile.runtime.replay_engine import replay_engine
from selective_compile.sequential_program import SequentialProgram
from selective_compile.tiny_model.prompts import demo_prompts
from tests.models import tiny
from tests.runtime.eager_rows import eager_rows as eager_rows
from tests.runtime.simulated import CPU
from tests.test_isolation import Decay, Mixed
from tests.test_whole_functions import Recurrent

CONFIG = EngineConfig(compile=False, max_kv_tokens=4096, block_size=8, kv_dtype="int8")
PROMPT = [(13 * place + 7) % 97 for place in range(37)]


class Rounding(DynamicCache):
    """Hands the model its keys and values [1, K, S, D] as int8 would keep them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def rounded(rows: Tensor) -> Tensor:
    return dequantised(quantised(rows), rows.shape[-1], torch.float32).to(rows.dtype)


@torch.no_grad()
def rounding_logits(model: Any, tokens: list[int]) -> Tensor:
    """[tokens, V] by the model itself."""
    cache = Rounding(config=model.config)
    return model(torch.tensor([tokens]), **{CACHE: cache}, use_cache=True).logits[0].float()


@torch.no_grad()
def exact_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


def configured(**changes: Any) -> EngineConfig:
    return EngineConfig(**{**vars(CONFIG), **changes})


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_logits_are_those_of_the_model_with_rounded_keys_and_values(family: str) -> None:
    """In one piece and in chunks. A number on the edge of two may fall on either side, so that the bar is what rounding
    itself does.
    """
    model = tiny(family, attention="eager", initializer_range=0.2)
    program = compile_step_program(model, CONFIG)
    for budget in (512, 7):
        engine = sc.Engine(model, configured(token_budget=budget), program=program)
        requests = [engine.submit(PROMPT[n:] + PROMPT, max_new_tokens=12, output_logits=True) for n in range(3)]
        for n, request in enumerate(requests):
            result = request.result()
            tokens = [*PROMPT[n:], *PROMPT, *result.tokens]
            rows = slice(len(tokens) - 13, -1)
            found = torch.stack(result.logits)
            expected, exact = rounding_logits(model, tokens)[rows], exact_logits(model, tokens)[rows]
            assert apart(expected, exact) > 1e-3 * float(exact.std())
            assert apart(found, expected) < 0.1 * apart(expected, exact)


def test_in_bfloat16_it_is_no_further_from_the_exact_rounding_than_the_model_itself() -> None:
    exact = tiny("llama", num_hidden_layers=4, initializer_range=0.1)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    widened = copy.deepcopy(model).float()
    engine = sc.Engine(model, CONFIG)
    draw, ours, theirs = Random(1), 0.0, 0.0
    for _ in range(8):
        prompt = [draw.randrange(199) for _ in range(draw.randint(5, 80))]
        truth = rounding_logits(widened, prompt)
        ours += float((prompt_logits(engine, prompt) - truth).square().sum())
        theirs += float((rounding_logits(model, prompt) - truth).square().sum())
    assert 0 < ours**0.5 <= 1.1 * theirs**0.5


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any, Program]:
    model, tokenizer = tiny_model.load()
    return model, tokenizer, compile_step_program(model, CONFIG)


@pytest.fixture
def compiled(shipped: tuple[Any, Any, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """`sc.generate` finds the program of the model that ships."""
    monkeypatch.setattr(kept_engines, "compile_step_program", lambda model, config: shipped[2])


def own_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "attention_mask": torch.ones_like(ids)}
    return list(model.generate(ids, **options)[0, len(prompt) :].tolist())


def prompts_of(tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """Of tasks with one answer, so that the model's margins are clear."""
    known = [prompt for prompt in demo_prompts(8 * count) if prompt.answer is not None]
    rows = [(tokenizer(prompt.text).input_ids, prompt.max_new_tokens) for prompt in known]
    return [(prompt, room) for prompt, room in rows if len(prompt) + room < 120][:count]


@pytest.mark.usefixtures("eager_rows")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_budget": 11, "max_requests": 5},
        {"max_kv_tokens": 128, "block_size": 4},
        {"block_reuse": False, "block_size": 16},
        {"host_kv_bytes": 2**22, "max_kv_tokens": 128, "block_size": 4},
        {"batch_invariant": True, "token_budget": 30},
    ],
    ids=str,
)
def test_tokens_with_clear_margins_are_those_of_generate(
    shipped: tuple[Any, Any, Program], changes: dict[str, Any]
) -> None:
    """In chunks, among others, preempted, from blocks that were found and from the host's."""
    model, tokenizer, program = shipped
    engine = sc.Engine(model, configured(**changes), program=program, clock=lambda: 0.0)
    copies: list[Copy | BlockCopy] = []
    copy_blocks = engine._runner.copy
    engine._runner.copy = lambda made: (copies.extend(made), copy_blocks(made))[1]  # type: ignore[method-assign,assignment]
    prompts = prompts_of(tokenizer, 12)
    expected = [own_tokens(model, prompt, count) for prompt, count in prompts]
    for _ in range(2):
        requests = [engine.submit(prompt, max_new_tokens=count) for prompt, count in prompts]
        while engine.step():
            engine._scheduler.check()
        assert [request.tokens for request in requests] == expected
    stats = engine.stats()
    assert (stats.tokens_reused > 0) is engine.config.block_reuse
    if "max_kv_tokens" in changes:
        assert stats.preemptions > 0
    if "host_kv_bytes" in changes:
        assert any(isinstance(one, Copy) and not one.to_host for one in copies)


def test_drafts_that_are_turned_down_are_written_over(shipped: tuple[Any, Any, Program]) -> None:
    model, tokenizer, program = shipped
    engine = sc.Engine(model, CONFIG, program=program)
    prompts = prompts_of(tokenizer, 6)
    requests = [engine.submit(prompt, max_new_tokens=room, prompt_lookup_num_tokens=4) for prompt, room in prompts]
    found = [list(request.result().tokens) for request in requests]
    assert found == [own_tokens(model, prompt, room) for prompt, room in prompts]
    assert engine.stats().tokens_computed > sum(len(prompt) for prompt, _ in prompts) + sum(map(len, found))


@pytest.mark.usefixtures("compiled")
def test_samples_and_beams_that_share_blocks_are_those_of_requests_of_their_own(
    shipped: tuple[Any, Any, Program],
) -> None:
    """Blocks are copied as they are when one of several writes to its last."""
    model, tokenizer, program = shipped
    prompt = tokenizer("the key is in").input_ids
    sampled = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 14, "eos_token_id": []}
    engine = sc.Engine(model, CONFIG, program=program)
    request = engine.submit(prompt, seed=5, num_return_sequences=4, **sampled)
    together = [list(each.result().tokens) for each in request.samples]
    alone = [list(engine.submit(prompt, seed=5 + n, **sampled).result().tokens) for n in range(4)]
    assert together == alone and len({tuple(tokens) for tokens in together}) > 1
    beams = {"num_beams": 4, "max_new_tokens": 9, "output_scores": True, "return_dict_in_generate": True}
    found = sc.generate(model, torch.tensor([prompt]), engine_config=CONFIG, **beams)
    theirs = model.generate(torch.tensor([prompt]), **{CACHE: Rounding(config=model.config)}, **beams)
    assert torch.equal(found.sequences, theirs.sequences)
    torch.testing.assert_close(found.sequences_scores, theirs.sequences_scores, rtol=0, atol=2e-2)


@pytest.mark.usefixtures("eager_rows")
def test_a_prefix_that_is_found_changes_no_bit(shipped: tuple[Any, Any, Program]) -> None:
    """With batch invariance: a row is rounded once, from itself, so that it is the same whoever wrote it and when."""
    model, _, program = shipped
    rng, found = Random(0), []
    for _ in range(12):
        changes = {"token_budget": rng.choice([5, 16, 200]), "block_size": rng.choice([4, 16])}
        engine = sc.Engine(model, configured(batch_invariant=True, **changes), program=program)
        for _ in range(rng.randint(0, 4)):
            engine.submit(PROMPT[: rng.randint(1, 37)] + [rng.randrange(199)], max_new_tokens=rng.randint(1, 9))
        request = engine.submit(PROMPT, max_new_tokens=6, output_logits=True, eos_token_id=[])
        found.append(torch.stack(request.result().logits))
    assert all(torch.equal(rows, found[0]) for rows in found)


def site(size: int, dtype: torch.dtype, *, int8: bool) -> CallSite:
    return CallSite(
        name="call",
        num_query_heads=4,
        num_kv_heads=2,
        key_head_size=size,
        value_head_size=size // 2,
        window=0,
        dtype=dtype,
        device=CPU,
        int8=int8,
    )


def test_pools_take_a_byte_for_a_number_and_four_for_a_row() -> None:
    kept = site(128, torch.bfloat16, int8=True)
    assert kept.bytes_per_token == 2 * (128 + 4 + 64 + 4)
    assert site(128, torch.bfloat16, int8=False).bytes_per_token == 2 * (128 + 64) * 2
    ((keys, values),) = allocate_pools([kept], (3,), 16)
    assert (keys.shape, values.shape, keys.dtype) == ((3, 2, 16, 132), (3, 2, 16, 68), torch.int8)
    assert keys.nbytes + values.nbytes == 3 * bytes_per_block([kept], 16)


def test_as_much_memory_holds_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 2**28)
    held = [
        num_blocks([site(64, torch.float32, int8=int8)], EngineConfig(), max_positions=None, device=CPU)[0]
        for int8 in (False, True)
    ]
    assert held[1] / held[0] == pytest.approx(4 * 96 / (68 + 36), rel=1e-3)


def test_the_engine_tells_its_memory(shipped: tuple[Any, Any, Program]) -> None:
    model, _, program = shipped
    engine = sc.Engine(model, CONFIG, program=program)
    assert engine.kv_bytes_per_token == 5 * 2 * 2 * (32 + 4)
    assert engine.stats().kv_bytes == 4096 * 720


def test_what_is_no_key_or_value_of_an_attention_stays_as_it_is() -> None:
    """The keys of an indexer; the states of recurrences."""
    sparse: Any = random_model("deepseek_v32")
    program = compile_step_program(sparse, CONFIG)
    kinds = [(one.pool_dtype, *one.pool_rows) for one in program.call_sites]
    assert kinds == [(torch.int8, 24, 0)] * 2 + [(torch.float32, 8, 0)] * 2
    prompt = [n % vocabulary_of(sparse) for n in PROMPT[:20]]
    found = prompt_logits(sc.Engine(sparse, CONFIG, program=program), prompt)
    error = apart(found, exact_logits(sparse, prompt)) / float(found.std())
    assert 1e-4 < error < 0.2
    mixed = compile_step_program(random_model("lfm2"), CONFIG)
    assert mixed.state_sites and all(one.int8 for one in mixed.call_sites)
    assert all(one.dtype == torch.float32 for one in mixed.state_sites)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixed(Decay), "for a model in which not every attention is ragged, got 'int8': mixers"),
        (lambda: random_model("reformer"), "for a model in which not every attention is ragged, got 'int8': "),
        (lambda: Recurrent().eval(), "kv_dtype must be 'auto' for a model without attention, got 'int8'"),
    ],
    ids=("isolated", "sequential", "recurrent"),
)
def test_models_that_keep_theirs_elsewhere_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sc.Engine(make(), CONFIG)


def test_other_kernels_and_programs_are_refused(shipped: tuple[Any, Any, Program]) -> None:
    model, _, program = shipped
    with pytest.raises(ValueError, match="kv_dtype must be 'auto' with implementation 'triton'"):
        configured(implementation="triton")
    with pytest.raises(ValueError, match="kv_dtype must be that which the program was compiled for, 'int8', got"):
        sc.Engine(model, configured(kv_dtype="auto"), program=program)
    with pytest.raises(ValueError, match="kv_dtype must be 'auto' for a program that runs one request after another"):
        sc.Engine(model, CONFIG, program=SequentialProgram(model, ()))


def test_without_a_compiler_the_reference_does_the_same(
    shipped: tuple[Any, Any, Program], caplog: pytest.LogCaptureFixture
) -> None:
    model, _, program = shipped
    native = prompt_logits(sc.Engine(model, CONFIG, program=program), PROMPT)
    with caplog.at_level(logging.WARNING, "selective_compile"):
        engine = sc.Engine(model, configured(implementation="reference"))
    torch.testing.assert_close(native, prompt_logits(engine, PROMPT), rtol=0, atol=2e-2)
    assert "5 attention calls of LlamaForCausalLM keep keys and values as int8 (kv_dtype), in 720 bytes" in caplog.text


def test_logs_carry_it_and_are_replayed_with_it(shipped: tuple[Any, Any, Program], tmp_path: Path) -> None:
    model, tokenizer, program = shipped
    path = tmp_path / "run.jsonl"
    engine = sc.Engine(model, configured(record=path), program=program)
    for prompt, count in prompts_of(tokenizer, 3):
        engine.submit(prompt, max_new_tokens=count)
    while engine.step():
        pass
    log = EventLog.read(path)
    assert json.loads(path.read_text().splitlines()[0])["config"]["kv_dtype"] == log.config.kv_dtype == "int8"
    assert replay_engine(log, model, program=program).difference is None


@pytest.mark.usefixtures("compiled")
def test_kept_engines_are_told_apart_by_it(shipped: tuple[Any, Any, Program]) -> None:
    model, _, _ = shipped
    kept = KeptEngines()
    engine = kept.engine_for(model, CONFIG, [40])
    assert kept.engine_for(model, CONFIG, [40]) is engine
    found = kept._kept.of(model)
    assert found is not None and not found.fits(model, configured(kv_dtype="auto"))


def test_the_error_is_measured(shipped: tuple[Any, Any, Program]) -> None:
    model, tokenizer, program = shipped
    prompts = [prompt for prompt, _ in prompts_of(tokenizer, 4)]
    error = logit_error(model, prompts, CONFIG)
    assert isinstance(error, LogitError) and error.tokens == sum(map(len, prompts))
    assert 0 < error.mean_error < 0.02 and error.mean_error < error.largest_error < 0.5
    assert error.same_best > 0.98 and error.perplexity == pytest.approx(error.exact_perplexity, rel=0.01)
    assert (error.exact_kv_bytes, error.kv_bytes) == (2560, 720)
    rows = [(prompt_logits(sc.Engine(model, CONFIG, program=program), p), exact_logits(model, p)) for p in prompts]
    difference = torch.cat([found - exact for found, exact in rows])
    spread = float(torch.cat([exact.std(-1) for _, exact in rows]).mean())
    assert error.spread == pytest.approx(spread, rel=1e-3)
    assert error.mean_error == pytest.approx(float(difference.square().mean().sqrt()) / spread, rel=1e-2)
    assert "keys and values of a token 720 bytes, without 2560" in str(error)
    with pytest.raises(ValueError, match="must change results by one of kv_dtype, weights, max_attention_window"):
        logit_error(model, prompts, configured(kv_dtype="auto"))
    with pytest.raises(ValueError, match="prompts must have two tokens or more in one of them, got 1 prompts"):
        logit_error(model, [[5]], CONFIG)


def test_through_inductor() -> None:
    """The logits of the same graph without it."""
    model = tiny("llama", num_hidden_layers=1, initializer_range=0.2)
    found, plain = (prompt_logits(sc.Engine(model, configured(compile=way)), PROMPT) for way in (True, False))
    assert apart(found, plain) < 0.1 * apart(plain, exact_logits(model, PROMPT))
