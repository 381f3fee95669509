"""Modules that mix tokens in a way nobody knows run request after request, with the rest of the model ragged."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile import isolation_trial
from selective_compile.backend import compile_step_program, report_of
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.isolated_paths import UnprovedError
from selective_compile.isolated_program import TRIED, IsolatedProgram
from selective_compile.isolation import prove
from selective_compile.passes import RefusedError
from selective_compile.skeleton import skeleton
from tests.decoders import MAX_POSITIONS, VOCABULARY, WIDTH, Decoder
from tests.exactness import TOLERANCE, logits_in_chunks
from tests.leaving import STAYS, served_while_one_leaves
from tests.lengths import first_ten
from tests.models import tiny
from tests.oracle import assert_generated_alone, assert_same_tokens, reference_logits

CONFIG = sc.EngineConfig(compile=False, token_budget=24, block_size=8, max_kv_tokens=8 * 10)


class Highest(nn.Module):
    """Each channel's largest value so far."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(1).values


class Decay(nn.Module):
    """A recurrence, token after token in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.1, 0.9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = state * self.rate.sigmoid() + x[:, token]
            found.append(state)
        return torch.stack(found, 1)


class Keeping(nn.Module):
    """A mean over tokens that leaves its last value in the module, and starts from it the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros_like(x[:, :1]) if self.last is None else self.last
        means = start + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        self.last = means[:, -1:]
        return means


class Writing(nn.Module):
    """As `Highest`; leaves the last value in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        highest = x.cummax(1).values
        self.last.copy_(highest[0, -1])
        return highest


class Limited(Highest):
    """Has room for so many tokens alone."""

    room = 70

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.room:
            raise RuntimeError(f"no room for {x.shape[1]} tokens")
        return super().forward(x)


class Backwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1).cumsum(1).flip(1) / 10


class Mixed(Decoder):
    """The decoder with a mixer of its own behind each block."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(layers=1)
        self.mixers = nn.ModuleList([kind() for _ in self.blocks])
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x = x + mixer(block(x, mask))
        return self.head(self.norm(x))


def even_keys(ids: Tensor, attention_mask: Any) -> Tensor:
    """A causal mask of no family: of the keys that are not the query's own, those at even places."""
    places = torch.arange(ids.shape[1])
    return ((places[None, :] <= places[:, None]) & ((places % 2 == 0)[None, :] | torch.eye(len(places)).bool()))[
        None, None
    ]


def leaking(ids: Tensor, attention_mask: Any) -> Tensor:
    """Causal, but that all see the token at 90."""
    places = torch.arange(ids.shape[1])
    return ((places[None, :] <= places[:, None]) | (places == 90)[None, :])[None, None]


def distances(ids: Tensor, attention_mask: Any) -> Tensor:
    places = torch.arange(ids.shape[1])
    return places[:, None] - places[None, :]


def odd_distances(ids: Tensor, attention_mask: Any) -> Tensor:
    """Those of the token at 90 say that no token is behind it."""
    return distances(ids, attention_mask).masked_fill((torch.arange(ids.shape[1]) == 90)[None, :], 0)


def rounded(ids: Tensor, attention_mask: Any) -> Tensor:
    """Distances by positions in 16 bits, of which that at 257 is the one at 256."""
    places = torch.arange(ids.shape[1]).bfloat16()
    return (places[:, None] - places[None, :]).long()


class Tabled(Decoder):
    """Reads how far tokens are from one another in a table, of which a number in its code is beyond the end."""

    def __init__(self) -> None:
        super().__init__(attend=by_distance, mask=self.read, layers=1)
        self.table = distances(torch.zeros(1, MAX_POSITIONS), None)
        self.eval()

    def read(self, ids: Tensor, attention_mask: Any) -> Tensor:
        count = ids.shape[1]
        return self.table[:count, :count].masked_fill((torch.arange(count) > 1000)[None, :], 0)


def by_distance(query: Tensor, key: Tensor, value: Tensor, distance: Tensor) -> Tensor:
    """To near keys the query adds the square of what it holds for their distance, which is no mask, and no lookup."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    near = query.transpose(1, 2).gather(-1, distance.clamp(0, 3).expand(*scores.shape))
    weights = (scores + near * near).masked_fill(distance < 0, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


@functools.cache
def compiled(kind: type[nn.Module]) -> tuple[Mixed, IsolatedProgram]:
    """Tests share models: none changes a weight of these."""
    model = Mixed(kind)
    program = compile_step_program(model, CONFIG)
    assert isinstance(program, IsolatedProgram)
    return model, program


def serve(model: Any, program: Any, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Requests that arrive at random steps."""
    engine, draw, requests = sc.Engine(model, CONFIG, program=program), random.Random(0), []
    for prompt, count in zip(prompts, counts, strict=True):
        requests.append(engine.submit(prompt, GenerationConfig(max_new_tokens=count, do_sample=False)))
        for _ in range(draw.randint(0, 2)):
            engine.step()
    results = [list(request.result().tokens) for request in requests]
    assert engine.stats().preemptions > 0 and engine.stats().tokens_reused == 0
    return results


