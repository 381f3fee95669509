"""What the batch manager's responses carry, next to Hugging Face alone: beams, samples, logits, log probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime import BatchManager
from tests.models import tiny
from tests.runtime.managed import Client, assert_nothing_left, manage, slow_from, tokens_of
from tests.runtime.simulated import SimulatedProgram, simulated_engine

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=256, block_size=4, token_budget=9)
EVERYTHING = {"logprobs": True, "output_logits": True, "prompt_logits": True}


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("llama", attention="eager")
    return model, compile_step_program(model, CONFIG)


def served(llama: Any, client: Client, count: int) -> Client:
    model, program = llama
    with BatchManager(sc.Engine(model, CONFIG, program=program), client.get, client.send) as manager:
        client.wait(count)
    assert_nothing_left(manager)
    assert client.errors == {}
    return client


def alone(model: Any, tokens: list[int]) -> Tensor:
    """[length, V] float32."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def joined(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    """Of the parts of a streamed response, along the tokens."""
    return torch.cat([part[name] for part in parts if name in part], dim=2)


@pytest.mark.parametrize("streaming", [False, True])
def test_one_sequence_has_the_models_own_logits_and_log_probabilities(llama: Any, streaming: bool) -> None:
    model, _ = llama
    prompt = [(7 * place + 3) % 199 for place in range(14)]  # two chunks
    client = Client()
    client.ask("a", prompt, streaming=streaming, max_new_tokens=6, **EVERYTHING)
    parts = served(llama, client, 1).parts["a"]
    assert len(parts) == (6 if streaming else 1)
    found = joined(parts, "output_ids")[0, 0].tolist()
    tokens = [*prompt, *found] if streaming else found
    logits = alone(model, tokens)
    assert [("context_logits" in part) for part in parts] == [True, *[False] * (len(parts) - 1)]
    assert parts[0]["context_logits"].shape == (1, 14, logits.shape[1])
    assert torch.allclose(parts[0]["context_logits"][0], logits[:14], atol=1e-4)
    rows = joined(parts, "generation_logits")
    assert rows.shape == (1, 1, 6, logits.shape[1]) and rows.dtype == torch.float32
    assert torch.allclose(rows[0, 0], logits[13:-1], atol=1e-4)
    wanted = logits[13:-1].log_softmax(-1).gather(1, torch.tensor(tokens[14:])[:, None])[:, 0]
    assert torch.allclose(joined(parts, "log_probs")[0, 0], wanted, atol=1e-4)
    assert parts[-1]["cum_log_probs"].shape == (1, 1)
    assert torch.allclose(parts[-1]["cum_log_probs"][0, 0], wanted.sum(), atol=1e-3)
    assert parts[-1]["sequence_length"].tolist() == [[20]]


@pytest.mark.parametrize("streaming", [False, True])
def test_beams_are_those_of_generate(llama: Any, streaming: bool) -> None:
    """Filled up with the padding that was asked for; the logits and log probabilities lie along each beam's path."""
    model, _ = llama
    prompt = [5, 9, 1, 7, 3, 2, 8, 4, 6, 11, 12]
    ids = torch.tensor([prompt])
    # An end-of-sequence id that some beams meet before others.
    fields = {"num_beams": 4, "max_new_tokens": 9, "do_sample": False, "eos_token_id": list(range(1, 199, 9))}
    fields["length_penalty"] = 0.0
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=77, num_return_sequences=4, **fields
    ).tolist()
    client = Client()
    client.queue.append(
        sc.runtime.InferenceRequest(
            request_id="a", input_ids=prompt, streaming=streaming, pad_id=77, options={**fields, **EVERYTHING}
        )
    )
    ((part,),) = served(llama, client, 1).parts.values()
    skipped = len(prompt) if streaming else 0
    found = part["output_ids"][0].tolist()
    assert found == [row[skipped:] for row in wanted]
    lengths = part["sequence_length"][0].tolist()
    assert part["sequence_length"].shape == (1, 4) and len(set(lengths)) > 1
    assert torch.allclose(part["context_logits"][0], alone(model, prompt), atol=1e-4)
    for place, length in enumerate(lengths):
        logits = alone(model, wanted[place][:length])
        new = length - len(prompt)
        assert torch.allclose(part["generation_logits"][0, place, :new], logits[len(prompt) - 1 : -1], atol=1e-4)
        tokens = torch.tensor(wanted[place][len(prompt) : length])
        own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(part["log_probs"][0, place, :new], own, atol=1e-4)
        assert not part["log_probs"][0, place, new:].any() and not part["generation_logits"][0, place, new:].any()
        assert torch.allclose(part["cum_log_probs"][0, place], own.sum(), atol=1e-3)


