"""Types of tokens: against `model.generate` with `token_type_ids`, on GPT-2, whose types are rows of its embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel

import selective_compile as sc
from tests.models import VOCABULARY, tiny

CONFIG = sc.EngineConfig(compile=False)
WIDTH, HIDDEN = 9, 64


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny("gpt2")


def given(rows: int = 3, *, seed: int = 0) -> dict[str, Any]:
    """The second row is padded on the left; each row's last type is another."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, WIDTH, dtype=torch.int64)
    mask[1:2, :4] = 0
    return {
        "input_ids": torch.randint(3, VOCABULARY, (rows, WIDTH), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(VOCABULARY, (rows, WIDTH), generator=generator),
        "pad_token_id": 0,
        "do_sample": False,
    }


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 8},
    "max_length": {"max_length": WIDTH + 5},
    "min_length": {"min_length": WIDTH + 6, "eos_token_id": [*range(0, VOCABULARY, 2)], "max_new_tokens": 8},
    "of the prompt's ids": {"encoder_repetition_penalty": 2.5, "repetition_penalty": 1.5, "max_new_tokens": 8},
    "n-grams": {"no_repeat_ngram_size": 1, "forced_eos_token_id": 7, "max_new_tokens": 8},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2, "max_new_tokens": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("embeddings", [False, True])
