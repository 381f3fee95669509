"""What `sc.generate` returns beside tokens, streams, and makes of processors and criteria over several rows."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria
from transformers.generation import BaseStreamer

import selective_compile as sc
from selective_compile import tiny_model
from selective_compile.coverage.random_model import random_model
from selective_compile.runtime.philox import uniform
from selective_compile.tiny_model.tokenizer import EOS, PAD

CONFIG = sc.EngineConfig(compile=False)
TEXTS = ["12+7=", "count 3 to 9:", "letters c to j:"]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return tiny_model.load()


def batch(tokenizer: Any) -> dict[str, Tensor]:
    tokenizer.padding_side = "left"
    found = tokenizer(TEXTS, return_tensors="pt", padding=True)
    return {"input_ids": found.input_ids, "attention_mask": found.attention_mask}


@contextmanager
def dice(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`generate` draws as the engine does for rows of seeds `seed`, `seed + 1`, ..."""
    step = [0]

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        rows = len(probabilities)
        cumulative = probabilities.double().cumsum(-1)
        drawn = torch.from_numpy(uniform([seed + row for row in range(rows)], [step[0]] * rows))
        step[0] += 1
        return torch.searchsorted(cumulative, drawn[:, None] * cumulative[:, -1:], right=True)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        yield


