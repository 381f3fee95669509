"""Prompts of embeddings: against `model.generate` with `inputs_embeds`, and never those of another call."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, GenerationConfig, LogitsProcessor, StoppingCriteria

import selective_compile as sc
from selective_compile.generate_states import CACHE
from selective_compile.given_rows import FIRST, GivenRows
from selective_compile.kept_engines import KeptEngines, KeptRows
from selective_compile.module_state import lock_of
from tests.models import VOCABULARY, tiny

CONFIG = sc.EngineConfig(compile=False)
WIDTH, HIDDEN = 9, 64


@pytest.fixture(scope="module", params=["gemma2", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


def small() -> Any:
    """For a test that changes it, or must have one of its own: compiled for that test alone."""
    return tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def llama() -> Any:
    """What embeddings do shows in the first layer already."""
    return small()


def prompts(rows: int = 3, *, seed: int = 0) -> dict[str, Tensor]:
    """The second row is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, WIDTH, dtype=torch.int64)
    mask[1:2, :4] = 0
    return {"inputs_embeds": torch.randn(rows, WIDTH, HIDDEN, generator=generator), "attention_mask": mask}


def ids_of(rows: int = 3) -> Tensor:
    ids = torch.randint(3, VOCABULARY, (rows, WIDTH), generator=torch.Generator().manual_seed(5))
    return ids.masked_fill(prompts(rows)["attention_mask"] == 0, 0)


