"""`sc.generate` with beams: what `model.generate` returns for padded rows, in its class, and what beams refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import BaseStreamer, GenerateBeamDecoderOnlyOutput

import selective_compile as sc
from tests.test_generate_returns import CONFIG, TEXTS, batch, loaded
from tests.test_sequential_program import unproved

__all__ = ["loaded"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": -0.5, "pad_token_id": 0},
        {"num_beams": 2, "early_stopping": True, "eos_token_id": [10, *range(97, 110)]},
        {"num_beams": 2, "num_return_sequences": 2, "eos_token_id": None, "pad_token_id": None},
    ],
    ids=str,
)
def test_padded_rows_equal_generate(loaded: tuple[Any, Any], options: dict[str, Any]) -> None:
    model, tokenizer = loaded
    arguments = {**batch(tokenizer), "max_new_tokens": 9, **options}
    returns = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours = sc.generate(model, engine_config=CONFIG, **arguments, **returns)
    theirs = model.generate(**arguments, **returns)
    assert type(ours) is type(theirs) is GenerateBeamDecoderOnlyOutput
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.beam_indices.dtype == theirs.beam_indices.dtype and torch.equal(ours.beam_indices, theirs.beam_indices)
    assert torch.allclose(ours.sequences_scores, theirs.sequences_scores, atol=1e-4)
    assert [each.shape for each in ours.scores + ours.logits] == [each.shape for each in theirs.scores + theirs.logits]
    assert torch.allclose(ours.scores[0], theirs.scores[0], atol=1e-4)
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **arguments), theirs.sequences)
    plain = sc.generate(model, engine_config=CONFIG, **arguments, return_dict_in_generate=True)
    assert plain.sequences_scores is None and plain.scores is None and plain.beam_indices is not None
    found, wanted = (
        model.compute_transition_scores(each.sequences, each.scores, each.beam_indices) for each in (ours, theirs)
    )
    assert torch.allclose(found, wanted, atol=1e-4)


class NothingIsPossible(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)


def test_rows_of_which_no_token_is_kept_are_ids_all_the_same(loaded: tuple[Any, Any]) -> None:
    model, _ = loaded
    ids, options = torch.tensor([[65, 66, 67]]), {"max_new_tokens": 3, "num_beams": 2}
    theirs = model.generate(ids, logits_processor=LogitsProcessorList([NothingIsPossible()]), **options)
    ours = sc.generate(
        model, ids, logits_processor=LogitsProcessorList([NothingIsPossible()]), engine_config=CONFIG, **options
    )
    assert ours.dtype == theirs.dtype == torch.int64
    assert torch.equal(ours, theirs)


def test_an_error_of_the_search_is_what_generate_raises(loaded: tuple[Any, Any]) -> None:
    ids, options = torch.tensor([[65, 66, 67]]), {"max_new_tokens": 3, "num_beams": 2, "length_penalty": 1e3}
    with pytest.raises(OverflowError):
        loaded[0].generate(ids, **options)
    with pytest.raises(OverflowError):
        sc.generate(loaded[0], ids, engine_config=CONFIG, **options)


def test_a_list_of_prompts_some_with_beams(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    configs = [
        GenerationConfig(max_new_tokens=9, eos_token_id=10, num_beams=3, num_return_sequences=2),
        GenerationConfig(max_new_tokens=9, eos_token_id=10),
        GenerationConfig(max_new_tokens=9, eos_token_id=10, num_beams=2),
    ]
    ours = iter(sc.generate(model, prompts, generation_config=configs, engine_config=CONFIG))
    for prompt, config in zip(prompts, configs, strict=True):
        ids = torch.tensor([prompt])
        for theirs in model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config).tolist():
            mine = next(ours).tolist()
            assert mine == theirs[: len(mine)] and set(theirs[len(mine) :]) <= {10, 0, 256, 257, 258}
    assert next(ours, None) is None
    with pytest.raises(ValueError, match=r"num_beams must be the same for all prompts .*got \[1, 2, 3\]"):
        sc.generate(model, prompts, generation_config=configs, return_dict_in_generate=True, engine_config=CONFIG)


def test_the_same_list_for_several_prompts(loaded: tuple[Any, Any]) -> None:
    """Rows of one prompt start from it together, but for those that are searched."""
    model, tokenizer = loaded
    prompt = tokenizer("the key is in").input_ids
    ids = torch.tensor([prompt])
    plain = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "eos_token_id": None, "do_sample": False}
    expected = {beams: model.generate(ids, num_beams=beams, **plain)[0].tolist() for beams in (1, 2, 3)}
    assert expected[3] != expected[1], "a search that was greedy would not show"
    for counts in ((2, 2), (3, 3, 3), (1, 2, 1), (2, 1, 3), (1, 1, 2)):
        configs = [GenerationConfig(max_new_tokens=9, num_beams=beams) for beams in counts]
        found = sc.generate(
            model,
            [prompt] * len(counts),
            generation_config=configs,
            eos_token_id=None,
            do_sample=False,
            engine_config=CONFIG,
        )
        assert [row.tolist() for row in found] == [expected[beams] for beams in counts], counts


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "lfm2"])
def test_a_model_that_runs_whole_goes_on_from_copies_of_its_cache(family: str) -> None:
    model = unproved(family)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    options: dict[str, Any] = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
    }
    options["output_scores"] = True
    ours = sc.generate(model, ids, engine_config=CONFIG, **options)
    if family == "lfm2":  # whose cache transformers reorders
        theirs = model.generate(ids, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
    for row, score in zip(ours.sequences, ours.sequences_scores, strict=True):
        with torch.no_grad():
            alone = model(row[None]).logits[0, 4:-1].log_softmax(-1)
        assert abs(float(alone.gather(1, row[5:, None]).sum() / 8 - score)) < 1e-4, "a beam had another's cache"
    sampled = sc.generate(
        model, ids, do_sample=True, num_return_sequences=3, seed=3, max_new_tokens=8, engine_config=CONFIG
    )
    for place, row in enumerate(sampled):
        alone = sc.generate(model, ids, do_sample=True, seed=3 + place, max_new_tokens=8, engine_config=CONFIG)
        assert row.tolist() == alone[0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer of at least 1, got 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences must be at most num_beams, 2, got 3"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be True, False or 'never', got 'soon'"),
        ({"num_beams": 2, "length_penalty": "long"}, "length_penalty must be a number, got 'long'"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups must be None with num_beams=4, got 2: call .*group"),
        ({"num_beams": 2, "low_memory": True}, "low_memory must be None with num_beams=2, got True"),
        ({"num_beams": 2, "regex": "a+"}, "regex must be None with num_beams=2, got 'a[+]': prefix_allowed"),
        ({"num_beams": 2, "streamer": BaseStreamer()}, "streamer must be None with num_beams=2"),
        ({"num_beams": 99}, "num_beams must be at most 64 for 22 tokens each .*max_requests 64, got 99"),
    ],
)
def test_refusals(loaded: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sc.generate(loaded[0], torch.tensor([[65, 66, 67]]), tokenizer=loaded[1], engine_config=CONFIG, **options)
