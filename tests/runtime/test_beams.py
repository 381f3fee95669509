"""Beam search next to `model.generate` on the request alone: the same sequences, scores and beam indices."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import Program, compile_step_program
from selective_compile.runtime.philox import uniform
from tests.generation_rows import TEXTS, letters
from tests.models import tiny
from tests.runtime.simulated import SimulatedProgram, simulated_engine
from tests.shipped import shipped as shipped_model
from tests.test_whole_functions import Recurrent

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=4096)
MULTINOMIAL = torch.multinomial
Served = tuple[Any, Program]


@pytest.fixture(scope="module")
def shipped() -> Served:
    model, _, program = shipped_model("eager")
    return model, program


@pytest.fixture(scope="module")
def llama() -> Served:
    model = tiny("llama", attention="eager")
    return model, compile_step_program(model, CONFIG)


def random_fields(rng: Random) -> dict[str, Any]:
    beams = rng.choice([2, 2, 3, 4, 6])
    fields: dict[str, Any] = {
        "num_beams": beams,
        "num_return_sequences": rng.randint(1, beams),
        "length_penalty": rng.choice([0.0, 1.0, 1.0, -0.7, 2.5]),
        "early_stopping": rng.choice([True, False, "never"]),
        "max_new_tokens": rng.randint(1, 12),
        "eos_token_id": rng.choice([10, [10, *letters(rng, 5)], letters(rng, 60)]),
        "pad_token_id": rng.choice([0, 3]),
    }
    for name, value in (
        ("do_sample", True),
        ("repetition_penalty", rng.uniform(0.7, 2.0)),
        ("no_repeat_ngram_size", 2),
        ("min_new_tokens", 4),
        ("bad_words_ids", [letters(rng, 2) for _ in range(50)]),
        ("stopping_criteria", [lambda ids, scores, **_: ids.sum(-1) % 5 == 0]),
        ("prefix_allowed_tokens_fn", lambda row, ids: list(range(40 + len(ids) % 5, 120, 2))),
        ("encoder_repetition_penalty", 1.3),
        ("renormalize_logits", True),
    ):
        if rng.random() < 0.2:
            fields[name] = value
    if fields.get("do_sample"):
        fields |= rng.choice([{"temperature": 1.7}, {"top_k": 30}, {"top_p": 0.9, "top_k": 0}])
    return fields


class Dice:
    """Draws for `generate` what a request of this seed draws."""

    def __init__(self, seed: int) -> None:
        self.seed, self.steps = seed, 0

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        state = int(uniform([self.seed], [self.steps])[0] * 2.0**53)
        self.steps += 1
        generator = torch.Generator().manual_seed(state)
        return MULTINOMIAL(probabilities, num_samples, generator=generator)


def theirs(model: Any, prompt: list[int], fields: dict[str, Any], seed: int, patch: pytest.MonkeyPatch) -> Any:
    ids = torch.tensor([prompt])
    returns = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with patch.context() as context:
        context.setattr(torch, "multinomial", Dice(seed).multinomial)
        return model.generate(ids, attention_mask=torch.ones_like(ids), **fields, **returns)


def assert_equal(result: Any, wanted: Any, prompt: list[int], case: Any) -> None:
    """The hypotheses, filled up as there; where scores are nearly tied, as far as they are not."""
    found = result.hypotheses
    assert torch.allclose(torch.tensor([one.score for one in found]), wanted.sequences_scores, atol=1e-4), case
    assert len(result.scores) == len(wanted.scores)
    for ours, others in ((result.scores, wanted.scores), (result.logits, wanted.logits)):
        for mine, other in zip(ours, others, strict=True):
            finite = other.isfinite()
            assert torch.equal(finite, mine.isfinite()) and torch.allclose(mine[finite], other[finite], atol=1e-4)
    width = wanted.beam_indices.shape[1]
    paths = [[*one.beam_indices, *[-1] * (width - len(one.beam_indices))] for one in found]
    assert paths == wanted.beam_indices.tolist(), case
    for one, row in zip(found, wanted.sequences[:, len(prompt) :].tolist(), strict=True):
        assert list(one.tokens) == row[: len(one.tokens)], case


@pytest.mark.parametrize("which", ["shipped", "llama"])
@pytest.mark.parametrize("small", [False, True])
def test_random_configurations_equal_generate(
    which: str, small: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten at a time in one batch with requests of single sequences; once with short blocks, chunks, and preemption."""
    model, program = request.getfixturevalue(which)
    rng = Random(f"{which} {small}")
    sizes = {"block_size": 2, "max_kv_tokens": 160, "token_budget": 9, "max_requests": 12} if small else {}
    engine = sc.Engine(model, sc.EngineConfig(**{**vars(CONFIG), **sizes}), program=program)
    cases = []
    for _ in range(10):
        prompt = list(rng.choice(TEXTS).encode())
        fields = random_fields(rng)
        seed = rng.randrange(2**64)
        kept = {"output_scores": True, "output_logits": True}
        cases.append((prompt, fields, seed, engine.submit(prompt, seed=seed, **fields, **kept)))
        engine.submit(prompt, do_sample=True, num_return_sequences=2, max_new_tokens=5)
    steps = 0
    while engine.step():
        engine._scheduler.check()
        steps += 1
        if small and steps in (6, 30, 70):
            engine.drop_computed()
    for prompt, fields, seed, handle in cases:
        result = handle.result()
        assert result.error is None, (result.error, fields)
        assert_equal(result, theirs(model, prompt, fields, seed, monkeypatch), prompt, fields)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert small == (stats.preemptions > 0)