class Seen(LogitsProcessor, StoppingCriteria):
    """Depends on all ids that it is shown, and forbids what follows their sum."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        if scores is None or isinstance(scores, tuple):
            return torch.zeros(len(input_ids), dtype=torch.bool)
        assert not bool((input_ids >= VOCABULARY).any())
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % 7 :: 7] -= 5.0
        return scores


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_length": WIDTH + 5},
    "min_length": {"min_length": WIDTH + 6, "eos_token_id": [*range(0, VOCABULARY, 2)]},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": [*range(0, VOCABULARY, 2)]},
    "n-grams": {"no_repeat_ngram_size": 1, "forced_eos_token_id": 7},
    "beginning": {"begin_suppress_tokens": [*range(0, VOCABULARY, 2)], "exponential_decay_length_penalty": (2, 3.0)},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "no_repeat_ngram_size": 2},
    "of encoders": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 1},
}


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_generate(model: Any, case: str, with_ids: bool) -> None:
    arguments = {**prompts(), "pad_token_id": 0, "do_sample": False, **CASES[case]}
    if "max_length" not in arguments:
        arguments["max_new_tokens"] = 8
    if case == "beginning":
        arguments["eos_token_id"] = 7
    if with_ids:
        arguments["input_ids"] = ids_of()
    ours = sc.generate(model, engine_config=CONFIG, **arguments)
    theirs = model.generate(**arguments)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] <= (WIDTH if with_ids else 0) + 8


def test_embeddings_that_the_input_embedding_scales() -> None:
    """Given are those behind the scale, where it is in the embedding; in front of it, where the model has it."""
    model = tiny("gemma3_text")
    arguments = {**prompts(), "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **arguments), model.generate(**arguments))


def test_scores_states_and_cache_equal_generate(model: Any) -> None:
    wanted = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    for more in ({}, {"num_beams": 2}):
        arguments = {**prompts(), "max_new_tokens": 5, "pad_token_id": 0, **dict.fromkeys(wanted, True), **more}
        ours, theirs = sc.generate(model, engine_config=CONFIG, **arguments), model.generate(**arguments)
        assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            for mine, other in zip(ours[name], theirs[name], strict=True):
                assert torch.allclose(mine, other, atol=1e-4)
        for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            assert mine[-1].shape == other[-1].shape and torch.allclose(mine[-1][:, -1], other[-1][:, -1], atol=1e-4)
        assert type(getattr(ours, CACHE)) is type(getattr(theirs, CACHE))


def test_processors_and_criteria_see_what_generate_shows(llama: Any) -> None:
    """Of one row, since a processor sees a request by itself here."""
    embeds = prompts(1)["inputs_embeds"]
    for more in ({}, {"input_ids": ids_of(1)}, {"num_beams": 1, "repetition_penalty": 3.0, "input_ids": ids_of(1)}):
        arguments = {"inputs_embeds": embeds, "max_new_tokens": 8, "pad_token_id": 0, **more}
        own = {"logits_processor": [Seen()], "stopping_criteria": [Seen()]}
        ours = sc.generate(llama, engine_config=CONFIG, **arguments, **own)
        assert torch.equal(ours, llama.generate(**arguments, **own))


def test_samples_are_those_of_the_ids_that_the_embeddings_are_of(model: Any) -> None:
    ids, mask = ids_of(), prompts()["attention_mask"]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2, "seed": 3}
    by_ids = sc.generate(model, ids, engine_config=CONFIG, **arguments)
    found = sc.generate(model, ids, inputs_embeds=embeds, engine_config=CONFIG, **arguments)
    assert torch.equal(by_ids, found) and not torch.equal(found[0], found[1])
    alone = sc.generate(model, inputs_embeds=embeds, engine_config=CONFIG, **arguments)
    assert torch.equal(alone, by_ids[:, WIDTH:])


@pytest.mark.parametrize("with_ids", [False, True])
def test_drafts_are_of_what_stands_for_the_prompt(llama: Any, with_ids: bool) -> None:
    """They know nothing of the rows, and change no token; those of the model itself are often right."""
    arguments = {**prompts(), "max_new_tokens": 12, "pad_token_id": 0, **({"input_ids": ids_of()} if with_ids else {})}
    expected = llama.generate(**arguments)
    for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": small()}):
        assert torch.equal(sc.generate(llama, engine_config=CONFIG, **arguments, **drafts), expected)


def test_few_blocks_and_small_steps_change_nothing(llama: Any) -> None:
    """Requests are preempted and their prompts, in parts, computed again from the same rows."""
    small = sc.EngineConfig(compile=False, max_kv_tokens=48, block_size=4, token_budget=7, max_requests=4)
    arguments = {**prompts(6), "max_new_tokens": 12, "pad_token_id": 0}
    found = sc.generate(llama, engine_config=small, **arguments)
    assert torch.equal(found, llama.generate(**arguments))


def test_calls_from_several_threads_get_their_own_rows(llama: Any) -> None:
    every = [{**prompts(2, seed=seed), "max_new_tokens": 6, "pad_token_id": 0} for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: sc.generate(llama, engine_config=CONFIG, **each), every))
    assert len({str(each.tolist()) for each in found}) == len(every)
    for ours, each in zip(found, every, strict=True):
        assert torch.equal(ours, llama.generate(**each))


def test_rows_are_lent_once_and_under_a_salt_of_their_own(llama: Any) -> None:
    kept = KeptRows(llama, CONFIG, 8)
    first = kept.lend([torch.ones(2, HIDDEN), torch.ones(4, HIDDEN)])
    assert first is not None and [len(each) for each in first.ids] == [2, 4]
    assert len({*first.ids[0], *first.ids[1]}) == 6 and min(first.ids[0] + first.ids[1]) >= FIRST
    assert kept.lend([torch.ones(3, HIDDEN)]) is None
    second = kept.lend([torch.ones(2, HIDDEN)])
    assert second is not None and not set(second.places) & set(first.places) and second.salt != first.salt
    kept.give_back(first)
    third = kept.lend([torch.ones(6, HIDDEN)])
    assert third is not None and third.salt not in (first.salt, second.salt)


def test_the_table_grows_and_weights_stay_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selective_compile.kept_engines.ROWS", 8)
    model, engines = small(), KeptEngines()
    sizes = []
    for count in (3, 20, 5):
        with engines.lent(model, CONFIG, [torch.zeros(count, HIDDEN)]) as (kept, lent):
            sizes.append(kept.capacity)
            assert len(lent.places) == count
    assert sizes == [8, 32, 32]
    arguments = {**prompts(1), "max_new_tokens": 6}
    before = sc.generate(model, engine_config=CONFIG, **arguments)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    found = sc.generate(model, engine_config=CONFIG, **arguments)
    assert torch.equal(found, model.generate(**arguments)) and not torch.equal(found, before)


def test_new_buffers_of_the_model_are_seen() -> None:
    model = small()
    arguments = {**prompts(1), "max_new_tokens": 8}
    sc.generate(model, engine_config=CONFIG, **arguments)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3
    assert torch.equal(sc.generate(model, engine_config=CONFIG, **arguments), model.generate(**arguments))


MODULES = {
    "swapped": lambda layers: layers.insert(0, layers.pop(-1)),
    "another": lambda layers: layers.__setitem__(0, tiny("llama", seed=5).model.layers[0]),
}


@pytest.mark.parametrize("changed", MODULES)
def test_other_modules_of_the_model_are_seen(changed: str) -> None:
    model = tiny("llama")
    given = {**prompts(1), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = sc.generate(model, **given, engine_config=CONFIG)
    MODULES[changed](model.model.layers)
    found = sc.generate(model, **given, engine_config=CONFIG)
    assert found.tolist() == model.generate(**given).tolist() != before.tolist()


def test_new_attributes_of_the_model_are_seen() -> None:
    """The copy has its own: with those that it was made with, the answers would be those of the model before."""
    model = small()
    given = prompts()
    before = sc.generate(model, **given, max_new_tokens=8, do_sample=False, pad_token_id=0, engine_config=CONFIG)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    found = sc.generate(model, **given, max_new_tokens=8, do_sample=False, pad_token_id=0, engine_config=CONFIG)
    expected = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found.tolist() == expected.tolist() != before.tolist()


def test_a_new_generation_config_of_the_model_is_seen() -> None:
    model = small()
    given = prompts()
    before = sc.generate(model, **given, max_new_tokens=8, engine_config=CONFIG)
    model.generation_config = GenerationConfig(suppress_tokens=before[:, :3].unique().tolist(), pad_token_id=0)
    found = sc.generate(model, **given, max_new_tokens=8, engine_config=CONFIG)
    assert found.tolist() == model.generate(**given, max_new_tokens=8).tolist() != before.tolist()


def test_the_model_is_left_as_it_is_and_freed() -> None:
    model = small()
    before = [(name, *module._buffers, *vars(module)) for name, module in model.named_modules()]
    sc.generate(model, engine_config=CONFIG, max_new_tokens=2, **prompts(1))
    assert before == [(name, *module._buffers, *vars(module)) for name, module in model.named_modules()]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class TakesNone(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError


def gemma3n() -> Any:
    """Looks up rows of a second table by the ids, too."""
    config = Gemma3nTextConfig(
        vocab_size=60,
        vocab_size_per_layer_input=60,
        hidden_size=HIDDEN,
        hidden_size_per_layer_input=8,
        intermediate_size=[64],
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_kv_shared_layers=0,
        head_dim=16,
        laurel_rank=4,
        layer_types=["full_attention"],
        activation_sparsity_pattern=[0.0],
    )
    return Gemma3nForCausalLM(config).eval()


def test_models_that_do_more_with_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs_embeds must be None for TakesNone, whose forward does not take it"):
        GivenRows(TakesNone().eval(), 8)
    with pytest.raises(ValueError, match="Gemma3nForCausalLM, which makes more of token ids .*modeling_gemma3n"):
        sc.generate(gemma3n(), engine_config=CONFIG, max_new_tokens=2, inputs_embeds=torch.randn(1, 4, HIDDEN))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.ones(2, HIDDEN)}, r"floating tensor \[B, S, hidden\], got .* \[2, 64\]"),
        ({"inputs_embeds": [[1.0]]}, "floating tensor .* got list"),
        ({"inputs_embeds": torch.ones(1, 2, 65)}, "of 64 numbers for each token, got torch.float32 of 65"),
        ({"inputs_embeds": torch.ones(1, 2, HIDDEN).double()}, "torch.float32 of 64 .* got torch.float64 of 64"),
        ({"inputs_embeds": torch.ones(1, 0, HIDDEN)}, "at least one token"),
        ({"input_ids": torch.ones(1, 3).long()}, r"input_ids must be a tensor \[1, 2\] with inputs_embeds, or None"),
        ({"input_ids": [[1, 2]]}, "input_ids must be a tensor .* got list"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask must have the shape"),
        ({"guidance_scale": 2.0}, "guidance_scale must be None with inputs_embeds, got 2.0"),
        ({"cache": "a cache"}, "'cache' of generate must be None"),
    ],
)
def test_what_does_not_go_with_them_is_refused(llama: Any, arguments: dict[str, Any], message: str) -> None:
    given = {"inputs_embeds": torch.ones(1, 2, HIDDEN), "engine_config": CONFIG, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        sc.generate(llama, **{**given, **arguments})


def test_compiled_with_inductor() -> None:
    model, arguments = small(), {**prompts(), "max_new_tokens": 8, "pad_token_id": 0}
    found = sc.generate(model, engine_config=sc.EngineConfig(), **arguments)
    assert torch.equal(found, model.generate(**arguments))


class Counts(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(ids)


def test_an_embedding_keeps_nothing_of_the_trials() -> None:
    model = small()
    embedding = Counts(*model.get_input_embeddings().weight.shape).eval()
    embedding.register_buffer("calls", torch.zeros(()))
    model.set_input_embeddings(embedding)
    GivenRows(model, 64)
    assert embedding.calls.item() == 0


def test_the_copy_is_looked_at_and_run_while_nobody_runs_the_model() -> None:
    """Who runs it may have put other modules into it, and both have the same buffers."""
    model = small()
    kept = KeptRows(model, CONFIG, 64)
    assert lock_of(kept._given.model) is lock_of(model)
    with ThreadPoolExecutor(1) as pool:
        with lock_of(model):
            own = model.model.layers[0].mlp
            model.model.layers[0].mlp = nn.Sequential(own)
            fits = pool.submit(kept.fits, model, CONFIG)
            with pytest.raises(TimeoutError):
                fits.result(timeout=0.3)
            model.model.layers[0].mlp = own
        assert fits.result(timeout=30)
