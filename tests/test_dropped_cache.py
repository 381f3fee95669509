"""Requests beyond the length where a model's frequencies change: the tokens of `generate`, which Phi-3 has compute all
anew there, and others go on from what they have."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch.torch_version import TorchVersion
from transformers import Cache, PreTrainedModel

import selective_compile as sc
from selective_compile.dropped_cache import long_form_of, lost_beyond
from selective_compile.step import LongForm
from tests.longrope import longrope
from tests.models import tiny

ORIGINAL = 40
LENGTHS = (3, 20, 35, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 44, 100)
SMALL = sc.EngineConfig(compile=False, block_size=8, token_budget=16, max_kv_tokens=192)
OLDER = TorchVersion(transformers.__version__) < TorchVersion("5.24")
FAMILIES = {"phi3": True, "phimoe": True, "llama": False}  # and whether `generate` computes all anew


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    if FAMILIES[request.param] and OLDER:
        pytest.skip("generate of transformers 5.17 loses its cache where requests come to be long")
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return longrope(ORIGINAL, family)


@pytest.fixture(scope="module")
def reference(model: Any) -> Any:
    return copy.deepcopy(model)


@pytest.fixture(scope="module")
def engine(model: Any) -> sc.Engine:
    return sc.Engine(model, SMALL)


def prompt_of(length: int) -> list[int]:
    return torch.randint(2, 190, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def generated(reference: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    result = reference.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
    return list(result[0, len(prompt) :].tolist())


def test_what_generate_does_is_asked_of_the_model(model: Any, family: str) -> None:
    assert long_form_of(model, ORIGINAL) == LongForm(beyond=ORIGINAL, anew=FAMILIES[family])
    report = sc.explain(model)
    assert (report.verdict, report.long_beyond) == ("ragged", ORIGINAL)
    assert "more than 40 tokens" in str(report)


def test_requests_that_begin_or_come_to_be_long_have_the_tokens_of_generate(
    engine: sc.Engine, reference: Any, family: str
) -> None:
    requests = [engine.submit(prompt_of(length), max_new_tokens=12 + 3 * place) for place, length in enumerate(LENGTHS)]
    for place, (length, request) in enumerate(zip(LENGTHS, requests, strict=True)):
        assert list(request.result().tokens) == generated(reference, prompt_of(length), 12 + 3 * place), length
    grown = sum(length <= ORIGINAL < length + 11 + 3 * place for place, length in enumerate(LENGTHS))
    assert grown == 3
    assert engine.stats().preemptions >= (grown if FAMILIES[family] else 0)


def test_with_room_for_all_only_those_give_way_that_are_computed_anew(model: Any, reference: Any, family: str) -> None:
    engine = sc.Engine(model, dataclasses.replace(SMALL, token_budget=256, max_kv_tokens=8192))
    requests = [engine.submit(prompt_of(length), max_new_tokens=12) for length in LENGTHS]
    for length, request in zip(LENGTHS, requests, strict=True):
        assert list(request.result().tokens) == generated(reference, prompt_of(length), 12), length
    assert engine.stats().preemptions == (3 if FAMILIES[family] else 0)
    with pytest.raises(ValueError, match="at most 4096 tokens"):  # as the model declares
        engine.submit([3] * 4097, max_new_tokens=1)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"use_cache": False}], ids=min)
@pytest.mark.parametrize("length", [30, ORIGINAL, ORIGINAL + 3])
def test_as_by_generate_however_it_is_asked_for(
    engine: sc.Engine, reference: Any, length: int, options: dict[str, Any]
) -> None:
    prompt = (prompt_of(5) * 10)[:length]  # drafts are found in it
    plain = {} if "prompt_lookup_num_tokens" in options else options
    got = engine.submit(prompt, max_new_tokens=15, **options).result().tokens
    assert list(got) == generated(reference, prompt, 15, **plain)


def test_samples_of_one_prompt_grow_long_each_for_itself(engine: sc.Engine) -> None:
    def sampled() -> list[list[int]]:
        options = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 3, "seed": 5}
        samples = engine.submit(prompt_of(35), max_new_tokens=12, **options).samples
        return [list(sample.result().tokens) for sample in samples]

    found = sampled()
    assert found == sampled()
    assert len(set(map(tuple, found))) == 3


def test_blocks_of_the_one_form_are_not_taken_for_those_of_the_other(engine: sc.Engine, reference: Any) -> None:
    short, reused = prompt_of(38), engine.stats().tokens_reused
    engine.submit(short, max_new_tokens=2).result()
    longer = [*short, *prompt_of(9)]
    assert list(engine.submit(longer, max_new_tokens=5).result().tokens) == generated(reference, longer, 5)
    assert engine.stats().tokens_reused == reused, "it begins as the short one does, in other frequencies"
    again = [*longer, 7]
    assert list(engine.submit(again, max_new_tokens=5).result().tokens) == generated(reference, again, 5)
    assert engine.stats().tokens_reused == reused + len(longer) // 8 * 8


def test_embeddings_are_not_computed_anew(model: Any, reference: Any) -> None:
    """`generate` counts the ids that it has generated alone, which are never so many."""
    rows = reference.get_input_embeddings()(torch.tensor([prompt_of(ORIGINAL)])).detach()
    options = {"attention_mask": torch.ones(1, ORIGINAL, dtype=torch.int64), "max_new_tokens": 12, "do_sample": False}
    wanted = reference.generate(inputs_embeds=rows, **options)
    got = sc.generate(model, inputs_embeds=rows, engine_config=SMALL, **options)
    assert torch.equal(got, wanted)
    sc.unwrap(model)


def test_a_long_prefill_in_parts_as_generate_would_have_it_is_refused(engine: sc.Engine, reference: Any) -> None:
    """Of which `generate` computes the first parts in the short form."""
    long, short = prompt_of(ORIGINAL + 1), prompt_of(ORIGINAL)
    with pytest.raises(ValueError, match="prefill_chunk_size must be None or at least 41 for a prompt of 41"):
        engine.submit(long, max_new_tokens=4, prefill_chunk_size=ORIGINAL)
    for prompt, parts in ((long, ORIGINAL + 1), (short, 16)):
        got = engine.submit(prompt, max_new_tokens=4, prefill_chunk_size=parts).result().tokens
        assert list(got) == generated(reference, prompt, 4, prefill_chunk_size=parts)


def test_sc_generate_serves_both_at_once(model: Any, reference: Any) -> None:
    prompts = [prompt_of(ORIGINAL), prompt_of(ORIGINAL + 9)]
    rows = sc.generate(model, prompts, max_new_tokens=9, do_sample=False, engine_config=SMALL)
    found = [row[-9:].tolist() for row in rows]
    sc.unwrap(model)
    assert found == [generated(reference, prompt, 9) for prompt in prompts]


def test_frequencies_that_grow_with_requests_bound_them() -> None:
    """Where the model says that it ends: beyond, each number of tokens has its own."""
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model, reference = (tiny("llama", max_position_embeddings=ORIGINAL, rope_parameters=parameters) for _ in range(2))
    assert sc.explain(model).verdict == "ragged"
    engine = sc.Engine(model, SMALL)
    for length in (1, 7, ORIGINAL - 3):
        got = engine.submit(prompt_of(length), max_new_tokens=4).result().tokens
        assert list(got) == generated(reference, prompt_of(length), 4)
    with pytest.raises(ValueError, match=f"at most {ORIGINAL} tokens for the model's positions, got {ORIGINAL + 1}"):
        engine.submit(prompt_of(ORIGINAL + 1), max_new_tokens=1)


def test_where_generate_loses_its_cache_none_grows_long() -> None:
    """As that of transformers 5.17, which goes on from the last token alone."""
    model = longrope(ORIGINAL)
    prepare = type(model).prepare_inputs_for_generation

    class Losing(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            arguments = prepare(self, input_ids, **kwargs)
            if not any(isinstance(each, Cache) for each in arguments.values()):
                arguments["input_ids"] = arguments["input_ids"][:, -1:]
            return arguments

    model.__class__ = Losing
    assert long_form_of(model, ORIGINAL) == LongForm(beyond=ORIGINAL, anew=False, grows=False)
    reference, engine = longrope(ORIGINAL), sc.Engine(model, SMALL)
    for length, count in ((ORIGINAL - 5, 6), (ORIGINAL + 1, 12)):
        got = engine.submit(prompt_of(length), max_new_tokens=count).result().tokens
        assert list(got) == generated(reference, prompt_of(length), count)
    with pytest.raises(ValueError, match=f"max_new_tokens must be at most 6 for the .* of {ORIGINAL}, after 35"):
        engine.submit(prompt_of(ORIGINAL - 5), max_new_tokens=7)


@pytest.mark.skipif(OLDER, reason="what Phi-3 of transformers 5.17 asks is not answered then, and it runs whole")
def test_where_generate_does_something_else_requests_are_bounded() -> None:
    model = longrope(ORIGINAL)
    prepare = type(model).prepare_inputs_for_generation

    class Otherwise(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] == ORIGINAL + 2:
                kwargs |= dict.fromkeys({"cache", "past_key_values", "next_sequence_length"} & kwargs.keys())
            return prepare(self, input_ids, **kwargs)

    model.__class__ = Otherwise
    assert isinstance(model, PreTrainedModel)
    assert long_form_of(model, ORIGINAL) is None
    engine = sc.Engine(model, SMALL)
    with pytest.raises(ValueError, match=f"at most {ORIGINAL} tokens"):
        engine.submit(prompt_of(ORIGINAL + 1), max_new_tokens=1)


def test_no_request_grows_beyond_where_generate_loses_its_cache_for_nothing() -> None:
    """As that of Phi-4-multimodal, whose frequencies may be the same for all lengths."""
    model, reference = (tiny("llama", original_max_position_embeddings=ORIGINAL) for _ in range(2))
    assert lost_beyond(model) is None
    prepare = type(model).prepare_inputs_for_generation

    class Losing(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] == ORIGINAL + 1:
                kwargs |= dict.fromkeys({"cache", "past_key_values"} & kwargs.keys())
                input_ids = input_ids[:, -1:]
            return prepare(self, input_ids, **kwargs)

    model.__class__ = Losing
    assert lost_beyond(model) == ORIGINAL
    engine = sc.Engine(model, SMALL)
    assert engine.report.longest == ORIGINAL
    got = engine.submit(prompt_of(ORIGINAL - 5), max_new_tokens=6).result().tokens
    assert list(got) == generated(reference, prompt_of(ORIGINAL - 5), 6)
    with pytest.raises(ValueError, match=f"max_new_tokens must be at most 6 for the .* of {ORIGINAL}, after 35"):
        engine.submit(prompt_of(ORIGINAL - 5), max_new_tokens=7)


def test_steps_with_something_else_than_a_cache_of_transformers_bound_none() -> None:
    """A model of the user's may keep what it likes: then nobody knows that it is lost."""
    model = tiny("llama")
    prepare = type(model).prepare_inputs_for_generation

    class OwnState(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            arguments = prepare(self, input_ids, **kwargs)
            return {name: value for name, value in arguments.items() if not isinstance(value, Cache)}

    model.__class__ = OwnState
    assert lost_beyond(model) is None
