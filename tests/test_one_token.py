"""A branch on one token, which leaves no trace in a graph, is found by running the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import selective_compile as sc
from selective_compile.generate_states import CACHE
from selective_compile.one_token import one_token_refusal
from tests.decoders import Decoder
from tests.models import shallow, tiny
from tests.oracle import generated_alone


def negated_alone(x: Tensor) -> Tensor:
    return -x if x.shape[1] == 1 else x


def kept_if_more(x: Tensor) -> Tensor:
    return x if x.shape[1] > 1 else x.flip(-1)


def same_alone(x: Tensor) -> Tensor:
    return x * 1.0 if x.shape[1] == 1 else x


def rounded_alone(x: Tensor) -> Tensor:
    return x * 3 / 3 if x.shape[1] == 1 else x


class CastUp(Decoder):
    """Gives logits in float32, whatever it computes in, as Mamba does."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, attention_mask).float()


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return negated_alone(x)


@pytest.mark.parametrize("mix", [negated_alone, kept_if_more])
def test_branch_on_one_token_is_refused_by_name(mix: Any) -> None:
    with pytest.raises(sc.RefusedError, match=r"branch on one token .* in blocks\.0: .* a prompt of one token"):
        sc.Engine(Decoder(layers=2, mix=mix), sc.EngineConfig(compile=False))


def test_the_innermost_module_is_named() -> None:
    refusal = one_token_refusal(Decoder(layers=2, mix=Branch()))
    assert refusal is not None and refusal.module == "blocks.0.mix" and "test_one_token.py" in refusal.source_line


def test_branch_that_makes_no_difference_is_none() -> None:
    assert sc.explain(Decoder(layers=1, mix=same_alone)).ok


class WithCache(LlamaForCausalLM):
    """Does something else with one token only if it has seen others: in steps of `generate`."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        seen = cache is not None and cache.get_seq_length() > 0
        result = super().forward(input_ids, **kwargs)
        if seen and input_ids.shape[1] == 1:
            result.logits = result.logits.flip(-1)
        return result


def changed(family: str, kind: type) -> Any:
    model = tiny(family, **shallow(family))
    model.__class__ = kind
    return model


def test_branch_in_steps_of_generate_runs_whole_and_gives_its_tokens() -> None:
    model = changed("llama", WithCache)
    report = sc.explain(model)
    assert report.verdict == "sequential" and "one token and a cache" in str(report)
    prompts = [[5, 7, 9], [8]]
    alone = [
        model.generate(torch.tensor([p]), max_new_tokens=5, do_sample=False)[0, len(p) :].tolist() for p in prompts
    ]
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    requests = [engine.submit(p, max_new_tokens=5, do_sample=False) for p in prompts]
    assert [list(request.result().tokens) for request in requests] == alone


class OtherCodesInPrompts(LlamaForCausalLM):
    """Reads the ids of a half of the vocabulary otherwise in the first call than in steps behind it."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        rows = self.model.embed_tokens(input_ids)
        if cache is None or cache.get_seq_length() == 0:
            rows = torch.where((input_ids >= self.config.vocab_size // 2)[..., None], rows * 2, rows)
        return super().forward(inputs_embeds=rows, **kwargs)


def test_what_is_so_of_a_half_of_all_ids_is_seen() -> None:
    report = sc.explain(changed("llama", OtherCodesInPrompts))
    assert report.verdict == "sequential" and "one token and a cache" in str(report)


class Uncached(LlamaForCausalLM):
    """Has no cache, of which `generate` knows nothing: it gives each step the last token alone."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, use_cache=False)


def test_where_generate_departs_from_forward_the_tokens_are_those_of_generate() -> None:
    # transformers' own cache keeps all keys, with a window of one
    for model in (changed("llama", Uncached), tiny("mistral", sliding_window=1, num_hidden_layers=1)):
        engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
        request = engine.submit([5, 7, 9, 11], max_new_tokens=6, do_sample=False)
        assert list(request.result().tokens) == generated_alone(model, [5, 7, 9, 11], 6)
        assert sc.explain(model).verdict == "sequential"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_without_such_a_branch_are_none(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma2"):
        assert one_token_refusal(tiny(family, **shallow(family)).to(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_branch_is_found_in_half_precision(dtype: torch.dtype) -> None:
    assert one_token_refusal(changed("llama", WithCache).to(dtype)) is not None
    assert one_token_refusal(Decoder(layers=2, mix=negated_alone).to(dtype)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_are_cast_up_are_rounded_as_what_they_are_computed_in(dtype: torch.dtype) -> None:
    assert one_token_refusal(CastUp(layers=2, mix=rounded_alone).to(dtype)) is None
    refusal = one_token_refusal(CastUp(layers=2, mix=negated_alone).to(dtype))
    assert refusal is not None and refusal.module == "blocks.0"


def test_model_that_needs_more_tokens_is_not_looked_at() -> None:
    def more(x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise ValueError("more tokens, please")
        return x

    assert one_token_refusal(Decoder(layers=1, mix=more)) is None


class Counted(LlamaForCausalLM):
    """Every other call has its logits negated."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        self.calls = self.calls + 1
        result.logits = result.logits * (1.0 if self.calls % 2 else -1.0)
        return result


def test_what_a_call_leaves_for_the_next_is_found_and_each_request_has_its_own() -> None:
    model = changed("llama", Counted)
    report = sc.explain(model)
    assert report.verdict == "sequential" and "gives other logits behind other calls" in str(report)
    assert "calls" not in vars(model)
    prompts = [[5, 7, 9], [8], [1, 2, 3, 4]]
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    requests = [engine.submit(p, max_new_tokens=5, do_sample=False) for p in prompts]
    found = [list(request.result().tokens) for request in requests]
    for prompt, tokens in zip(prompts, found, strict=True):
        alone = changed("llama", Counted)
        assert generated_alone(alone, prompt, 5) == tokens


class Listed(LlamaForCausalLM):
    """Keeps what it knows of its calls in a list, which copies of its modules share; no rule knows its last step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        self.calls.append(1)
        result.logits = result.logits.roll(len(self.calls), -1)
        return result


def test_trials_leave_nothing_in_the_lists_of_a_model() -> None:
    model = changed("llama", Listed)
    model.calls = []
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    assert model.calls == []
    found = list(engine.submit([5, 7, 9], max_new_tokens=5, do_sample=False).result().tokens)
    assert generated_alone(model, [5, 7, 9], 5) == found
