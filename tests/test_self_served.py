"""Calls of `generate` that the model serves itself: they equal its own, whatever rows have to do with each other."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    SuppressTokensAtBeginLogitsProcessor,
)

import selective_compile as sc
from selective_compile import kept_engines, tiny_model
from selective_compile.generate_requests import ENGINES
from tests.decoders import Decoder
from tests.huggingface.models import tiny
from tests.test_module_program import Experts

CONFIG = sc.EngineConfig(compile=False)
TEXTS = ["12+7=", "count 3 to 9:", "letters c to j:", "after monday comes"]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return tiny_model.load()


def batch(tokenizer: Any) -> dict[str, Any]:
    tokenizer.padding_side = "left"
    return {**tokenizer(TEXTS, return_tensors="pt", padding=True), "max_new_tokens": 8}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "selective_compile.self_served"]


class TokensOfEach(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for row in range(len(input_ids)):
            masked[row, 97 + row : 100 + row] = scores[row, 97 + row : 100 + row]
        return masked


class Warmth(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - torch.arange(4.0)[:, None] * torch.arange(scores.shape[-1]) / 9


class AgainstOthers(LogitsProcessor):
    """As guidance does whose second half of rows has other prompts."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        first, second = scores.chunk(2)
        return torch.cat([first - 0.5 * second] * 2)


class LimitOfEach(StoppingCriteria):
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] - self.width >= torch.tensor([1, 3, 5, 7])


class AllHaveSaid(StoppingCriteria):
    """As evaluation harnesses have it: by place behind the padded prompt, and over when all are."""

    def __init__(self, width: int) -> None:
        self.width, self.done = width, [False] * 4

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            self.done[row] |= any(token in (49, 52, 100, 116) for token in ids)
        return all(self.done)


class Held(LogitsProcessor):
    """Of what no copy can be made."""

    def __init__(self) -> None:
        self.module, self.numbers, self.rows = torch, iter(range(99)), []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows.append(len(scores))
        return scores - 9.0 * (self.module.arange(scores.shape[-1]) % (2 + next(self.numbers)))


OWN = {
    "tokens of each row": lambda width: {"logits_processor": [TokensOfEach()]},
    "a number for each row": lambda width: {"logits_processor": [Warmth()]},
    "rows against rows": lambda width: {"logits_processor": [AgainstOthers()]},
    "a limit for each row": lambda width: {"stopping_criteria": [LimitOfEach(width)]},
    "over when all are": lambda width: {"stopping_criteria": [AllHaveSaid(width)]},
    "a function": lambda width: {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] % 3 == 0]},
    "no copies": lambda width: {"logits_processor": [Held()]},
    "one of transformers that counts rows": lambda width: {
        "logits_processor": [PrefixConstrainedLogitsProcessor(lambda row, ids: [97 + row, 98 + row], 1)]
    },
    "one of transformers that counts columns": lambda width: {
        "logits_processor": [SuppressTokensAtBeginLogitsProcessor([49, 51, 52, 97, 100, 101, 32], width)]
    },
}


