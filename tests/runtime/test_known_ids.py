"""A head with more rows than the embedding: a token that the model cannot go on from ends its request, and no other."""

from __future__ import annotations

import copy
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import selective_compile as sc
from selective_compile.runtime import Engine
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.request_state import RequestState
from selective_compile.sequential_program import SequentialProgram
from tests.models import VOCABULARY, tiny
from tests.runtime.engine_checks import run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

KNOWN = 40
UNKNOWN_ID = VOCABULARY + 3
EAGER = sc.EngineConfig(max_kv_tokens=2048, compile=False)
PROMPT = [5, 6, 7]
WORDS = f"a token must be less than {VOCABULARY} for the model to go on from it, .*got {UNKNOWN_ID}"


class FewIds(SimulatedProgram):
    known_ids = KNOWN

    def __call__(self, inputs: Any, pools: Any, states: Any = ()) -> Tensor:
        assert 0 <= int(inputs.input_ids.min()) and int(inputs.input_ids.max()) < KNOWN
        return super().__call__(inputs, pools, states)


def streams() -> list[Any]:
    return [None, PlayedStream(), PlayedStream(captures=True)]


@pytest.mark.parametrize("stream", streams(), ids=["at once", "played", "captured"])
def test_a_step_is_given_no_token_that_the_model_does_not_know(stream: DeviceStream | None) -> None:
    program = FewIds(captured=stream is not None and stream.captures)
    engine = simulated_engine(program, stream=stream)
    requests = [engine.submit([number % KNOWN, number], max_new_tokens=1 + number % 7) for number in range(40)]
    run_until_idle(engine)
    for request in requests:
        expected = expected_tokens(request.prompt_ids, request.params)
        before = next((place for place, token in enumerate(expected[:-1]) if token >= KNOWN), len(expected))
        assert request.tokens == expected[:before]
        assert (request.finish_reason == "error") == (before < len(expected))
    reasons = {request.finish_reason for request in requests}
    assert reasons == {"error", "length"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """`PROMPT` is followed by a token that has no embedding."""
    model = tiny("llama")
    wider = nn.Linear(64, VOCABULARY + 16, bias=False)
    with torch.no_grad():
        wider.weight.zero_()
        wider.weight[:VOCABULARY] = model.lm_head.weight
        last = model.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        best = model.lm_head.weight[model.lm_head(last).argmax()]
        wider.weight[UNKNOWN_ID] = best + last / last.square().sum()  # a logit that is larger by one
    model.lm_head = wider.eval()
    return model


class Rows(nn.Module):
    """A table that is no `nn.Embedding`."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Clamped(nn.Embedding):
    """Unknown ids share the last row: it knows all."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.clamp(max=self.num_embeddings - 1))


def with_table(model: PreTrainedModel, kind: type[nn.Module]) -> PreTrainedModel:
    other: Any = copy.copy(model)
    other._modules = {**model._modules, "model": copy.copy(model.model)}
    other.model._modules = dict(model.model._modules)
    weight = model.get_input_embeddings().weight
    table: Any = Rows(weight) if kind is Rows else kind(*weight.shape)
    table.weight = weight
    other.set_input_embeddings(table.eval())
    return other


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Engine:
    return Engine(model, EAGER)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"do_sample": True, "top_k": 1, "num_return_sequences": 2}],
    ids=["greedy", "beams", "drafts", "samples"],
)
def test_such_a_request_ends_by_name_and_the_others_go_on(engine: Engine, options: dict[str, Any]) -> None:
    others = [engine.submit([number + 1] * 9, max_new_tokens=6, do_sample=False) for number in range(3)]
    found = engine.submit(PROMPT, **{"max_new_tokens": 6, "do_sample": False, **options})
    with pytest.raises(RuntimeError, match=WORDS):
        list(found)
    assert all(sample.result().finish_reason == "error" and not sample.tokens for sample in found.samples)
    assert [len(other.result().tokens) for other in others] == [6, 6, 6]


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"eos_token_id": UNKNOWN_ID}], ids=["length", "stop"])
def test_a_last_token_needs_no_embedding(engine: Engine, model: PreTrainedModel, options: dict[str, Any]) -> None:
    found = engine.submit(PROMPT, **{"max_new_tokens": 6, "do_sample": False, **options}).result()
    expected = model.generate(torch.tensor([PROMPT]), **{"max_new_tokens": 6, "do_sample": False, **options})
    assert found.tokens == (UNKNOWN_ID,) == tuple(expected[0, len(PROMPT) :].tolist())