def test_log_probabilities_of_beams_are_the_models_own_whatever_processors_do(llama: Any) -> None:
    model, program = llama
    prompt = [5, 9, 1, 7]
    fields = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5, "repetition_penalty": 1.7}
    result = sc.Engine(model, CONFIG, program=program).submit(prompt, logprobs=True, **fields).result()
    for one in result.hypotheses or ():
        logits = alone(model, [*prompt, *one.tokens])[len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.logprobs), own, atol=1e-4)
    assert result.hypotheses is not None and result.logprobs == result.hypotheses[0].logprobs


def test_a_configuration_with_beams_returns_all_of_them_unless_it_says_how_many(llama: Any) -> None:
    config = sc.runtime.InferenceRequest
    client = Client()
    beams = GenerationConfig(num_beams=3, max_new_tokens=2)
    some = GenerationConfig(num_beams=3, num_return_sequences=2, max_new_tokens=2)
    client.queue += [config(request_id=1, input_ids=[1, 2], generation_config=beams)]
    client.queue += [config(request_id=2, input_ids=[1, 2], generation_config=some)]
    client.ask(3, [1, 2], num_beams=np.int64(3), max_new_tokens=2)
    parts = served(llama, client, 3).parts
    assert [parts[number][0]["output_ids"].shape for number in (1, 2, 3)] == [(1, 3, 4), (1, 2, 4), (1, 3, 4)]


def samples_alone(prompt: list[int], count: int, **options: Any) -> list[list[int]]:
    engine = simulated_engine()
    handle = engine.submit(prompt, do_sample=True, num_return_sequences=count, **options)
    return [list(sample.result().tokens) for sample in handle.samples]


@pytest.mark.parametrize("streaming", [False, True])
def test_samples_take_the_place_of_beams(streaming: bool) -> None:
    client = Client()
    fields = {"seed": 3, "max_new_tokens": 9, "eos_token_id": list(range(0, 61, 7))}
    client.ask("a", [4, 5], streaming=streaming, do_sample=True, num_return_sequences=3, logprobs=True, **fields)
    with manage(client) as manager:
        client.wait(1)
    assert_nothing_left(manager)
    wanted = samples_alone([4, 5], 3, **fields)
    assert len({len(tokens) for tokens in wanted}) > 1
    found = gathered(client.parts["a"], [] if streaming else [4, 5], before=2)
    assert found == wanted
    last = client.parts["a"][-1]
    assert last["cum_log_probs"].shape == (1, 3) and last["log_probs"].shape[:2] == (1, 3)
    logprobs = torch.cat([part["log_probs"] for part in client.parts["a"]], dim=2).sum(-1)
    assert torch.allclose(logprobs, last["cum_log_probs"], atol=1e-4)


def gathered(parts: list[dict[str, Tensor]], prompt: list[int], *, before: int) -> list[list[int]]:
    """The tokens of each sequence, by what the lengths say is new; each response is as wide as its longest."""
    count = parts[0]["output_ids"].shape[1]
    tokens: list[list[int]] = [[] for _ in range(count)]
    lengths = [before] * count
    for part in parts:
        new = [now - then for now, then in zip(part["sequence_length"][0].tolist(), lengths, strict=True)]
        lengths = part["sequence_length"][0].tolist()
        rows = part["output_ids"][0].tolist()
        assert part["output_ids"].shape == (1, count, len(prompt) + max(new))
        for kept, row, some in zip(tokens, rows, new, strict=True):
            assert row[: len(prompt)] == prompt and not any(row[len(prompt) + some :])
            kept += row[len(prompt) : len(prompt) + some]
    return tokens


def test_one_sample_that_fails_ends_its_request_and_its_other_samples() -> None:
    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 4 and int(ids[0, -1]) % 2:
            raise RuntimeError("odd")
        return scores

    client = Client()
    client.ask("a", do_sample=True, num_return_sequences=3, seed=1, max_new_tokens=50, logits_processor=[fail])
    client.ask("b", num_beams=3, max_new_tokens=50, logits_processor=[fail])
    client.ask("c")
    with manage(client) as manager:
        client.wait(3)
    assert all("odd" in client.errors[name] for name in "ab") and "c" not in client.errors
    assert_nothing_left(manager)