def random_prompts(vocabulary: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))] for _ in range(8)]


def test_tokens_and_logits_are_the_models_own() -> None:
    model, program = compiled(Decay)
    assert program.not_captured
    prompts = random_prompts(VOCABULARY)
    for prompt, tokens in zip(prompts, serve(model, program, prompts, [20] * 8), strict=True):
        assert_same_tokens(model, prompt, tokens)
    found = logits_in_chunks(program, prompts, chunk=5)
    for number in range(len(prompts)):
        program.forget(number)
    for prompt, logits in zip(prompts, found, strict=True):
        with torch.no_grad():
            assert float((model(torch.tensor([prompt]))[0] - logits).abs().max()) < TOLERANCE


def test_attention_with_an_odd_mask_is_isolated_with_what_surrounds_it() -> None:
    model = Decoder(mask=even_keys, layers=1)
    program = compile_step_program(model, CONFIG)
    assert tuple(program.isolated) == ("blocks.0",) and not program.call_sites
    prompts = random_prompts(VOCABULARY)
    for prompt, tokens in zip(prompts, serve(model, program, prompts, [12] * 8), strict=True):
        assert_same_tokens(model, prompt, tokens)


def test_a_module_may_be_told_how_far_tokens_are_from_each_other() -> None:
    model = Decoder(attend=by_distance, mask=distances, layers=1)
    program = compile_step_program(model, CONFIG)
    assert tuple(program.isolated) == ("blocks.0",)
    prompts = random_prompts(VOCABULARY)
    for prompt, tokens in zip(prompts, serve(model, program, prompts, [12] * 8), strict=True):
        assert_same_tokens(model, prompt, tokens)


def test_a_table_is_tried_up_to_its_end() -> None:
    program = compile_step_program(Tabled(), CONFIG)
    assert isinstance(program, IsolatedProgram) and list(program.isolated) == ["blocks.0"]


class Chosen(nn.Module):
    """The 70 tokens with the largest first feature pass: not causal in requests of more."""

    def forward(self, x: Tensor) -> Tensor:
        least = x[..., 0].topk(min(x.shape[1], 70), dim=1).values[:, -1:]
        return torch.where((x[..., 0] >= least)[..., None], x, torch.zeros_like(x))


def test_a_prompt_that_may_not_be_cut_must_fit_into_a_step() -> None:
    model, program = compiled(Decay)
    engine = sc.Engine(model, CONFIG, program=program)
    engine.submit([1] * 30, max_new_tokens=TRIED - 29).cancel()
    with pytest.raises(ValueError, match=r"at most EngineConfig.token_budget = 24 .*mixers\.0.*got 30"):
        engine.submit([1] * 30, max_new_tokens=TRIED - 28)
    long = engine.submit([1] * 20, max_new_tokens=60)
    assert_same_tokens(model, [1] * 20, long.result().tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mixed(Backwards),
        lambda: Mixed(Chosen),
        lambda: Decoder(mask=leaking, layers=1),
        lambda: Decoder(attend=by_distance, mask=odd_distances, layers=1),
        lambda: Decoder(attend=by_distance, mask=rounded, positions=first_ten, layers=1),
    ],
)
def test_what_sees_later_tokens_is_refused(make: Callable[[], nn.Module]) -> None:
    """At once, and at a place far beyond what is tried."""
    with pytest.raises(sc.RefusedError):
        sc.Engine(make(), CONFIG)


def opening(ids: Tensor, attention_mask: Any) -> Tensor:
    """Causal, but that the tokens from 320 on see one another."""
    places = torch.arange(ids.shape[1])
    behind = places * 0.5 >= 160.0
    return ((places[None, :] <= places[:, None]) | (behind[None, :] & behind[:, None]))[None, None]


@pytest.mark.parametrize("rows", [321, 322])
def test_what_sees_later_tokens_behind_the_lengths_that_are_tried_is_refused_where_requests_reach_it(rows: int) -> None:
    """The proof has looked farther than a trial does, whose requests have 300 tokens."""
    model = Decoder(mask=opening, layers=1)
    model.places = nn.Embedding(rows, WIDTH)
    with contextlib.nullcontext() if rows == 321 else pytest.raises(RefusedError, match="320 sees the one at 321"):
        assert isinstance(compile_step_program(model, CONFIG), IsolatedProgram)


