"""`generate` against `model.generate`: the same rows, in the same places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MptConfig, MptForCausalLM, pipeline
from transformers.generation import GenerateDecoderOnlyOutput

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from selective_compile.tiny_model import tokenizer as byte_tokenizer
from tests.huggingface.models import (
    CONFIG,
    FAMILIES,
    PAD,
    left_padded,
    padded_batch,
    random_ids,
    some_generated_token,
    tiny,
)
from tests.oracle import assert_same_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_generate_on_each_alone(family: str) -> None:
    model = tiny(family, layers=2)
    ids, mask = padded_batch()
    eos = int(sc.generate(model, ids, attention_mask=mask, max_new_tokens=4, engine_config=CONFIG)[1, -1])
    options = {"max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": PAD}
    result = sc.generate(model, ids, attention_mask=mask, engine_config=CONFIG, **options)
    assert torch.equal(result[:, :13], ids)
    assert result.shape[1] <= 13 + 24
    for row, new in enumerate(result[:, 13:]):
        prompt = ids[row][mask[row].bool()]
        alone = model.generate(prompt[None], **options)[0, len(prompt) :]
        tokens = new[: len(alone)].tolist()
        near = assert_same_tokens(model, prompt.tolist(), tokens)
        if not near:
            assert tokens == alone.tolist()
            assert (new[len(alone) :] == PAD).all()
    assert (result[1, 13 + 4 :] == PAD).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 5},
        {"max_new_tokens": 1},
        {"max_length": 15},
        {"max_length": 10, "max_new_tokens": 6},
        {"max_new_tokens": 8, "pad_token_id": 3},
        {"max_new_tokens": 8, "num_beams": 1, "use_cache": True, "top_p": 0.3, "stopping_criteria": []},
        {"max_new_tokens": 8, "synced_gpus": False, "streamer": None, "position_ids": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("eos", [None, "an int", "a list"])
def test_equals_generate_for_left_padding(model: Any, options: dict[str, Any], eos: str | None) -> None:
    """Shape, prompt columns, new tokens, what finished rows are filled with, and where it all is cut."""
    ids, mask = left_padded()
    if eos is not None:
        first = some_generated_token(model, ids[2:])
        options = {**options, "eos_token_id": first if eos == "an int" else [first, 8]}
    theirs = model.generate(ids, attention_mask=mask, **options)
    ours = sc.generate(model, ids, attention_mask=mask, engine_config=CONFIG, **options)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, theirs)


HOLES = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1]])


def test_padding_between_tokens_is_as_nothing_without_windows(model: Any) -> None:
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(3))
    ours = sc.generate(model, ids, attention_mask=HOLES, max_new_tokens=6, do_sample=False, engine_config=CONFIG)
    theirs = model.generate(ids, attention_mask=HOLES, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, theirs)


def test_padding_between_tokens_is_refused_with_windows() -> None:
    """A window counts columns, and a hole shifts them."""
    model, ids = tiny("mistral"), torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_mask must have its ones side by side"):
        sc.generate(model, ids, attention_mask=HOLES, max_new_tokens=2, engine_config=CONFIG)


@pytest.mark.parametrize("family", ["mamba2", "lfm2", "qwen3_next", "minimax"])
def test_padding_between_tokens_is_refused_with_recurrences(family: str) -> None:
    """Their steps, and those of short convolutions, go over what the mask leaves out, too."""
    model = random_model(family)
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(3))
    beside = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ours = sc.generate(model, ids, attention_mask=beside, engine_config=CONFIG, **options)
    for row, start in ((0, 0), (1, 2)):
        assert torch.equal(ours[row, start:], model.generate(ids[row : row + 1, start:], **options)[0])
    with pytest.raises(ValueError, match="attention_mask must have its ones side by side"):
        sc.generate(model, ids, attention_mask=HOLES, engine_config=CONFIG, **options)
    ids[1, 2] = 0  # a pad id within, which generate takes for padding where no mask is given
    with pytest.raises(ValueError, match="attention_mask must have its ones side by side"):
        sc.generate(model, ids, engine_config=CONFIG, **options)


def short_mpt() -> Any:
    """With as few positions as leave no room for a wide hole."""
    return MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=12, vocab_size=97)).eval()


COUNTING: dict[str, tuple[Callable[[], Any], bool]] = {
    "mpt": (partial(random_model, "mpt"), True),
    "mpt of 12 positions": (short_mpt, True),
    "roformer": (partial(random_model, "roformer"), True),
    "bloom": (partial(random_model, "bloom"), False),
    "gpt2": (partial(random_model, "gpt2"), False),
}


@pytest.mark.parametrize(("make", "counts"), COUNTING.values(), ids=COUNTING)
def test_padding_between_tokens_is_refused_where_positions_count_it(make: Callable[[], Any], counts: bool) -> None:
    """Distances between columns, and rotations by them, go over it; what a mask numbers does not."""
    model = make()
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"attention_mask": HOLES, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if not counts:
        assert torch.equal(sc.generate(model, ids, engine_config=CONFIG, **options), model.generate(ids, **options))
        return
    refused = "attention_mask must have its ones side by side"
    with pytest.raises(ValueError, match=refused):
        sc.generate(model, ids, engine_config=CONFIG, **options)
    with sc.wrapped(model, CONFIG), pytest.raises(ValueError, match=refused):
        model.generate(ids, **options)


def test_list_of_prompts_with_a_configuration_each(model: Any) -> None:
    prompts = [random_ids(length, seed=length) for length in (3, 17, 8)]
    configs = [GenerationConfig(max_new_tokens=count) for count in (5, 2, 9)]
    results = sc.generate(
        model, [prompts[0].tolist(), prompts[1], tuple(prompts[2].tolist())], configs, engine_config=CONFIG
    )
    for prompt, config, result in zip(prompts, configs, results, strict=True):
        assert torch.equal(result, model.generate(prompt[None], config)[0])
    one_for_all = sc.generate(model, input_ids=prompts, max_new_tokens=3, engine_config=CONFIG)
    assert [len(result) for result in one_for_all] == [6, 20, 11]


def test_list_with_end_of_sequence_is_not_padded(model: Any) -> None:
    prompts = [random_ids(5, seed=2), random_ids(9, seed=3)]
    first = some_generated_token(model, prompts[0][None])
    short, _ = sc.generate(model, prompts, max_new_tokens=30, eos_token_id=first, engine_config=CONFIG)
    assert int(short[-1]) == first
    assert len(short) <= 5 + 2


def test_without_prompt_it_begins_with_bos(model: Any) -> None:
    options = {"bos_token_id": 11, "max_new_tokens": 4}
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **options), model.generate(**options))
    with pytest.raises(ValueError, match="bos_token_id"):
        sc.generate(model, engine_config=CONFIG)


def test_returns_the_class_of_generate(model: Any) -> None:
    ids = random_ids(2, 6)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    ours = sc.generate(model, ids, engine_config=CONFIG, **options)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, model.generate(ids, **options).sequences)
    assert list(ours) == ["sequences"]
    of_list = sc.generate(model, list(ids), engine_config=CONFIG, **options)
    assert [row.tolist() for row in of_list.sequences] == ours.sequences.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_wrapped_model_in_a_pipeline(do_sample: bool) -> None:
    """Greedy: the text of the model itself. Sampling is the pipeline's default."""
    model = tiny(vocab_size=byte_tokenizer.VOCAB_SIZE)
    model.generation_config = GenerationConfig(
        bos_token_id=byte_tokenizer.BOS, eos_token_id=byte_tokenizer.EOS, pad_token_id=byte_tokenizer.PAD
    )
    texts = ["12+7=", "one two three", "a"]
    options = {"max_new_tokens": 10, "do_sample": do_sample}

    def run(**more: Any) -> Any:
        pipe = pipeline("text-generation", model=model, tokenizer=byte_tokenizer.build(), device="cpu", **more)
        torch.manual_seed(3)
        plain = [pipe(texts, **options), pipe("", **options), pipe(texts, return_full_text=False, **options)]
        return [*plain, pipe("a", stop_sequence=plain[0][2][0]["generated_text"][3], **options)]

    theirs = run()
    with sc.wrapped(model, CONFIG):
        ours = run()
        batched = run(batch_size=3)
    if do_sample:
        assert len(ours[0]) == 3 and len(ours) == 4
        assert all(result[0]["generated_text"].startswith(text) for result, text in zip(ours[0], texts, strict=True))
    else:
        assert ours == theirs
        assert batched == theirs