def test_so_does_one_of_a_model_that_runs_whole(model: PreTrainedModel) -> None:
    engine = Engine(model, EAGER, program=SequentialProgram(model, ()))
    other, found = (engine.submit(prompt, max_new_tokens=6, do_sample=False) for prompt in ([1] * 9, PROMPT))
    with pytest.raises(RuntimeError, match=WORDS):
        list(found)
    assert len(other.result().tokens) == 6


def test_an_error_of_a_whole_run_ends_its_request_alone(model: PreTrainedModel) -> None:
    """Of a table of which nothing is known."""
    strange = with_table(model, Rows)
    engine = Engine(strange, EAGER, program=SequentialProgram(strange, ()))
    others = [engine.submit([number + 1] * 9, max_new_tokens=6, do_sample=False) for number in range(2)]
    found = engine.submit(PROMPT, max_new_tokens=6, do_sample=False)
    beams = engine.submit(PROMPT, max_new_tokens=6, do_sample=False, num_beams=2)
    samples = engine.submit(PROMPT, max_new_tokens=6, top_k=1, do_sample=True, num_return_sequences=2)
    assert [len(other.result().tokens) for other in others] == [6, 6]
    for request in (found, beams, *samples.samples):
        result = request.result()
        assert result.finish_reason == "error" and "IndexError" in (result.error or "")
    assert found.result().tokens == (UNKNOWN_ID,)
    assert not engine.stats().blocks_used and not engine._runner.program._requests


def test_a_prompt_without_an_embedding_is_refused_when_submitted(model: PreTrainedModel) -> None:
    engine = Engine(model, EAGER, program=SequentialProgram(model, ()))
    with pytest.raises(ValueError, match=f"less than .*{VOCABULARY}, got {UNKNOWN_ID}"):
        engine.submit([5, UNKNOWN_ID], max_new_tokens=2)


@pytest.mark.parametrize("whole", [True, False])
def test_a_table_that_knows_all_ids_goes_on_from_them(model: PreTrainedModel, whole: bool) -> None:
    clamped = with_table(model, Clamped)
    engine = Engine(clamped, EAGER, program=SequentialProgram(clamped, ()) if whole else None)
    expected = clamped.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert expected[0] == UNKNOWN_ID
    assert list(engine.submit(PROMPT, max_new_tokens=6, do_sample=False).result().tokens) == expected
    embeddings = model.get_input_embeddings()(torch.tensor([PROMPT]))
    options: dict[str, Any] = {"inputs_embeds": embeddings, "max_new_tokens": 6, "do_sample": False}
    if not whole:
        assert sc.generate(clamped, **options, engine_config=EAGER)[0].tolist() == expected


def test_hooks_may_give_the_table_other_ids(model: PreTrainedModel) -> None:
    hooked = with_table(model, nn.Embedding)
    hooked.get_input_embeddings().register_forward_pre_hook(lambda _, args: (args[0] % VOCABULARY,))
    expected = hooked.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)
    assert torch.equal(sc.generate(hooked, torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("kind", [nn.Embedding, Rows])
def test_prompts_of_embeddings_end_by_name_too(model: PreTrainedModel, kind: type[nn.Module]) -> None:
    model = with_table(model, kind)
    embeddings = model.get_input_embeddings()(torch.tensor([PROMPT]))
    with pytest.raises(RuntimeError, match=WORDS):
        sc.generate(model, inputs_embeds=embeddings, max_new_tokens=6, do_sample=False, engine_config=EAGER)


def test_a_prompt_whose_tokens_have_types_must_have_embeddings() -> None:
    """The engine is given ids that tell both."""
    model = tiny("gpt2")
    model.lm_head = nn.Linear(model.config.n_embd, VOCABULARY + 16, bias=False).eval()
    ids = torch.tensor([[5, UNKNOWN_ID, 7]])
    with pytest.raises(ValueError, match=f"less than .*{VOCABULARY}, got {UNKNOWN_ID}"):
        sc.generate(model, ids, token_type_ids=torch.zeros_like(ids), max_new_tokens=2, engine_config=EAGER)


def test_drafts_go_as_far_as_the_model_knows_them() -> None:
    state = RequestState("a", 0, PROMPT, max_new_tokens=9, known_ids=KNOWN)
    state.propose(array("q", [1, KNOWN - 1, KNOWN, 2]))
    assert state.draft.tolist() == [1, KNOWN - 1]