def test_state_that_a_module_keeps_in_itself_is_not_shared() -> None:
    """The model as it was loaded has seen no token: neither what is run here nor another request may change that."""
    model, program = compiled(Keeping)
    engine = sc.Engine(model, CONFIG, program=program)
    requests = [engine.submit([3, 5, 7][: n + 1], max_new_tokens=5) for n in range(3)]
    for n, request in enumerate(requests):
        tokens = list(request.result().tokens)
        for place, token in enumerate(tokens):  # the model anew for each token
            logits = reference_logits(skeleton(model, {}), [3, 5, 7][: n + 1] + tokens[:place], [token])[0]
            assert float(logits.max() - logits[token]) < TOLERANCE
    assert model.mixers[0].last is None


def test_buffers_that_a_module_writes_are_each_requests_own() -> None:
    """They are no weights that have changed, for which all that was computed would be dropped in every step."""
    model, program = compiled(Writing)
    engine = sc.Engine(model, CONFIG, program=program)
    prompts = [list(range(30)), [3, 5, 7]]
    requests = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        while not request.finished:
            assert engine.stats().steps < 50
            engine.step()
        assert_same_tokens(model, prompt, request.result().tokens)
    assert engine.stats().preemptions == 0


def test_fallback_says_how_far_to_go() -> None:
    with pytest.raises(sc.RefusedError, match=r"aten\.cummax"):
        compile_step_program(Mixed(Highest), sc.EngineConfig(compile=False, fallback="refuse"))
    with pytest.raises(sc.RefusedError, match="graph capture"):
        compile_step_program(random_model("reformer"), sc.EngineConfig(compile=False, fallback="isolated"))


def test_what_was_unproved_can_be_pickled_with_who_reads_it() -> None:
    with pytest.raises(UnprovedError) as raised:
        prove(Mixed(Highest), "refuse")
    error = raised.value
    assert error.readers
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is UnprovedError and str(again) == str(error) and vars(again) == vars(error)


def test_report_and_log_name_modules_and_reasons(caplog: pytest.LogCaptureFixture) -> None:
    model = Mixed(Highest)
    with caplog.at_level(logging.WARNING):
        program = compile_step_program(model, sc.EngineConfig(compile=False, fallback="isolated"))
    assert "1 modules of Mixed run for one request after another, and share no prefixes" in caplog.text
    report = sc.Engine(model, sc.EngineConfig(compile=False, fallback="isolated"), program=program).report
    assert report == report_of(program, model)
    assert report.verdict == "isolated" and not report.ok
    assert report.isolated == ("mixers.0",) and len(report.calls) == 1
    for text in (str(report), caplog.text):
        assert "mixers.0" in text and "aten.cummax" in text
    assert json.loads(report.to_json())["isolated"] == ["mixers.0"]


def test_the_model_is_left_as_it_was() -> None:
    model = Mixed(Highest)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    compile_step_program(model, CONFIG)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())