def test_equals_generate(gpt2: Any, case: str, embeddings: bool) -> None:
    arguments = {**given(), **CASES[case]}
    if embeddings:
        arguments["inputs_embeds"] = torch.randn(3, WIDTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    ours = sc.generate(gpt2, engine_config=CONFIG, **arguments)
    assert torch.equal(ours, gpt2.generate(**arguments))
    others = {**arguments, "token_type_ids": arguments["token_type_ids"].roll(1, 0)}
    assert not torch.equal(ours, sc.generate(gpt2, engine_config=CONFIG, **others))


def test_generated_tokens_of_one_type_are_not_found_for_a_prompt_of_another() -> None:
    model = tiny("gpt2", attention="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2 * parameter.shape[-1] ** -0.5 / parameter.std())
    prompt, rest = [5, 17, 33, 71], [0] * 8
    greedy = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    first = {"input_ids": torch.tensor([prompt]), "token_type_ids": torch.ones(1, 4, dtype=torch.int64)}
    generated = model.generate(**first, **greedy)[0, 4:12].tolist()
    both: dict[str, Any] = {
        "input_ids": torch.tensor([rest + prompt, prompt + generated]),
        "attention_mask": torch.tensor([rest + [1] * 4, [1] * 12]),
        "token_type_ids": torch.tensor([rest + [1] * 4, [1] * 4 + rest]),
        **greedy,
    }
    config = sc.EngineConfig(compile=False, block_size=4, max_requests=1, max_kv_tokens=64, token_budget=64)
    assert torch.equal(sc.generate(model, engine_config=config, **both), model.generate(**both))


def test_types_of_embeddings_without_ids_equal_generate(gpt2: Any) -> None:
    arguments = {**given(), "max_new_tokens": 8}
    del arguments["input_ids"]
    arguments["inputs_embeds"] = torch.randn(3, WIDTH, HIDDEN, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sc.generate(gpt2, engine_config=CONFIG, **arguments), gpt2.generate(**arguments))


def test_one_row_of_types_is_for_all(gpt2: Any) -> None:
    arguments = {**given(), "max_new_tokens": 8}
    arguments["token_type_ids"] = arguments["token_type_ids"][:1]
    arguments["attention_mask"] = torch.ones(3, WIDTH, dtype=torch.int64)
    expected = gpt2.generate(**{**arguments, "token_type_ids": arguments["token_type_ids"].expand(3, -1)})
    assert torch.equal(sc.generate(gpt2, engine_config=CONFIG, **arguments), expected)


def test_scores_states_and_cache_equal_generate(gpt2: Any) -> None:
    wanted = ("output_scores", "output_logits", "output_hidden_states", "use_cache", "return_dict_in_generate")
    for more in ({}, {"num_beams": 2}):
        arguments = {**given(), "max_new_tokens": 5, **dict.fromkeys(wanted, True), **more}
        ours, theirs = sc.generate(gpt2, engine_config=CONFIG, **arguments), gpt2.generate(**arguments)
        assert torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            for mine, other in zip(ours[name], theirs[name], strict=True):
                assert torch.allclose(mine, other, atol=1e-4)
        for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert torch.allclose(mine[-1][:, -1], other[-1][:, -1], atol=1e-4)


def test_preemption_chunks_drafts_and_shared_blocks_change_nothing(gpt2: Any) -> None:
    """Requests of the same ids with other types share no block, and drafts are of the ids alone."""
    small = sc.EngineConfig(compile=False, max_kv_tokens=56, block_size=4, token_budget=7, max_requests=4)
    arguments: dict[str, Any] = {**given(6), "max_new_tokens": 20}
    ids = arguments["input_ids"]
    ids[3:] = ids[:3]
    arguments["token_type_ids"][3:5, WIDTH - 1] += 1
    arguments["token_type_ids"] %= VOCABULARY
    expected = gpt2.generate(**arguments)
    assert torch.equal(sc.generate(gpt2, engine_config=small, **arguments), expected)
    for _ in range(2):
        for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": gpt2}):
            assert torch.equal(sc.generate(gpt2, engine_config=small, **arguments, **drafts), expected)


def test_samples_are_those_of_a_call_for_each_row(gpt2: Any) -> None:
    arguments = {**given(2), "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2}
    found = sc.generate(gpt2, engine_config=CONFIG, seed=3, **arguments)
    assert not torch.equal(found[0], found[1])
    alone = {name: each[1:] if isinstance(each, Tensor) else each for name, each in arguments.items()}
    assert torch.equal(sc.generate(gpt2, engine_config=CONFIG, seed=5, **alone), found[2:])


def test_types_in_a_table_of_their_own() -> None:
    """And a call without types, which has type 0 in BERT, is not one of those with them."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=3,
        is_decoder=True,
        initializer_range=0.3,
    )
    model: Any = BertLMHeadModel(config).eval()
    arguments = {**given(), "max_new_tokens": 8, "eos_token_id": None}
    plain = {name: each for name, each in arguments.items() if name != "token_type_ids"}
    arguments["token_type_ids"] = arguments["token_type_ids"] % 3
    ours = sc.generate(model, engine_config=CONFIG, **arguments)
    assert torch.equal(ours, model.generate(**arguments))
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **plain), model.generate(**plain))
    with pytest.raises(ValueError, match="token_type_ids must be at least 0 and less than 3, got 3"):
        sc.generate(model, engine_config=CONFIG, **{**arguments, "token_type_ids": arguments["token_type_ids"] + 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_type_ids": [[0]]}, r"token_type_ids must be an integer tensor \[1, 2\], got list"),
        ({"token_type_ids": torch.zeros(1, 2)}, "must be an integer tensor"),
        ({"token_type_ids": torch.zeros(1, 3).long()}, r"token_type_ids must have shape \[1, 2\], got .* \[1, 3\]"),
        ({"token_type_ids": torch.tensor([[0, VOCABULARY]])}, f"less than {VOCABULARY}, got {VOCABULARY}"),
        ({"token_type_ids": torch.tensor([[0, -1]])}, "token_type_ids must be at least 0 and .*, got -1"),
        ({"input_ids": [[1, 2]]}, "token_type_ids must be None for a list of prompts"),
        ({"guidance_scale": 2.0}, "guidance_scale must be None with token_type_ids, got 2.0"),
    ],
)
def test_what_does_not_go_with_them_is_refused(gpt2: Any, arguments: dict[str, Any], message: str) -> None:
    plain = {
        "input_ids": torch.ones(1, 2).long(),
        "token_type_ids": torch.zeros(1, 2).long(),
        "engine_config": CONFIG,
        "max_new_tokens": 2,
    }
    with pytest.raises(ValueError, match=message):
        sc.generate(gpt2, **{**plain, **arguments})


def test_models_without_types_are_refused() -> None:
    types = torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match="token_type_ids must be None for LlamaForCausalLM, whose forward does not"):
        sc.generate(tiny("llama"), torch.ones(1, 2).long(), token_type_ids=types, engine_config=CONFIG)
