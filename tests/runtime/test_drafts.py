"""Drafts change how many steps there are, and no token."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.assistants import Assistant
from selective_compile.runtime.drafts import Acceptance, PromptLookup
from selective_compile.runtime.early_layers import EarlyLayers
from selective_compile.runtime.replay import EventLog, replay_schedule
from selective_compile.runtime.replay_engine import replay_engine
from selective_compile.runtime.request_state import NOT_CLEAR, RequestState
from selective_compile.runtime.step_times import StepTimes
from tests.models import tiny
from tests.oracle import assert_generated_alone
from tests.runtime.engine_checks import expect, run_until_idle
from tests.runtime.simulated import SimulatedModel, SimulatedProgram, expected_tokens, simulated_engine
from tests.shipped import shipped as shipped_model
from tests.test_whole_functions import Recurrent

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=4096)


def test_an_assistant_that_nobody_has_is_freed_with_its_engine() -> None:
    model, _, program = shipped_model()
    engine = sc.Engine(model, CONFIG, program=program)
    gone = []
    for _ in range(2):
        assistant = copy.deepcopy(model)
        gone.append(weakref.ref(assistant))
        engine.submit([5, 6, 7], max_new_tokens=4, assistant_model=assistant).result()
        del assistant
    gc.collect()
    assert [each() for each in gone] == [None, None]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 5))
def test_lookup_proposes_what_followed_the_latest_longest_match(tokens: list[int], size: int, most: int) -> None:
    lookup = PromptLookup(ngram_size=size)
    for end in range(1, len(tokens) + 1):  # as the tokens come
        proposed = lookup.propose(array("q", tokens[:end]), most)
    wanted: list[int] = []
    for length in range(min(size, len(tokens) - 1), 0, -1):
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if ends:
            wanted = tokens[ends[-1] :][:most]
            break
    assert proposed == wanted


def test_lookup_keeps_no_n_grams_of_any_length() -> None:
    lookup = PromptLookup(ngram_size=10**12)
    assert lookup.propose(array("q", [*range(900), *range(100)]), 2) == [100, 101]
    assert sum(map(len, lookup._ends)) < 10**6


def test_length_follows_what_was_right_and_drafts_that_do_not_pay_stop_and_come_back() -> None:
    acceptance = Acceptance()
    assert acceptance.length(0.2, 9) == 2  # a half, a quarter
    for _ in range(30):
        acceptance.observe([5, 6, 7], [5, 6, 7, 8])
    assert acceptance.length(0.2, 9) == 9
    for _ in range(40):
        acceptance.observe([5, 6, 7], [9])
    assert acceptance.length(0.2, 9) == 0
    for _ in range(9):
        acceptance.observe([5], [5])  # proposed, and not computed
    assert acceptance.length(0.2, 9) > 0
    assert acceptance.length(0.0, 9) == 9, "where nothing is known, rows are free"


def test_a_row_is_worth_its_share_of_a_step() -> None:
    times = StepTimes()
    assert times.worth_of_a_row(8) == 0.0
    for tokens in (4, 8, 16):
        times.observe(tokens, 1.0 + 0.5 * tokens)
    assert times.worth_of_a_row(8) == pytest.approx(8 * 0.5 / 5.0)


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_wrong_drafts_change_nothing(policy: Any) -> None:
    rng = Random(policy)
    engine = simulated_engine(block_size=3, max_kv_tokens=120, token_budget=12, max_requests=5, scheduler_policy=policy)
    requests = [
        engine.submit(
            [rng.randrange(3) for _ in range(rng.randint(1, 20))],
            do_sample=rng.random() < 0.5,
            eos_token_id=[5, 6, 7],
            max_new_tokens=rng.randint(1, 20),
            prompt_lookup_num_tokens=rng.randint(1, 6),
        )
        for _ in range(12)
    ]
    run_until_idle(engine)
    for request in requests:
        expect(request)


@pytest.fixture(scope="module")
def shipped() -> Any:
    return shipped_model()


def test_right_drafts_save_steps_and_tokens_are_the_same(shipped: Any) -> None:
    """Greedy and sampled, with scores, log probabilities and stops, next to requests without drafts."""
    model, tokenizer, program = shipped
    ids = tokenizer("count 3 to 9: 3 4 5 6 7 8 9 count 3 to 9: 3 4").input_ids
    asked: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "temperature": 0.6, "seed": 5},
        {"repetition_penalty": 1.01, "logprobs": True, "output_scores": True},
        {"eos_token_id": [ord("8")]},
        {"stop_strings": ["7 8"], "tokenizer": tokenizer},
        {"max_new_tokens": 7},
    ]
    asked = [{"max_new_tokens": 16, **options} for options in asked]
    found = []
    for drafts in ({}, {"prompt_lookup_num_tokens": 8}):
        engine = sc.Engine(model, CONFIG, program=program)
        requests = [engine.submit(ids, **options, **drafts) for options in asked]
        found.append([request.result() for request in requests])
        steps = engine.stats().steps
        assert steps == 16 if not drafts else steps <= 8
    for plain, drafted in zip(*found, strict=True):
        assert drafted.tokens == plain.tokens and drafted.finish_reason == plain.finish_reason
        assert (drafted.logprobs is None) == (plain.logprobs is None)
        if plain.logprobs is not None:
            assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
            assert len(drafted.scores) == len(plain.scores) == len(plain.tokens)
    assert_generated_alone(model, ids, found[1][0].tokens)


def test_blocks_filled_by_drafts_are_found_only_where_the_drafts_were_right(shipped: Any) -> None:
    model, tokenizer, program = shipped
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=4096, block_size=2), program=program)
    ids = tokenizer("aabab aabab aab").input_ids
    first = engine.submit(ids, max_new_tokens=24, prompt_lookup_num_tokens=5).result()
    again = engine.submit([*ids, *first.tokens], max_new_tokens=4)
    assert_generated_alone(model, again.prompt_ids, again.result().tokens)


def drafted(shipped: Any, *drafts: dict[str, Any]) -> tuple[list[list[tuple[int, ...]]], list[int]]:
    """With each of these, the tokens of three different requests and how many steps they took together."""
    model, tokenizer, program = shipped
    options = [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.1}]
    found, steps = [], []
    for by in drafts:
        engine = sc.Engine(model, CONFIG, program=program)
        requests = [
            engine.submit(tokenizer(text).input_ids, max_new_tokens=14, eos_token_id=None, **by, **each)
            for text, each in zip(("count 3 to 9:", "12+7=", "letters c to j:"), options, strict=True)
        ]
        found.append([request.result().tokens for request in requests])
        steps.append(engine.stats().steps)
    return found, steps


def test_an_assistant_drafts_for_several_requests_and_changes_no_token(shipped: Any) -> None:
    model, tokenizer, _ = shipped
    other = tiny("llama", vocab_size=model.config.vocab_size)
    found, steps = drafted(shipped, *({"assistant_model": assistant} for assistant in (None, model, other)))
    assert found[0] == found[1] == found[2]
    assert steps[1] < steps[0] == 14, "the model itself is right most of the time"
    ids = tokenizer("count 3 to 9:").input_ids
    ours = sc.generate(model, [ids], assistant_model=model, max_new_tokens=14, eos_token_id=None, engine_config=CONFIG)
    assert ours[0][len(ids) :].tolist() == list(found[0][0])


def test_a_models_first_layers_draft_for_it_and_change_no_token(shipped: Any) -> None:
    """All of its layers are right where it chooses the likeliest token, so that this takes fewest steps."""
    model = shipped[0]
    before = [*vars(model)], len(model.model.layers), model.config.num_hidden_layers
    layers = (None, 1, len(model.model.layers))
    found, steps = drafted(shipped, *({"assistant_early_exit": each} for each in layers))
    assert all(each == found[0] for each in found)
    assert steps[-1] < steps[0] == 14
    assert before == ([*vars(model)], len(model.model.layers), model.config.num_hidden_layers)


def test_the_first_layers_are_those_of_the_graph() -> None:
    """Also of a model that goes through its list of layers without asking its configuration for their number."""
    model = tiny("gpt2")
    layers = model.config.num_hidden_layers
    short = EarlyLayers().of(model, 1)
    whole, first = (compile_step_program(each, CONFIG).call_sites for each in (model, short))
    assert len(whole) == layers > len(first) == 1
    plain, drafted = (
        sc.Engine(model, CONFIG).submit([1, 2, 3], max_new_tokens=9, **fields).result().tokens
        for fields in ({}, {"assistant_early_exit": 1})
    )
    assert plain == drafted


def test_an_assistants_own_configuration_does_not_reach_its_drafts_or_is_refused() -> None:
    model, assistant = tiny("llama"), tiny("llama", seed=1)
    assistant.generation_config.num_return_sequences = 2
    engine = sc.Engine(model, CONFIG)
    alone = engine.submit([1, 2, 3], max_new_tokens=9).result().tokens
    drafted = engine.submit([1, 2, 3], max_new_tokens=9, assistant_model=assistant)
    assert drafted.result().tokens == alone
    assistant.generation_config.constraints = ["one"]
    with pytest.raises(ValueError, match="assistant_model must have a generation_config that goes with drafts: .*cons"):
        engine.submit([1, 2, 3], assistant_model=assistant)


def test_an_assistant_that_fails_gives_no_drafts_and_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    program, failing = SimulatedProgram(), SimulatedProgram()

    def fail() -> None:
        raise torch.OutOfMemoryError("too much")

    failing.before_run = fail
    assistant = Assistant(simulated_engine(failing))
    engine = simulated_engine(program)
    model: Any = SimulatedModel()
    engine._drafting._assistants._kept[model] = assistant
    drafted = engine.submit([1, 2], max_new_tokens=9, assistant_model=model)
    other = engine.submit([3], max_new_tokens=9)
    for request, prompt in ((drafted, [1, 2]), (other, [3])):
        assert list(request.result().tokens) == expected_tokens(prompt, request.params)
    assert caplog.text.count("drafting of a request failed") == 1
    assert not assistant._engine._requests and not engine._requests


def test_an_assistant_shares_blocks_only_among_requests_of_one_salt() -> None:
    engine = simulated_engine(block_size=2)
    assistant = Assistant(engine)
    found = [assistant.propose([([1, 2, 3, 4, 5], 2, salt)]) for salt in ("a", "b")]
    assert engine.stats().tokens_reused == 0
    assert assistant.propose([([1, 2, 3, 4, 5], 2, "a")]) == found[0] == found[1]
    assert engine.stats().tokens_reused == 4
    assert assistant.propose([([1, 2], 0, None), ([1], engine.longest + 1, None)]) == [[], []]


def test_refusals() -> None:
    engine = simulated_engine(compile=False)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens must be an integer of at least 1, got 0"):
        engine.submit([1], prompt_lookup_num_tokens=0)
    with pytest.raises(ValueError, match="max_matching_ngram_size must be an integer of at least 1, got 0"):
        engine.submit([1], prompt_lookup_num_tokens=2, max_matching_ngram_size=0)
    with pytest.raises(ValueError, match="assistant_model must be a torch.nn.Module, got str"):
        engine.submit([1], assistant_model="a model")
    with pytest.raises(ValueError, match="assistant_model must have a vocabulary of 61, got 199"):
        engine.submit([1], assistant_model=tiny("llama"))
    with pytest.raises(ValueError, match="assistant_ensemble_weight must be None"):
        engine.submit([1], assistant_model=tiny("llama"), assistant_ensemble_weight=0.5)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens must be None with num_beams=2, got 3: leave it out"):
        engine.submit([1], prompt_lookup_num_tokens=3, num_beams=2)
    early = sc.Engine(tiny("llama"), CONFIG)
    for options, message in (
        ({"assistant_early_exit": 0}, "assistant_early_exit must be an integer of at least 1, got 0"),
        ({"assistant_early_exit": 3}, "assistant_early_exit must be at most 2, the model's layers, got 3"),
        ({"assistant_early_exit": 1, "num_beams": 2}, "assistant_early_exit must be None with num_beams=2, got 1: le"),
        ({"assistant_early_exit": 1, "prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens must be None with assi"),
        ({"assistant_early_exit": 1, "assistant_model": tiny("llama")}, "assistant_model must be None with assistant_"),
    ):
        with pytest.raises(ValueError, match=message):
            early.submit([1], **options)
    with pytest.raises(ValueError, match="assistant_early_exit must be None for Recurrent, .*: prompt_lookup_num_tok"):
        EarlyLayers().of(Recurrent(), 1)


@pytest.mark.parametrize(
    "make", [lambda: tiny("gemma3_text"), lambda: Recurrent().eval()], ids=["windows", "recurrent"]
)
def test_drafts_change_no_token_where_blocks_are_given_back_and_where_nothing_can_be_rewound(make: Any) -> None:
    model = make()
    program = compile_step_program(model, CONFIG)
    assert program.rewinds == (not program.state_sites)
    sizes = {"token_budget": 12, "block_size": 3, "max_kv_tokens": 240}
    found, steps = [], []
    for drafts in ({}, {"prompt_lookup_num_tokens": 6}):
        # All steps take one tick, so that drafts pay on a busy machine too.
        ticks = itertools.count()
        engine = sc.Engine(
            model,
            sc.EngineConfig(compile=False, **sizes),
            program=program,
            clock=lambda ticks=ticks: float(next(ticks)),
        )
        # Tiny models come to repeat themselves, and then the drafts are right.
        requests = [engine.submit([1, 2, 3] * length, max_new_tokens=40, **drafts) for length in (1, 4, 7)]
        while engine.step():
            engine._scheduler.check()
        found.append([request.tokens for request in requests])
        steps.append(engine.stats().steps)
    assert found[0] == found[1]
    assert steps[1] < steps[0] if program.rewinds else steps[1] == steps[0]


def test_a_recorded_engine_makes_no_drafts_and_its_log_is_replayed(tmp_path: Path) -> None:
    engine = simulated_engine(record=tmp_path / "run.jsonl")
    request = engine.submit([1, 2] * 8, max_new_tokens=9, prompt_lookup_num_tokens=4)
    run_until_idle(engine)
    expect(request)
    assert engine.stats().tokens_computed == 16 + 8
    log = EventLog.read(tmp_path / "run.jsonl")
    assert replay_schedule(log).difference is None
    program: Any = SimulatedProgram()
    assert replay_engine(log, SimulatedModel(), program=program).difference is None


def test_a_request_without_a_proposal_goes_on_decoding_as_it_did() -> None:
    state = RequestState("a", 0, [1, 2], max_new_tokens=9)
    state.clear_until = 7
    state.propose(array("q"))
    assert state.clear_until == 7
    state.propose(array("q", [5]))
    assert state.clear_until == NOT_CLEAR and state.draft == array("q", [5])
    state.clear_until = 7
    state.propose(array("q"))
    assert state.clear_until == NOT_CLEAR and not state.draft