@pytest.mark.parametrize(("rows", "longest"), [(MAX_POSITIONS, 128), (100, 66), (65, 0), (48, 0)])
def test_no_trial_reads_behind_the_end_of_a_table_that_is_known(
    rows: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the CPU, after which a GPU would be of no use to the process; what nobody can try is not isolated."""
    alone, lengths = isolation_trial.logits_alone, []

    def recorded(model: nn.Module, prompt: Tensor) -> Tensor:
        lengths.append(len(prompt))
        return alone(model, prompt)

    monkeypatch.setattr(isolation_trial, "logits_alone", recorded)
    model = Mixed(Highest)
    model.places = nn.Embedding(rows, WIDTH)
    with contextlib.nullcontext() if longest else pytest.raises(RefusedError, match="to run whole"):
        assert isinstance(compile_step_program(model, CONFIG), IsolatedProgram)
    assert max(lengths, default=0) == longest <= rows


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(1).values * self.factor


def test_changed_attributes_are_seen_from_the_next_step_on() -> None:
    model = Mixed(Scaled)
    engine = sc.Engine(model, CONFIG)
    prompt = [5, 7, 9]
    first = engine.submit(prompt, max_new_tokens=6).result().tokens
    assert_same_tokens(model, prompt, first)
    for mixer in model.mixers:
        mixer.factor = -3.0
    second = engine.submit(prompt, max_new_tokens=6).result().tokens
    assert second != first
    assert_same_tokens(model, prompt, second)


def test_compiled_by_inductor() -> None:
    model = Mixed(Highest)
    engine = sc.Engine(model, sc.EngineConfig(token_budget=16, max_kv_tokens=256))
    prompts = [[5, 7, 9], [11], list(range(20))]
    results = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
    for prompt, request in zip(prompts, results, strict=True):
        assert_same_tokens(model, prompt, request.result().tokens)


def test_weight_updates_drop_the_state() -> None:
    model = Mixed(Decay)
    engine = sc.Engine(model, CONFIG)
    request = engine.submit([5, 7, 9], max_new_tokens=8)
    for _ in range(4):
        engine.step()
    before = list(request.tokens)
    with torch.no_grad():
        model.mixers[0].rate.neg_()  # a weight that only an isolated module has
    tokens = list(request.result().tokens)
    assert_same_tokens(model, [5, 7, 9, *before], tokens[len(before) :])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("drop"), st.just(0), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_state_lives_as_long_as_its_request(actions: list[tuple[str, int, int]]) -> None:
    """Arrivals, cancelling, preemption and dropped results in any order: the right tokens, and nothing is left."""
    model, program = compiled(Decay)
    engine = sc.Engine(model, CONFIG, program=program)
    draw = random.Random(len(actions))
    requests: list[Any] = []
    for kind, first, second in actions:
        if kind == "submit":
            prompt = [draw.randrange(VOCABULARY) for _ in range(first)]
            requests.append((prompt, engine.submit(prompt, max_new_tokens=second)))
        elif kind == "cancel" and requests:
            requests[first % len(requests)][1].cancel()
        elif kind == "drop":
            engine.drop_computed()
        for _ in range(first if kind == "step" else 0):
            engine.step()
        running = {request.state for _, request in requests if not request.finished}
        assert set(program._requests) <= running
    for prompt, request in requests:
        result = request.result()
        assert_same_tokens(model, prompt, result.tokens)
    assert not program._requests and engine.stats().blocks_used == 0


TYPES = {"deepseek_v32": "new tokens"}  # by their mode


def with_sorted_selection(model: Any) -> Any:
    """The same sparse attention, but for numbers of selected keys that are computed with, which no proof follows."""
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer

        class Sorting(type(indexer)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                return super().forward(*args, **kwargs).sort(-1).values

        indexer.__class__ = Sorting
    return model


@pytest.mark.parametrize("family", TYPES)
def test_tokens_are_those_of_generate_on_each_request_alone(family: str) -> None:
    """Under random arrivals, prompts longer than a step's budget, and preemption."""
    model: Any = with_sorted_selection(random_model(family))
    program = compile_step_program(model, CONFIG)
    assert isinstance(program, IsolatedProgram) and program.mode == TYPES[family]
    prompts = random_prompts(vocabulary_of(model))
    for prompt, tokens in zip(prompts, serve(model, program, prompts, [16] * 8), strict=True):
        assert_generated_alone(model, prompt, tokens)
    assert not program._requests


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv"])
def test_what_the_kernels_do_not_take_runs_by_itself(family: str) -> None:
    """Rows of float64 are none for recurrences either: a step failed."""
    model: Any = random_model(family).double()
    assert sc.explain(model).verdict in ("isolated", "sequential")
    ids = torch.tensor([[3, 14, 15, 9, 26, 5]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    found = sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **options)
    assert torch.equal(found, model.generate(ids, **options))


@pytest.mark.parametrize("step", [1, 2])
def test_who_leaves_between_plan_and_run_leaves_nothing(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, program = compiled(Decay)
    assert_same_tokens(model, STAYS, served_while_one_leaves(model, program, CONFIG, step, monkeypatch))
    assert not program._requests


def test_branches_that_the_graph_has_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama", num_hidden_layers=1, initializer_range=0.2)
    mlp = model.model.layers[0].mlp
    own = mlp.forward

    def branched(x: Tensor) -> Any:
        return torch.cond(x.sum() > 30.0, lambda y: y * 1.5, lambda y: y * 1.0, (own(x),))

    monkeypatch.setattr(mlp, "forward", branched)
    with pytest.raises(RefusedError, match="runs graphs of its own"):
        compile_step_program(model, sc.EngineConfig(compile=False, fallback="refuse"))
    assert sc.explain(model).verdict in ("isolated", "sequential")
    ids = torch.randint(1, 199, (1, 40), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    found = sc.generate(model, ids, engine_config=sc.EngineConfig(compile=False), **options)
    assert torch.equal(found, model.generate(ids, **options))


def test_what_a_module_raises_for_one_request_ends_it_alone() -> None:
    model = Mixed(Limited)
    engine = sc.Engine(model, replace(CONFIG, token_budget=128, max_kv_tokens=8 * 30))
    assert engine.report.verdict == "isolated"
    prompts = [list(range(1, 8)), list(range(1, Limited.room + 4)), [5, 4, 3]]
    with engine.running():
        found = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
        results = [each.result() for each in found]
        assert "no room for" in str(results[1].error)
        for prompt, result in zip(prompts[::2], results[::2], strict=True):
            tokens = list(prompt)
            for _ in range(4):
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            assert list(result.tokens) == tokens[len(prompt) :]
        assert engine.submit(prompts[0], max_new_tokens=4).result().tokens == results[0].tokens
