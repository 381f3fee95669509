"""Processors and criteria of a request: which run on all rows at once, in whose order, and whose failure it is."""

from __future__ import annotations

import re
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from selective_compile.runtime.generation import GenerationParams, Served
from selective_compile.runtime.sampler import sample
from tests.runtime.simulated import VOCAB_SIZE, expected_tokens, simulated_engine

SERVED = Served(vocab_size=VOCAB_SIZE)
SAMPLED = {"do_sample": True, "top_k": 0}


def resolve(**options: Any) -> GenerationParams:
    return GenerationParams.resolve(None, {"seed": 3, **options}, SERVED, prompt=[1, 2, 3], default_seed=0)


def kinds(params: GenerationParams) -> list[str]:
    return [] if params.processors is None else [type(each).__name__ for each in params.processors.processors]


class Plain(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_common_fields_need_no_object() -> None:
    params = resolve(
        **{**SAMPLED, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
        min_new_tokens=2,
        eos_token_id=[4, 5],
        suppress_tokens=[9, 500],
        begin_suppress_tokens=[8],
    )
    assert params.processors is None and params.criteria is None
    found = (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    assert found == (0.5, 7, 0.9, 0.1, 1.3)
    bans = [(ban.tokens.tolist(), ban.first, ban.before) for ban in params.bans]
    assert bans == [([4, 5], 0, 5), ([4, 5], 0, 5), ([9], 0, float("inf")), ([8], 3, 4)]


def test_what_stands_behind_the_last_object_runs_on_all_rows() -> None:
    behind = resolve(**{**SAMPLED, "temperature": 0.5, "top_p": 0.9}, logits_processor=[Plain()], suppress_tokens=[3])
    assert kinds(behind) == ["SuppressTokensLogitsProcessor", "Plain"]
    assert (behind.temperature, behind.top_p, behind.bans) == (0.5, 0.9, ())
    before = resolve(**SAMPLED, temperature=0.5, typical_p=0.9, min_p=0.2)
    assert kinds(before) == ["TemperatureLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"]
    assert (before.temperature, before.min_p) == (1.0, 0.0)


def test_an_order_that_is_not_that_of_transformers_is_kept() -> None:
    """A user's warper stands before those of the fields."""
    params = resolve(**SAMPLED, temperature=0.5, logits_processor=[TopPLogitsWarper(0.5), TopKLogitsWarper(3)])
    assert kinds(params) == ["TopPLogitsWarper", "TopKLogitsWarper"] and params.temperature == 0.5
    params = resolve(**SAMPLED, top_p=0.7, logits_processor=[TopKLogitsWarper(3)])
    assert kinds(params) == [] and (params.top_k, params.top_p) == (3, 0.7)


def test_only_what_transformers_makes_itself_is_read_off() -> None:
    class Warmer(TemperatureLogitsWarper):
        pass

    assert kinds(resolve(**SAMPLED, logits_processor=[Warmer(2.0)])) == ["Warmer"]
    assert kinds(resolve(**SAMPLED, logits_processor=[TopKLogitsWarper(3, filter_value=-5.0)])) == ["TopKLogitsWarper"]
    assert kinds(resolve(**SAMPLED, logits_processor=[TopPLogitsWarper(0.5, min_tokens_to_keep=2)]))
    # Greedy decoding has a warper only where a user passes one, and then its scores show it.
    assert kinds(resolve(logits_processor=[TemperatureLogitsWarper(2.0)])) == ["TemperatureLogitsWarper"]


def test_a_users_processor_takes_the_place_of_the_one_of_its_kind() -> None:
    params = resolve(min_length=6, eos_token_id=4, logits_processor=[MinLengthLogitsProcessor(9, 5)])
    assert [(ban.tokens.tolist(), ban.before) for ban in params.bans] == [([5], 9)]


def test_a_negative_id_is_no_token() -> None:
    """Such as an end of sequence of -1, for a request that is never to end; and not the last of the vocabulary."""
    logits = torch.arange(float(VOCAB_SIZE))[None]
    for fields in ({"suppress_tokens": [-1]}, {"begin_suppress_tokens": [-1]}, {"eos_token_id": -1, "min_length": 9}):
        assert sample(logits, [resolve(**fields)], [0], [array("q", [1, 2, 3])]).tokens == [VOCAB_SIZE - 1]
    params = resolve(eos_token_id=[-1, 4], min_new_tokens=5)
    assert [ban.tokens.tolist() for ban in params.bans] == [[4], [4]]


def test_what_can_never_apply_is_left_out() -> None:
    assert resolve(min_length=3, eos_token_id=4).plain
    assert resolve(suppress_tokens=[]).plain
    assert resolve(repetition_penalty=1.0, no_repeat_ngram_size=0, remove_invalid_values=False).plain
    assert resolve(min_length=9).plain, "without an end-of-sequence id"


def test_kept_scores_and_logprobs_change_no_draw() -> None:
    """They take another way through the filters."""
    logits = (torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2).round()
    fields = {**SAMPLED, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7}
    ways = [resolve(**fields), resolve(**fields, output_scores=True), resolve(**fields, processed_logprobs=True)]
    for index in range(200):
        tokens = [sample(logits, [way], [index]).tokens for way in ways]
        together = sample(logits.expand(4, -1), [*ways, resolve(**SAMPLED)], [index] * 4).tokens
        assert tokens[0] == tokens[1] == tokens[2] and together[:3] == [one[0] for one in tokens]


@pytest.mark.parametrize(
    "fields",
    [{"typical_p": 0.7}, {"top_h": 0.6}, {"epsilon_cutoff": 0.03}, {"eta_cutoff": 0.1}, {"temperature": 1.5}],
    ids=str,
)
def test_draws_behind_objects_follow_their_distribution(fields: dict[str, Any]) -> None:
    draws = 10_000
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(4)) * 1.5
    params = resolve(**SAMPLED, **fields, logits_processor=[Plain()], output_scores=True)
    first = sample(logits, [params], [0], [array("q", [1, 2])]).records[0]
    assert first is not None and first.scores is not None
    tokens = sample(logits.expand(draws, -1), [params] * draws, range(draws), [array("q", [1, 2])] * draws).tokens
    observed = torch.bincount(torch.tensor(tokens), minlength=30).double()
    expected = first.scores.double().softmax(-1) * draws
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert ((observed - expected)[possible] ** 2 / expected[possible]).sum() < 30 + 5 * 60**0.5


def test_a_batch_around_it_changes_nothing() -> None:
    """Each request of thirty-two, with fields and objects of all kinds, has the tokens that it has by itself."""
    different: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.7},
        {**SAMPLED, "repetition_penalty": 0.6, "min_p": 0.02},
        {"do_sample": True, "top_k": 5, "output_scores": True},
        {**SAMPLED, "typical_p": 0.8},
        {"no_repeat_ngram_size": 2, "suppress_tokens": [4, 5, 6]},
        {**SAMPLED, "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6])},
        {**SAMPLED, "logits_processor": [Plain()], "top_p": 0.7, "logprobs": True},
    ]

    def arguments(number: int) -> dict[str, Any]:
        fields = different[number % len(different)]
        return {"prompt_ids": [number, 5, number % 7], "max_new_tokens": 9, "seed": number, **fields}

    engine = simulated_engine(max_kv_tokens=96, block_size=4, token_budget=11)
    requests = [engine.submit(**arguments(number)) for number in range(32)]
    together = [list(request) for request in requests]
    assert engine.stats().preemptions > 0
    for number, tokens in enumerate(together):
        assert tokens == list(simulated_engine().submit(**arguments(number)))


class Raises(LogitsProcessor):
    """Fails at its second token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise KeyError("nothing there")
        return scores


class RaisesToo(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] == 5:
            raise OSError("gone")
        return torch.tensor([False])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"logits_processor": [Raises()]}, "logits processors failed: KeyError: 'nothing there'"),
        ({"logits_processor": [lambda ids, scores: scores[0]]}, r"must give scores of shape \[1, 61\]"),
        ({"logits_processor": [lambda ids, scores: None]}, r"must give scores of shape \[1, 61\], got NoneType"),
        ({"stopping_criteria": [RaisesToo()]}, "stopping criteria failed: OSError: gone"),
        ({**SAMPLED, "suppress_tokens": list(range(VOCAB_SIZE))}, "no token can be drawn"),
        ({"logits_processor": [lambda ids, scores: scores.to_sparse()]}, "scores, got torch.sparse_coo on cpu"),
        ({"logits_processor": [lambda ids, scores: scores.to("meta")]}, "scores, got torch.strided on meta"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: []}, "logits processors failed: ValueError: .*empty list"),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given)),
)
def test_what_a_requests_own_code_raises_ends_that_request_alone(options: dict[str, Any], error: str) -> None:
    engine = simulated_engine()
    other = engine.submit([1, 2], max_new_tokens=6)
    failing = engine.submit([1, 2, 3], max_new_tokens=6, **options)
    third = engine.submit([4], max_new_tokens=6, do_sample=True)
    result = failing.result()
    assert result.finish_reason == "error" and len(result.tokens) < 6
    assert re.search(error, str(result.error)), result.error
    for request in (other, third):
        assert list(request) == expected_tokens(request.prompt_ids, request.params)
    assert engine.stats().blocks_used == 0
    with pytest.raises(RuntimeError, match="failed"):
        list(failing)


def test_what_a_request_keeps_of_its_steps() -> None:
    fields = {"do_sample": True, "top_k": 6, "temperature": 0.8, "seed": 2, "max_new_tokens": 5}
    kept = {"logprobs": True, "processed_logprobs": True, "output_logits": True, "output_scores": True}
    engine = simulated_engine()
    result = engine.submit([1, 2], top_logprobs=3, **fields, **kept).result()
    assert engine.submit([1, 2], **fields).result().tokens == result.tokens
    assert result.logits is not None and result.scores is not None
    for step, token in enumerate(result.tokens):
        raw, processed = result.logits[step].log_softmax(-1), result.scores[step].log_softmax(-1)
        assert int(processed.isfinite().sum()) == 6 and not raw.isinf().any()
        assert result.logprobs[step] == pytest.approx(float(raw[token]))
        assert result.processed_logprobs[step] == pytest.approx(float(processed[token]))
        for top, row in ((result.top_logprobs[step], raw), (result.processed_top_logprobs[step], processed)):
            assert list(top.tokens) == row.topk(3).indices.tolist()
            assert list(top.logprobs) == pytest.approx(row.topk(3).values.tolist())
    nothing = engine.submit([1], max_new_tokens=2).result()
    names = ("logprobs", "processed_logprobs", "top_logprobs", "processed_top_logprobs", "logits", "scores")
    assert all(getattr(nothing, name) is None for name in names)
    one = engine.submit([1], max_new_tokens=2, logprobs=True, top_logprobs=99).result()
    assert one.processed_top_logprobs is None and len(one.top_logprobs[0].tokens) == VOCAB_SIZE


def test_criteria_see_the_tokens_and_the_scores_and_say_why() -> None:
    seen: list[Any] = []

    class Third(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            seen.append((input_ids.tolist(), scores))
            return torch.tensor([len(seen) == 3])

    engine = simulated_engine()
    request = engine.submit([7, 8], max_new_tokens=9, stopping_criteria=[Third()], output_scores=True)
    result = request.result()
    assert result.finish_reason == "stop" and len(result.tokens) == 3
    assert [ids for ids, _ in seen] == [[[7, 8, *result.tokens[: count + 1]]] for count in range(3)]
    assert [len(scores) for _, scores in seen] == [1, 2, 3]
    assert torch.equal(seen[2][1][2][0], result.scores[2])
    seen.clear()
    engine.submit([7, 8], max_new_tokens=9, stopping_criteria=[Third()]).result()
    assert [scores for _, scores in seen] == [None] * 3
    late = engine.submit([1], max_new_tokens=9, max_time=1e-9).result()
    assert late.finish_reason == "length" and len(late.tokens) == 1


def test_criteria_of_transformers_are_numbers() -> None:
    params = resolve(eos_token_id=[4, 5], max_length=9)
    assert params.criteria is None and (params.max_new_tokens, params.eos_token_ids) == (6, {4, 5})


def test_of_several_criteria_of_a_kind_any_ends_the_request() -> None:
    """A user's take the place of that of the fields, as there."""
    lengths = [MaxLengthCriteria(8), MaxLengthCriteria(12), MaxLengthCriteria(10)]
    params = resolve(max_length=20, stopping_criteria=lengths)
    assert params.criteria is None and params.max_new_tokens == 5
    ends = [EosTokenCriteria([4, 5]), EosTokenCriteria(6)]
    assert resolve(eos_token_id=7, stopping_criteria=ends).eos_token_ids == {4, 5, 6}
    assert resolve(max_length=6, stopping_criteria=[MaxLengthCriteria(9)]).max_new_tokens == 6


def test_a_configuration_is_left_as_it_is() -> None:
    config = GenerationConfig(max_new_tokens=3, suppress_tokens=[1], sequence_bias=[[[4], 1.0]])
    before = config.to_json_string()
    simulated_engine().submit([1, 2], config).result()
    assert config.to_json_string() == before