@pytest.mark.parametrize("name", OWN)
def test_own_objects_for_several_rows_equal_generate(name: str, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given = batch(tokenizer)
    made = partial(OWN[name], given["input_ids"].shape[1])
    expected = model.generate(**given, **made())
    assert not torch.equal(expected, model.generate(**given)), "it changes nothing"
    assert torch.equal(sc.generate(model, **given, **made(), engine_config=CONFIG), expected)
    with sc.wrapped(model, CONFIG):
        assert torch.equal(model.generate(**given, **made()), expected)
    # Samples of a prompt are rows, too.
    one = {key: value[:1] for key, value in given.items() if key != "max_new_tokens"} | {"max_new_tokens": 3}
    if name == "tokens of each row":
        several = {**one, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
        assert torch.equal(sc.generate(model, **several, **made()), model.generate(**several, **made()))


def test_the_users_own_object_is_called_and_what_it_keeps_is_there(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    held = Held()
    sc.generate(model, **batch(tokenizer), logits_processor=[held], engine_config=CONFIG)
    assert set(held.rows) == {4}


def test_others_are_requests_by_themselves(loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    """A list of prompts, a single row, and what transformers has."""
    model, tokenizer = loaded
    held = Held()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    first = sc.generate(model, prompts[:1], logits_processor=[held], max_new_tokens=8, engine_config=CONFIG)
    assert set(held.rows) == {1} and len(first) == 1
    sc.generate(model, **batch(tokenizer), stopping_criteria=[MaxTimeCriteria(1e3)], engine_config=CONFIG)
    counted = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 20 + len(ids)])]
    found = sc.generate(model, prompts, stopping_criteria=counted, max_new_tokens=30, engine_config=CONFIG)
    for prompt, row in zip(prompts, found, strict=True):
        (alone,) = sc.generate(model, torch.tensor([prompt]), stopping_criteria=counted, engine_config=CONFIG)
        assert torch.equal(row, alone[: len(row)])
    assert ENGINES.engine_for(model, CONFIG, [64]).stats().steps > 0 and not said(caplog)


def test_a_model_without_a_loop_of_its_own_has_requests_alone() -> None:
    model, config = Decoder().eval(), sc.EngineConfig(compile=False)
    ids, seen = torch.tensor([[3, 4, 5], [6, 7, 8]]), []
    options: dict[str, Any] = {"max_new_tokens": 3, "pad_token_id": 0, "eos_token_id": 1, "engine_config": config}
    sc.generate(model, ids, logits_processor=[lambda ids, scores: seen.append(len(ids)) or scores], **options)
    assert seen == [1] * 6
    with pytest.raises(
        ValueError, match="a call must be for a tensor, of a model that has a generate method: custom_g"
    ):
        sc.generate(model, ids, custom_generate=len, **options)


def test_it_is_said_once_why(loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    _, tokenizer = loaded
    model, _ = tiny_model.load()
    with caplog.at_level(logging.WARNING, logger="selective_compile"):
        for _ in range(2):
            sc.generate(model, **batch(tokenizer), logits_processor=[TokensOfEach()], engine_config=CONFIG)
    (text,) = said(caplog)
    assert text.startswith("LlamaForCausalLM serves calls of generate itself") and "has TokensOfEach, which may" in text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fallback": ({"engine_config": sc.EngineConfig(compile=False, fallback="refuse")}, "fallback must be 'sequential'"),
    "isolated": ({"engine_config": sc.EngineConfig(compile=False, fallback="isolated")}, "fallback must be 'sequent"),
    "seed": (
        {"seed": 3},
        "seed must be None in a call that the model serves itself: logits_processor has TokensOfEach",
    ),
    "regex": ({"regex": "a+"}, "regex must be None in a call"),
    "several": (
        {"generation_config": [GenerationConfig()] * 4, "custom_generate": len},
        "must be one for all rows of a t",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_requests_have_is_refused_there(name: str, loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    options, message = REFUSED[name]
    options = {"engine_config": CONFIG, "tokenizer": tokenizer, **options}
    with pytest.raises(ValueError, match=message):
        sc.generate(model, **batch(tokenizer), logits_processor=[TokensOfEach()], **options)


def test_under_autocast_a_ragged_model_is_served_in_steps(loaded: tuple[Any, Any], caplog: Any) -> None:
    """And without it again, with the numbers that it has there."""
    model, tokenizer = loaded
    given = {**batch(tokenizer), "return_dict_in_generate": True, "output_logits": True}
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            expected = model.generate(**given)
            found = sc.generate(model, **given, engine_config=CONFIG)
        assert torch.equal(found.sequences, expected.sequences)
        error = torch.stack(found.logits) - torch.stack(expected.logits)
        worst = error[:, 1:].abs().max()  # the first row ends early, and has none then
        assert worst < 0.5 and (worst > 1e-3) == enabled
    assert not said(caplog)


class ExpertsInFloat(Experts):
    def compute(self, rows: Tensor, expert: int) -> Tensor:
        return super().compute(rows, expert).float()


def test_under_autocast_modules_that_run_by_themselves_are_called_by_the_model_alone(caplog: Any) -> None:
    model = tiny("llama", num_hidden_layers=1)
    model.model.layers[0].mlp = ExpertsInFloat()
    assert sc.explain(model).called_once
    given = {"inputs": torch.tensor([[5, 6, 7], [8, 9, 10]]), "max_new_tokens": 3, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sc.generate(model, **given, engine_config=CONFIG).tolist() == model.generate(**given).tolist()
        (line,) = said(caplog)
        assert re.search(r"autocast .* it is on, and the engine's steps, .* would call model\.layers\.0\.mlp", line)
        with pytest.raises(sc.RefusedError, match="autocast"):
            sc.generate(model, [[65, 66]], max_new_tokens=2, engine_config=CONFIG)


def test_a_model_that_was_refused_is_not_tried_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take seconds; but one that looks otherwise is."""
    tried: list[Any] = []
    compiled = kept_engines.compile_step_program

    def noted(model: Any, config: Any) -> Any:
        tried.append(model)
        return compiled(model, config)

    monkeypatch.setattr(kept_engines, "compile_step_program", noted)
    model: Any = tiny("llama", num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = ExpertsInFloat()
    given = {"inputs": torch.tensor([[5, 6, 7], [8, 9, 10]]), "max_new_tokens": 3, "do_sample": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            sc.generate(model, **given, engine_config=CONFIG)
        assert len(tried) == 1
        for _ in range(2):  # who cannot be served by the model is told of it as it is now
            with pytest.raises(sc.RefusedError):
                sc.generate(model, [[5, 6, 7]], max_new_tokens=2, engine_config=CONFIG)
        assert len(tried) == 3
        model.model.layers[0].mlp = mlp
        sc.generate(model, **given, engine_config=CONFIG)
    assert len(tried) == 4


class AsksTheModel(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 50.0 * (
            torch.arange(scores.shape[-1]) == self.model.generate(input_ids, max_new_tokens=1)[0, -1]
        )


def test_what_such_a_call_asks_of_the_model_is_a_part_of_it(
    loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And a function around the wrapped generate does not end in itself."""
    model, tokenizer = loaded
    given = {**batch(tokenizer), "max_new_tokens": 3}
    expected = model.generate(**given, logits_processor=[AsksTheModel(model)])
    with sc.wrapped(model, CONFIG):
        assert torch.equal(model.generate(**given, logits_processor=[AsksTheModel(model)]), expected)
        wrapper = model.generate
        model.generate = lambda *args, **kwargs: wrapper(*args, **kwargs)
        assert torch.equal(model.generate(**given, logits_processor=[AsksTheModel(model)]), expected)
        model.generate = wrapper
    assert not any("is a part of one" in text for text in said(caplog))


def test_a_prompt_is_handed_on_by_its_place(loaded: tuple[Any, Any]) -> None:
    model, _ = tiny_model.load()
    own, ids = model.generate, torch.tensor([[65, 66], [67, 68]])
    model.generate = lambda *args, **kwargs: own(args[0], **kwargs)
    with sc.wrapped(model, CONFIG):
        found = model.generate(ids, max_new_tokens=3, logits_processor=[Warm()])
    assert torch.equal(found, own(ids, max_new_tokens=3, logits_processor=[Warm()]))


class Warm(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - torch.arange(2.0)[:, None] * torch.arange(scores.shape[-1]) / 9


def test_a_loop_of_the_callers_own_is_called(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given = batch(tokenizer)

    def loop(model: Any, input_ids: Tensor, generation_config: Any, **_: Any) -> Tensor:
        return torch.cat([input_ids, input_ids.flip(1)[:, : generation_config.max_new_tokens]], 1)

    with sc.wrapped(model, CONFIG):
        found = model.generate(**given, custom_generate=loop)
    assert torch.equal(found, model.generate(**given, custom_generate=loop))


def test_a_cache_that_is_given_goes_from_turn_to_turn(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    found = []
    for generate in (model.generate, partial(sc.generate, model, engine_config=CONFIG)):
        cache, ids = DynamicCache(), torch.tensor([tokenizer("count 3 to 9:").input_ids])
        for text in (" and ", " more "):
            ids = generate(input_ids=ids, past_key_values=cache, max_new_tokens=5, eos_token_id=None)
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, torch.tensor([tokenizer(text).input_ids[1:]])], 1)
        found.append(ids)
    assert torch.equal(*found)


def hooked(model: Any) -> Any:
    """As accelerate has models whose inputs it is to move: the hook keeps where they were."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def offloaded(model: Any) -> Any:
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("prepared", [hooked, offloaded])
def test_models_that_an_engine_refuses_equal_generate(prepared: Any, loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    model = prepared(tiny_model.load()[0])
    given = batch(tokenizer)
    expected = model.generate(**given)
    with sc.wrapped(model, CONFIG):
        assert torch.equal(model.generate(**given), expected)
        drawn = []
        for generate in (model.generate, partial(type(model).generate, model)):
            torch.manual_seed(7)
            drawn.append(generate(**given, do_sample=True, temperature=3.0))
        assert torch.equal(*drawn)
    with pytest.raises(ValueError, match="could not be proved|must hold its weights"):
        sc.generate(model, [[65, 66]], engine_config=CONFIG)
    with pytest.raises(ValueError, match="could not be proved|must hold its weights|weights are offloaded"):
        sc.generate(model, **given, engine_config=sc.EngineConfig(compile=False, fallback="refuse"))