def both(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    model, tokenizer = loaded
    arguments = {**batch(tokenizer), "max_new_tokens": 9, **options}
    ours = sc.generate(model, engine_config=CONFIG, seed=4, **arguments)
    with dice(4, monkeypatch):
        theirs = model.generate(**arguments)
    return ours, theirs


def test_scores_and_logits_equal_generate(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a row ends; from then on, `generate` computes with padding and we say that padding is certain."""
    returns = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = both(loaded, monkeypatch, repetition_penalty=1.3, do_sample=True, top_k=5, **returns)
    assert torch.equal(ours.sequences, theirs.sequences)
    new = theirs.sequences[:, -len(theirs.scores) :]
    assert list(ours) == ["sequences", "scores", "logits"] and len(ours.scores) == len(ours.logits) == new.shape[1]
    ended = 0
    for name in ("scores", "logits"):
        for step, (mine, other) in enumerate(zip(ours[name], theirs[name], strict=True)):
            assert mine.shape == other.shape and mine.dtype == torch.float32
            for row in range(len(TEXTS)):
                if EOS in new[row, :step]:
                    assert mine[row].argmax() == PAD and mine[row].softmax(-1)[PAD] == 1
                    ended += 1
                else:
                    assert torch.allclose(mine[row], other[row], atol=1e-4)
    assert ended > 0
    plain, _ = both(loaded, monkeypatch, output_scores=True)
    assert isinstance(plain, Tensor), "without return_dict_in_generate nothing else is returned, as there"


def test_transition_scores_come_out_as_those_of_generate(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = both(loaded, monkeypatch, return_dict_in_generate=True, output_scores=True)
    found, wanted = (
        loaded[0].compute_transition_scores(each.sequences, each.scores, normalize_logits=True)
        for each in (ours, theirs)
    )
    real = theirs.sequences[:, -found.shape[1] :] != PAD
    assert torch.allclose(found[real], wanted[real], atol=1e-4)
    assert not found[~real].any() and (~real).any()


@pytest.mark.parametrize("as_list", [False, True])
def test_several_sequences_of_a_prompt_equal_generate(
    loaded: tuple[Any, Any], as_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    options = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 3, "max_new_tokens": 9}
    ours, theirs = both(loaded, monkeypatch, **options)
    assert ours.shape[0] == 9 and torch.equal(ours, theirs)
    assert len({tuple(row) for row in ours[:3].tolist()}) > 1
    if as_list:
        prompts = [tokenizer(text).input_ids for text in TEXTS]
        rows = sc.generate(model, prompts, engine_config=CONFIG, seed=4, **options)
        for row, of_tensor in zip(rows, ours.tolist(), strict=True):
            kept = [token for token in of_tensor if token != PAD]
            assert row.tolist() == kept
    with pytest.raises(ValueError, match="num_return_sequences must be 1 for greedy decoding, got 2"):
        sc.generate(model, [[1]], num_return_sequences=2, engine_config=CONFIG)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def test_a_streamer_of_many_rows_gets_what_generate_gives_it(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ours, theirs = Recorder(), Recorder()
    sc.generate(model, **batch(tokenizer), max_new_tokens=9, streamer=ours, engine_config=CONFIG)
    model.generate(**batch(tokenizer), max_new_tokens=9, streamer=theirs)
    assert ours.seen == theirs.seen and len(ours.seen) > 3


class Counting(LogitsProcessor):
    """Forbids a token that depends on how often it was called; holds a model, which no copy of it must copy."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls, self.shapes = model, 0, set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.add(tuple(scores.shape))
        return scores - 50.0 * (torch.arange(scores.shape[-1]) % 5 == self.calls % 5)


class OnSum(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 3 == 0


def test_processors_and_criteria_of_several_prompts_equal_generate(loaded: tuple[Any, Any]) -> None:
    """Each is asked for by itself, with copies of the objects."""
    model, tokenizer = loaded
    objects: dict[str, Any] = {"logits_processor": [Counting(model)], "stopping_criteria": [OnSum()]}
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    ours = sc.generate(model, prompts, **objects, max_new_tokens=9, engine_config=CONFIG)
    assert objects["logits_processor"][0].calls == 0, "the engine calls its copies"
    for prompt, row in zip(prompts, ours, strict=True):
        objects = {"logits_processor": [Counting(model)], "stopping_criteria": [OnSum()]}
        assert torch.equal(row[None], model.generate(torch.tensor([prompt]), **objects, max_new_tokens=9))
    alone = Counting(model)
    ids = batch(tokenizer)["input_ids"][2:]
    sc.generate(model, ids, logits_processor=[alone], max_new_tokens=4, eos_token_id=None, engine_config=CONFIG)
    assert alone.calls == 4 and alone.shapes == {(1, model.config.vocab_size)}, "a single row gets the object itself"


def test_rows_by_number_and_lengths_with_padding_equal_generate(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return list(range(97 + row, 123, 3))

    assert torch.equal(*both(loaded, monkeypatch, prefix_allowed_tokens_fn=allowed))
    # Of a padded tensor, lengths count its columns.
    digits = [*range(48, 58), EOS]
    assert torch.equal(*both(loaded, monkeypatch, min_length=20, eos_token_id=digits))
    assert torch.equal(*both(loaded, monkeypatch, stopping_criteria=[MaxLengthCriteria(20)]))


def test_samples_of_a_prompt_are_told_the_number_that_generate_tells(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [97 + row]

    several = {"do_sample": True, "num_return_sequences": 2, "eos_token_id": None}
    ours, theirs = both(loaded, monkeypatch, prefix_allowed_tokens_fn=allowed, **several)
    assert torch.equal(ours, theirs) and len(set(ours[:, -1].tolist())) > 1


def test_scores_are_gone_with_the_result(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    given = {**batch(tokenizer), "max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    seen = Counting(model)
    kept = [weakref.ref(seen)]
    result = sc.generate(model, logits_processor=[seen], engine_config=CONFIG, **given)
    kept.append(weakref.ref(result.logits[0]))
    del seen, result
    gc.collect()
    assert [each() for each in kept] == [None, None]
    rows = [each for each in gc.get_objects() if type(each) is Tensor and each.shape[-1:] == (model.config.vocab_size,)]
    assert not [each for each in rows if each.dim() == 1 or each.shape[0] == 1]


def test_stop_strings_of_the_models_own_beside_hidden_states(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded[0].generation_config, "stop_strings", ["19", "4 5"])
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "tokenizer": loaded[1]}
    ours, theirs = both(loaded, monkeypatch, **options)
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.hidden_states) == len(theirs.hidden_states)


def test_a_criterion_that_is_in_no_list(loaded: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="stopping_criteria must be a list, got MaxLengthCriteria"):
        sc.generate(loaded[0], [[1]], stopping_criteria=MaxLengthCriteria(9), engine_config=CONFIG)


@pytest.mark.parametrize("samples", [1, 3])
def test_what_is_wrong_with_one_prompt_of_many_says_which(loaded: tuple[Any, Any], samples: int) -> None:
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": samples, "engine_config": CONFIG}
    with pytest.raises(ValueError, match="^prompt 1: prompt_ids must be at least 0 and less than .*got 100000$"):
        sc.generate(loaded[0], [[1], [2, 100000], [3]], max_new_tokens=2, **options)
    with pytest.raises(ValueError, match="^prompt_ids must hold at least one token id, got none$"):
        sc.generate(loaded[0], [[]], max_new_tokens=2, engine_config=CONFIG)


def test_guidance_over_rows(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    negative = torch.tensor([[PAD, PAD, 97, 98], [99, 100, 101, 102], [PAD, 50, 43, 51]])
    options = {"negative_prompt_ids": negative, "negative_prompt_attention_mask": (negative != PAD).long()}
    assert torch.equal(*both(loaded, monkeypatch, guidance_scale=1.7, **options))
    ours, theirs = both(loaded, monkeypatch, guidance_scale=1.7)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, both(loaded, monkeypatch)[0][:, : ours.shape[1]])
    with pytest.raises(ValueError, match="negative_prompt_ids must be one for each of the 3 rows .*got 2 rows"):
        both(loaded, monkeypatch, guidance_scale=1.7, negative_prompt_ids=negative[:2])


def test_guidance_of_beams(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` wants a row for each beam; one for each prompt does as well."""
    negative = torch.tensor([[97, 98, 99], [49, 50, 51], [99, 98, 97]])
    options = {"guidance_scale": 1.7, "num_beams": 2}
    rows = negative.repeat_interleave(2, dim=0)
    ours, theirs = both(loaded, monkeypatch, negative_prompt_ids=rows, **options)
    assert torch.equal(ours, theirs)
    model, tokenizer = loaded
    ids = tokenizer("letters c to j:", return_tensors="pt").input_ids
    asked = {"max_new_tokens": 6, "pad_token_id": PAD, **options}
    expected = model.generate(ids, negative_prompt_ids=rows[:2], **asked)
    for given in (rows[:1], rows[:2]):
        assert torch.equal(sc.generate(model, ids, negative_prompt_ids=given, **asked), expected)
    with pytest.raises(ValueError, match="negative_prompt_ids must be one for each of the 1 rows .*got 3 rows"):
        sc.generate(model, ids, negative_prompt_ids=negative, **asked)


def test_stop_strings_over_rows(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(loaded, monkeypatch, stop_strings=["19", "4 5", " e"], tokenizer=loaded[1])
    assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="tokenizer must be given for stop_strings, got None"):
        sc.generate(loaded[0], [[1]], stop_strings="a", engine_config=CONFIG)
    ids = batch(loaded[1])["input_ids"]
    bounded = MaxTimeCriteria(9.0)
    with pytest.raises(ValueError, match="pad_token_id must be set for more than one row with stopping_criteria"):
        sc.generate(
            loaded[0],
            ids,
            attention_mask=ids != PAD,
            stopping_criteria=[bounded],
            pad_token_id=None,
            eos_token_id=None,
            engine_config=CONFIG,
        )
    # There a padding id alone fills nothing: rows that have ended get what is generated after their end.
    for name, ending in {"stopping_criteria": [bounded], "max_time": 9.0, "stop_strings": "a"}.items():
        given = {name: ending, "tokenizer": loaded[1], "eos_token_id": None}
        with pytest.raises(ValueError, match=f"eos_token_id must be set for more than one row with {name}, got None"):
            sc.generate(loaded[0], ids, attention_mask=ids != PAD, engine_config=CONFIG, **given)


class Locked(LogitsProcessor):
    def __init__(self) -> None:
        self.generator = iter(range(3))
        self.file = open(__file__)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise OSError("the file went away")


def test_objects_that_cannot_be_copied_or_fail(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    locked = Locked()
    with pytest.raises(ValueError, match="logits_processor must be objects that can be copied"):
        sc.generate(model, [[65], [66]], logits_processor=[locked], engine_config=CONFIG)
    with pytest.raises(OSError, match="the file went away"):
        sc.generate(model, **batch(tokenizer), logits_processor=[locked], engine_config=CONFIG)
    with pytest.raises(OSError, match="the file went away"):  # as `generate` does
        sc.generate(model, [[65]], logits_processor=[locked], engine_config=CONFIG)
    locked.file.close()


def test_a_padded_row_has_the_tokens_of_that_row_alone_where_generate_reads_no_mask() -> None:
    """For RWKV's, padding is tokens like others."""
    model, reference = (random_model("rwkv").eval() for _ in range(2))
    ids, mask = torch.tensor([[0, 0, 7, 9, 11, 13]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    options = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    ours = sc.generate(model, ids, attention_mask=mask, engine_config=sc.EngineConfig(compile=False), **options)
    padded = reference.generate(ids, attention_mask=mask, **options)
    alone = reference.generate(ids[:, 2:], attention_mask=mask[:, 2:], **options)
    assert torch.equal(ours[:, :6], ids) and torch.equal(ours[:, 6:], alone[:, 4:])
    assert not torch.equal(ours, padded)


class Button:
    """Ends all rows once somebody has pressed it."""

    def __init__(self) -> None:
        self.pressed = False
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        pressed = self.pressed or self.event.is_set()
        return torch.full((len(input_ids),), pressed, dtype=torch.bool)


@pytest.mark.parametrize("event", [False, True])
def test_what_is_set_in_a_criterion_meanwhile_is_set_for_all_rows(loaded: tuple[Any, Any], event: bool) -> None:
    model, _ = loaded
    ids = torch.tensor([[65, 66, 67], [70, 71, 72]])
    found = []
    for generate, given in ((model.generate, ids), (partial(sc.generate, engine_config=CONFIG, model=model), [*ids])):
        button = Button()

        def press(input_ids: Tensor, scores: Tensor, button: Button = button) -> Tensor:
            if input_ids.shape[1] == 6 and event:
                button.event.set()
            elif input_ids.shape[1] == 6:
                button.pressed = True
            return scores

        options: dict[str, Any] = {"logits_processor": [Pressing(press)], "stopping_criteria": [button]}
        found.append(generate(input_ids=given, **options, max_new_tokens=20, pad_token_id=0))
    assert torch.equal(found[0], torch.stack(found[1])) and found[0].shape[1] == 7


class Pressing(LogitsProcessor):
    def __init__(self, press: Any) -> None:
        self.press = press

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.press(input_ids, scores)
