"""Requests next to `model.generate` on each alone: the same tokens and scores, for every field that says so.

`generate` draws with the engine's dice here, so that sampling is compared token for token as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import Program
from selective_compile.runtime.philox import uniform
from tests.generation_rows import ROWS, TEXTS
from tests.shipped import shipped

CONFIGURATIONS = 20
NEW_TOKENS = 7
TOLERANCE = 1e-4
CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=4096)


@dataclass(frozen=True, kw_only=True)
class Served:
    model: Any
    tokenizer: Any
    program: Program

    def engine(self, **config: Any) -> sc.Engine:
        return sc.Engine(self.model, sc.EngineConfig(**{**vars(CONFIG), **config}), program=self.program)


@pytest.fixture(scope="module")
def served() -> Served:
    model, tokenizer, program = shipped("eager")
    return Served(model=model, tokenizer=tokenizer, program=program)


@dataclass
class Dice:
    """Stands for `torch.multinomial`: draws as the sampler does for a request of this seed, and keeps how narrowly."""

    seed: int
    margins: list[float] = field(default_factory=list)

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        assert probabilities.shape[0] == num_samples == 1
        cumulative = probabilities[0].double().cumsum(0)
        drawn = float(uniform([self.seed], [len(self.margins)])[0]) * cumulative[-1]
        self.margins.append(float((cumulative - drawn).abs().min()))
        return torch.searchsorted(cumulative, drawn, right=True).view(1, 1)


@contextmanager
def rolled(dice: Dice, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch, "multinomial", dice.multinomial)
        yield


@dataclass(frozen=True, kw_only=True)
class Case:
    prompt: list[int]
    fields: dict[str, Any]
    seed: int

    def fresh(self) -> dict[str, Any]:
        """The fields, with processors of its own, since they may count their calls."""
        made = self.fields.get("logits_processor")
        return {**self.fields, "logits_processor": made()} if made else self.fields


def random_case(served: Served, rng: Random, names: Sequence[str]) -> Case:
    text = rng.choice(TEXTS)
    # A prompt of the begin-of-sequence id alone is what a forced first token looks for.
    ids = served.tokenizer(text).input_ids
    prompt = ids[:1] if "forced_bos_token_id" in names and rng.random() < 0.5 else ids
    fields: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    for name in names:
        fields |= ROWS[name](rng)
    return Case(prompt=prompt, fields=fields, seed=rng.randrange(2**64))


def assert_equals_generate(served: Served, case: Case, result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(case.seed)
    ids = torch.tensor([case.prompt])
    returns = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with rolled(dice, monkeypatch):
        theirs = served.model.generate(
            ids, attention_mask=torch.ones_like(ids), tokenizer=served.tokenizer, **case.fresh(), **returns
        )
    tokens = theirs.sequences[0, len(case.prompt) :].tolist()
    for step, pair in enumerate(zip(tokens, result.tokens, strict=False)):
        assert_close(result.logits[step], theirs.logits[step][0])
        assert_close(result.scores[step], theirs.scores[step][0])
        if pair[0] != pair[1]:
            margin = dice.margins[step] if dice.margins else float(theirs.scores[step][0].topk(2).values.diff().abs())
            assert margin < TOLERANCE, f"token {step} is {pair[1]}, generate gives {pair[0]}: {case}"
            return
    assert list(result.tokens) == tokens, case


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    finite = theirs.isfinite()
    assert torch.equal(ours[~finite], theirs[~finite])
    # Relative too: watermarks give scores of 1e38 to what is impossible.
    assert torch.allclose(ours[finite], theirs[finite], atol=TOLERANCE, rtol=1e-4)


def submit(served: Served, engine: sc.Engine, case: Case) -> sc.Request:
    kept = {"output_scores": True, "output_logits": True, "tokenizer": served.tokenizer}
    return engine.submit(case.prompt, seed=case.seed, **case.fresh(), **kept)


@pytest.mark.parametrize("name", ROWS)
def test_a_field_equals_generate(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty random configurations, all in one batch."""
    rng = Random(name)
    cases = [random_case(served, rng, [name]) for _ in range(CONFIGURATIONS)]
    engine = served.engine()
    requests = [submit(served, engine, case) for case in cases]
    for case, request in zip(cases, requests, strict=True):
        assert_equals_generate(served, case, request.result(), monkeypatch)


# With drafts, `generate` asks processors that keep a state more than once for a token, and draws for several at once.
NOT_TOGETHER = {
    "max_length",
    "max_time",
    "beams that are one",
    "drafts that are none",
    "caches of transformers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_of_different_configurations_equals_generate(
    served: Served, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty-two requests with up to four rows of fields each, arriving over time, with preemption."""
    rng = Random(seed)
    names = sorted(ROWS.keys() - NOT_TOGETHER)
    cases = [random_case(served, rng, rng.sample(names, rng.randint(1, 4))) for _ in range(32)]
    engine = served.engine(token_budget=24, max_kv_tokens=60, block_size=2)
    requests = []
    for case in cases:
        requests.append(submit(served, engine, case))
        for _ in range(rng.randint(0, 2)):
            engine.step()
    for case, request in zip(cases, requests, strict=True):
        result = request.result()
        assert result.finish_reason in ("stop", "length"), (result.error, case)
        assert_equals_generate(served, case, result, monkeypatch)
    assert engine.stats().preemptions > 0
