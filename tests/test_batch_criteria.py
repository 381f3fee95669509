"""Criteria for a tensor of several rows are asked what transformers' loop asks them, and end what they end there."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.generate_requests import ENGINES

CONFIG = sc.EngineConfig(compile=False)
TEXTS = ["12+7=", "count 3 to 9:", "letters c to j:", "after monday comes"]


class Asked:
    """Ends rows at random, alike in each run, and remembers what it was given; ``together``: all at once, as a bool."""

    def __init__(self, seed: int, *, together: bool) -> None:
        self.rng, self.together, self.seen = Random(seed), together, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        self.seen.append((input_ids.tolist(), scores))
        done = [self.rng.random() < 0.2 for _ in input_ids]
        return all(done[:2]) if self.together else torch.tensor(done)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, dict[str, Tensor]]:
    model, tokenizer = tiny_model.load()
    tokenizer.padding_side = "left"
    return model, dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


def options(seed: int) -> dict[str, Any]:
    rng = Random(seed)
    ends = [258, *(rng.sample(range(97, 123), 5) if rng.random() < 0.5 else [])]
    length = {"max_length": 30} if rng.random() < 0.3 else {"max_new_tokens": rng.randint(1, 14)}
    samples = {"num_return_sequences": 2, "do_sample": True, "top_k": 1} if rng.random() < 0.3 else {}
    return {**length, **samples, "eos_token_id": ends, "pad_token_id": rng.choice([256, 0, 97])}


@pytest.mark.parametrize("together", [True, False], ids=["all rows", "each row"])
@pytest.mark.parametrize("seed", range(6))
def test_they_are_asked_the_same(
    seed: int, together: bool, loaded: tuple[Any, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = loaded
    theirs, ours = Asked(seed, together=together), Asked(seed, together=together)
    expected = model.generate(**batch, **options(seed), stopping_criteria=[theirs])
    found = sc.generate(model, **batch, **options(seed), stopping_criteria=[ours], engine_config=CONFIG)
    assert torch.equal(found, expected) and ours.seen == theirs.seen
    assert not [record for record in caplog.records if record.name == "selective_compile.self_served"]


def test_what_they_raise_is_raised_and_nothing_is_left_running(loaded: tuple[Any, dict[str, Tensor]]) -> None:
    model, batch = loaded

    def failing(input_ids: Tensor, scores: Any, **_: Any) -> bool:
        raise KeyError(input_ids.shape[1])

    with pytest.raises(KeyError, match=str(batch["input_ids"].shape[1] + 1)):
        sc.generate(model, **batch, max_new_tokens=9, stopping_criteria=[failing], engine_config=CONFIG)
    stats = ENGINES.engine_for(model, CONFIG, [30]).stats()
    assert stats.running == stats.waiting == stats.blocks_used == 0


def test_one_that_is_in_no_list_is_refused(loaded: tuple[Any, dict[str, Tensor]]) -> None:
    model, batch = loaded
    for ends in ([], [258]):
        with pytest.raises(ValueError, match="stopping_criteria must be a list, got Asked"):
            criteria: Any = Asked(1, together=False)
            sc.generate(model, **batch, eos_token_id=ends, stopping_criteria=criteria, engine_config=CONFIG)


MODELS_OWN: dict[str, dict[str, Any]] = {
    "no end": {"eos_token_id": []},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("name", MODELS_OWN)
def test_what_needs_more_than_that_is_the_models_own(
    name: str, loaded: tuple[Any, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = tiny_model.load()[0], loaded[1]
    given = {**batch, "max_new_tokens": 4, **MODELS_OWN[name]}
    with caplog.at_level(logging.WARNING, logger="selective_compile"):
        sc.generate(model, **given, stopping_criteria=[Asked(1, together=False)], engine_config=CONFIG)
    assert "stopping_criteria has Asked, which may tell the rows of a batch apart" in caplog.text