def test_stopped_beams_and_samples_get_what_they_have() -> None:
    client, program = Client(), SimulatedProgram()
    program.before_run = slow_from(40)
    client.ask("beams", [1, 2, 3], num_beams=3, max_new_tokens=900)
    client.ask("samples", [1, 2, 3], do_sample=True, num_return_sequences=2, max_new_tokens=900)
    client.ask("short", max_new_tokens=30)
    client.on_response = lambda request_id, is_final: client.stops.update({"beams", "samples"})
    with manage(client, program) as manager:
        client.wait(3)
    assert client.parts["beams"][0]["output_ids"].tolist() == [[[1, 2, 3]] * 3]
    assert client.parts["samples"][0]["output_ids"].shape[1] == 2
    assert client.parts["samples"][0]["sequence_length"].min() > 3
    assert_nothing_left(manager)


def test_more_beams_than_allowed_are_refused() -> None:
    client = Client()
    client.ask("beams", num_beams=3)
    client.ask("samples", do_sample=True, num_return_sequences=4)
    client.ask("two", num_beams=2)
    with BatchManager(simulated_engine(), client.get, client.send, max_beam_width=2) as manager:
        client.wait(3)
    assert client.errors["beams"] == "num_beams must be at most max_beam_width, 2, got 3"
    assert client.errors["samples"] == "num_return_sequences must be at most max_beam_width, 2, got 4"
    assert "two" not in client.errors
    assert_nothing_left(manager)
    with pytest.raises(ValueError, match="max_beam_width must be a positive integer or None, got 0"):
        BatchManager(simulated_engine(), client.get, client.send, max_beam_width=0)


def test_logits_of_the_prompt_are_no_option_of_a_model_that_runs_whole() -> None:
    program = SimulatedProgram()
    program.gives_every_row = False
    with pytest.raises(ValueError, match="prompt_logits must be False for a model that runs whole, got True"):
        simulated_engine(program).submit([1], prompt_logits=True)


WIDTHS: dict[str, dict[str, Any]] = {
    "one": {},
    "samples": {"do_sample": True, "num_return_sequences": 2, "seed": 5},
    "beams": {"num_beams": 2},
}
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=9),
            "kind": st.sampled_from(["one", "one", "samples", "beams"]),
            "streaming": st.booleans(),
            "prompt_logits": st.booleans(),
            "max_new_tokens": st.integers(1, 6),
            "stop": st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(
    asked=REQUESTS,
    policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
    small=st.booleans(),
    overlap=st.booleans(),
)
def test_random_beams_samples_and_stops(asked: list[dict[str, Any]], policy: str, small: bool, overlap: bool) -> None:
    """Each has one last response, with the sequences of a request that has an engine for itself."""
    client = Client()
    for number, one in enumerate(asked):
        options = {name: one[name] for name in ("prompt_logits", "max_new_tokens")} | WIDTHS[one["kind"]]
        client.ask(number, one["prompt"], streaming=one["streaming"], **options)
    client.on_response = lambda number, is_final: client.stops.update(n for n, one in enumerate(asked) if one["stop"])
    sizes = {"block_size": 2, "max_kv_tokens": 64, "token_budget": 5, "max_requests": 4} if small else {}
    with manage(client, scheduler_policy=policy, overlap=overlap, **sizes) as manager:
        client.wait(len(asked))
    assert_nothing_left(manager)
    assert sorted(client.done) == list(range(len(asked))) and client.errors == {}
    for number, one in enumerate(asked):
        before = len(one["prompt"])
        found = gathered(client.parts[number], [] if one["streaming"] else one["prompt"], before=before)
        wanted = sequences_alone(one, WIDTHS[one["kind"]])
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == theirs[: len(ours)] and (one["stop"] or len(ours) == len(theirs))
        if one["prompt_logits"] and not one["stop"]:
            (rows,) = [part["context_logits"] for part in client.parts[number] if "context_logits" in part]
            assert rows.shape[:2] == (1, before)


def sequences_alone(one: dict[str, Any], width: dict[str, Any]) -> list[list[int]]:
    if one["kind"] == "one":
        return [tokens_of(one["prompt"], max_new_tokens=one["max_new_tokens"])]
    beams = {"num_return_sequences": 2} if one["kind"] == "beams" else {}
    handle = simulated_engine().submit(one["prompt"], max_new_tokens=one["max_new_tokens"], **width, **beams)
    result = handle.result()
    if result.hypotheses is not None:
        return [list(found.tokens) for found in result.hypotheses]
    return [list(sample.result().tokens) for sample in handle.samples]
