"""The sampler: transformers' warpers are the definition, and the batch cannot move a draw."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from selective_compile.runtime import draw
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.sampler import sample

GREEDY = GenerationParams(
    max_new_tokens=9,
    eos_token_ids=frozenset(),
    do_sample=False,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    logprobs=False,
)


@pytest.fixture(autouse=True, scope="module", params=["kernels", "torch"])
def _by(request: pytest.FixtureRequest) -> Iterator[None]:
    """All of it by the kernels for CPUs, and by what other devices run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(draw.draw_cpu, "draw_tokens", lambda *_: None)
        yield


def params(**fields: Any) -> GenerationParams:
    return dataclasses.replace(GREEDY, do_sample=True, **fields)


def random_logits(rows: int, vocabulary: int, seed: int = 0, ties: bool = False) -> Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if ties else logits


def warped(logits: Tensor, wanted: GenerationParams) -> Tensor:
    """[V] float32: the scores that `generate` samples from, by its own warpers in its own order."""
    scores, no_ids = logits[None].float(), torch.zeros(1, 1, dtype=torch.int64)
    if wanted.temperature != 1.0:
        scores = TemperatureLogitsWarper(wanted.temperature)(no_ids, scores)
    if wanted.top_k:
        scores = TopKLogitsWarper(wanted.top_k)(no_ids, scores)
    if wanted.top_p < 1.0:
        scores = TopPLogitsWarper(wanted.top_p)(no_ids, scores)
    if wanted.min_p > 0.0:
        scores = MinPLogitsWarper(wanted.min_p)(no_ids, scores)
    return scores[0]


def counts_of_draws(logits: Tensor, wanted: GenerationParams, draws: int) -> Tensor:
    """[V]: how often each token comes up at the first `draws` indices of one request."""
    tokens = sample(logits.expand(draws, -1), [wanted] * draws, range(draws)).tokens
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0])


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, [GREEDY] * 2, [0, 0]).tokens == [1, 0]


def test_greedy_compares_in_float32() -> None:
    logits = random_logits(50, 300).bfloat16()
    assert sample(logits, [GREEDY] * 50, [0] * 50).tokens == logits.float().argmax(-1).tolist()


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 5), [], []).tokens == []


WARPINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("fields", WARPINGS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_follow_the_distribution_of_transformers_warpers(fields: dict[str, Any], ties: bool) -> None:
    draws = 10_000
    logits = random_logits(1, 40, seed=3, ties=ties)[0]
    wanted = params(seed=123, **fields)
    # By value: which of several equal scores top-p keeps depends on an unstable sort in transformers.
    values, value_of_token = logits.unique(return_inverse=True)
    none = torch.zeros(len(values), dtype=torch.float64)
    observed = none.index_add(0, value_of_token, counts_of_draws(logits, wanted, draws).double())
    expected = none.index_add(0, value_of_token, warped(logits, wanted).double().softmax(-1) * draws)
    assert observed[expected == 0].sum() == 0
    # Tokens expected less than five times count as one, as the chi-square approximation wants it.
    common = expected >= 5
    cells = torch.stack([observed[common], expected[common]])
    if expected[~common].sum() > 0:
        rest = torch.stack([observed[~common].sum(), expected[~common].sum()])
        cells = torch.cat([cells, rest[:, None]], dim=1)
    freedom = max(cells.shape[1] - 1, 1)
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1].clamp_min(1e-9)).sum().item()
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_the_same_tokens_stay_as_after_transformers_warpers(
    seed: int, ties: bool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """400 draws reach all tokens that are likely enough to show, and none that is filtered."""
    logits = random_logits(1, 25, seed=seed, ties=ties)[0]
    wanted = params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = logits[counts_of_draws(logits, wanted, 400) > 0]
    probabilities = warped(logits, wanted).softmax(-1)
    for value in logits.unique():  # equal scores are counted, for the reason above
        stay = probabilities[(logits == value) & (probabilities > 0)]
        number = int((seen == value).sum())
        assert number <= len(stay)
        assert number == len(stay) or stay[0] < 0.05


def test_equal_probabilities_at_the_limit_of_top_p() -> None:
    """Ten equal tokens and top_p 0.9: float32 rounding decides whether nine or ten stay, here and there."""
    for size, top_p in [(10, 0.9), (4, 0.5), (8, 0.25), (5, 0.6), (3, 0.34)]:
        logits = torch.zeros(size)
        wanted = params(top_p=top_p)
        stay = int((warped(logits, wanted) > -torch.inf).sum())
        assert int((counts_of_draws(logits, wanted, 2000) > 0).sum()) == stay, (size, top_p)


def test_a_draw_does_not_depend_on_the_batch_around_it() -> None:
    rows, vocabulary = 3 * len(WARPINGS), 500
    logits = random_logits(rows, vocabulary, ties=True)
    wanted = [
        params(seed=row, **fields) if row % 3 else GREEDY for row, fields in zip(range(rows), WARPINGS * 3, strict=True)
    ]
    indices = [row * 7 for row in range(rows)]
    together = sample(logits, wanted, indices).tokens
    alone = [sample(logits[row : row + 1], [wanted[row]], [indices[row]]).tokens[0] for row in range(rows)]
    backwards = sample(logits.flip(0), wanted[::-1], indices[::-1]).tokens[::-1]
    assert together == alone == backwards


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_the_nucleus_is_that_of_the_whole_vocabulary(
    seed: int, ties: bool, spread: float, top_p: float, min_p: float
) -> None:
    """Whether few tokens are enough for a row or not, and whatever rows are beside it."""
    logits = random_logits(6, 2 * draw.NUCLEUS, seed=seed) * spread
    logits = logits.round() if ties else logits
    logits[3, 5:] = -torch.inf
    logits[4] = torch.nan
    wanted = [params(seed=row, top_p=top_p, min_p=min_p, temperature=0.9) for row in range(6)]
    fast = draw.draw_of_nucleus(logits.clone(), wanted, range(6))
    assert fast == draw.draw(logits.clone(), wanted, range(6))
    assert fast[4] is None and None not in fast[:4]
    alone = [draw.draw_of_nucleus(logits[row : row + 1].clone(), [wanted[row]], [row])[0] for row in range(6)]
    assert fast == alone


def test_scaling_that_makes_ties_keeps_them_as_transformers_does() -> None:
    """Two logits that differ in their last bit and are equal once divided, at the limit of top-k."""
    temperature = 1.75
    candidates = torch.linspace(1.9, 1.99, 50)
    below = torch.nextafter(candidates, torch.tensor(0.0))
    found = int((candidates / temperature == below / temperature).nonzero()[0])
    logits = torch.tensor([0.0, float(below[found]), float(candidates[found]), -1.0])
    wanted = params(temperature=temperature, top_k=1)
    assert int((warped(logits, wanted) > -torch.inf).sum()) == 2
    assert (counts_of_draws(logits, wanted, 200) > 0).tolist() == [False, True, True, False]


def test_fewer_possible_tokens_than_top_k_beside_ties() -> None:
    """A limit of -inf is no tie, and one row's ties do not widen what another draws from."""
    logits = random_logits(3, 3000)
    logits[0, 4:] = -torch.inf
    logits[1] = logits[1].round()
    wanted = [params(top_k=9, seed=row) for row in range(3)]
    for index in range(50):
        together = sample(logits, wanted, [index] * 3).tokens
        assert together == [sample(logits[r : r + 1], [wanted[r]], [index]).tokens[0] for r in range(3)]
        assert together[0] < 4
        assert float(warped(logits[1], wanted[1])[together[1]]) > -torch.inf


@pytest.mark.parametrize("fields", [{"temperature": 1e39}, {"top_k": 2**70}, {"temperature": 1e-44}], ids=str)
def test_extreme_values_are_those_of_the_row_alone(fields: dict[str, Any]) -> None:
    """As any value that transformers takes; what they come to is None, or a token that the warpers leave."""
    logits = random_logits(2, 3000)
    neighbour = params(top_k=5, seed=1)
    together = sample(logits, [params(**{"top_k": 50, **fields}), neighbour], [0, 0]).tokens
    assert together[1] == sample(logits[1:], [neighbour], [0]).tokens[0]


def test_sampling_writes_to_no_logits_of_the_model() -> None:
    logits = random_logits(len(WARPINGS), 30)
    before = logits.clone()
    sample(logits, [params(**fields) for fields in WARPINGS], [0] * len(WARPINGS))
    for fields in WARPINGS:
        sample(logits[:1], [params(**fields)], [0])
    assert torch.equal(logits, before)


def test_seed_and_index_decide_the_draw() -> None:
    logits = torch.zeros(64, 1000)
    same = sample(logits, [params(seed=5)] * 64, [3] * 64).tokens
    assert len(set(same)) == 1
    by_index = sample(logits, [params(seed=5)] * 64, range(64)).tokens
    by_seed = sample(logits, [params(seed=seed) for seed in range(64)], [3] * 64).tokens
    assert len(set(by_index)) > 55 and len(set(by_seed)) > 55
    assert by_index[3] == by_seed[5] == same[0]


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 1), (0.5, 2), (1.0 - 2.0**-53, 2), (1.0, 2)])
def test_the_ends_of_the_range_draw_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, fraction: float, expected: int
) -> None:
    """1.0 cannot be drawn, but a product rounded up to the total can come of what can."""
    monkeypatch.setattr(draw, "_fractions", lambda params, indices, device: np.full(len(params), fraction))
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    for wanted in (params(), params(top_k=3), params(top_p=0.9)):
        assert sample(logits, [wanted], [0]).tokens == [expected]