def test_beams_of_recurrent_and_windowed_models_are_those_of_one_table_without_chunks() -> None:
    """The states of recurrences and the blocks of windows move with the beams, whatever the budget and the pool."""
    for model in (Recurrent().eval(), tiny("gemma3_text")):
        prompt = list(range(1, 20))
        fields = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
        found = []
        compiled = compile_step_program(model, CONFIG)
        for sizes in ({"token_budget": 64, "block_size": 16}, {"token_budget": 8, "block_size": 4, "max_requests": 4}):
            engine = sc.Engine(model, sc.EngineConfig(compile=False, **sizes), program=compiled)
            handle = engine.submit(prompt, **fields)
            engine.submit(prompt[::-1], max_new_tokens=20, do_sample=False)
            for steps in range(9):
                engine.step()
                engine._scheduler.check()
                if steps == 7 and sizes["block_size"] == 4:
                    engine.drop_computed()
            found.append(handle.result().hypotheses)
        assert len({one.tokens for one in found[0]}) == 3
        assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]
        assert by_the_model_alone(model, prompt, fields) == [one.tokens for one in found[0]]


def by_the_model_alone(model: Any, prompt: list[int], fields: dict[str, Any]) -> list[tuple[int, ...]]:
    """A search without end-of-sequence ids, every step of it on whole sequences."""
    beams, scores = [list(prompt)], torch.zeros(1)
    with torch.no_grad():
        for _ in range(fields["max_new_tokens"]):
            found = model(torch.tensor(beams))
            logits = getattr(found, "logits", found)[:, -1]
            total = (logits.log_softmax(-1) + scores[:, None]).reshape(-1)
            scores, places = total.topk(fields["num_beams"])
            width = logits.shape[1]
            beams = [[*beams[place // width], place % width] for place in places.tolist()]
    return [tuple(beam[len(prompt) :]) for beam in beams]


def test_beams_are_refused_where_they_cannot_be_served_exactly(tmp_path: Path) -> None:
    program = SimulatedProgram()
    program.forks_requests = False
    with pytest.raises(ValueError, match="num_beams must be 1 for a model with modules that run for one request"):
        simulated_engine(program).submit([1, 2], num_beams=2)
    with pytest.raises(ValueError, match=r"num_beams must be 1 where EngineConfig.record is set"):
        simulated_engine(record=tmp_path / "run.jsonl").submit([1, 2], num_beams=2)
    with pytest.raises(ValueError, match="num_beams must be at most 9 for .* max_requests 9, got 10000000000000"):
        simulated_engine(max_requests=9).submit([1, 2], num_beams=10**13, max_new_tokens=2)