def test_tokens_that_the_model_excludes_never_come_up() -> None:
    logits = torch.full((200, 8), -torch.inf)
    logits[:, 3] = 1.0
    logits[:, 6] = 1.0
    for fields in WARPINGS:
        assert set(sample(logits, [params(**fields)] * 200, range(200)).tokens) <= {3, 6}


def test_logprobs_are_those_of_the_model_for_who_asks() -> None:
    logits = random_logits(3, 20)
    wanted = [
        dataclasses.replace(GREEDY, logprobs=True),
        GREEDY,
        params(logprobs=True, temperature=0.5, top_k=3),
    ]
    sampled = sample(logits, wanted, [0, 0, 0])
    expected = logits.log_softmax(-1)
    for row in (0, 2):
        record = sampled.records[row]
        assert record is not None
        assert record.logprob == pytest.approx(expected[row, sampled.tokens[row]].item(), abs=1e-6)
    assert sampled.records[1] is None


@pytest.mark.parametrize("vocabulary", [64, 700, 9000, 9001])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_largest_by_groups_are_the_largest(vocabulary: int, count: int) -> None:
    """Also among many equal scores, of which any may be taken, and many that are impossible."""
    dice = torch.Generator().manual_seed(count)
    for scores in (
        torch.randn(5, vocabulary, generator=dice),
        torch.randint(0, 7, (5, vocabulary), generator=dice).float(),
        torch.randn(5, vocabulary, generator=dice).masked_fill(
            torch.rand(5, vocabulary, generator=dice) < 0.999, -torch.inf
        ),
    ):
        values, places = draw._topk(scores, min(count, vocabulary))
        assert torch.equal(values, scores.topk(min(count, vocabulary), dim=-1).values)
        assert torch.equal(values, scores.gather(1, places))
        assert all(len(set(row)) == len(row) for row in places.tolist())


def test_logits_are_written_to_only_where_that_is_allowed_and_nothing_keeps_them() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    histories = [array("q", [1, 2, 3])] * 3
    plain = [params(repetition_penalty=2.0) for _ in range(3)]
    wanted = sample(logits, plain, [0] * 3, histories).tokens
    assert torch.equal(logits, kept)
    recorded = [dataclasses.replace(each, output_logits=True) for each in plain]
    found = sample(logits, recorded, [0] * 3, histories, scratch=True)
    assert torch.equal(logits, kept) and found.tokens == wanted
    assert all(torch.equal(record.logits, row) for record, row in zip(found.records, kept, strict=True) if record)
    assert sample(logits, plain, [0] * 3, histories, scratch=True).tokens == wanted
    assert not torch.equal(logits, kept)
