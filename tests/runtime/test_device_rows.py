"""Who chooses a token, the device or the host, and when criteria are asked: by what a request asks for alone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from selective_compile.runtime import GenerationParams, verify
from selective_compile.runtime.device_draw import choices
from selective_compile.runtime.sampler import sample
from tests.runtime.engine_checks import expect, run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.simulated import SimulatedProgram, simulated_engine

OF_DEVICE: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "seed": 3, "top_p": 0.8}, {"repetition_penalty": 1.5})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[GenerationParams]:
    """Fills with whom the host chooses a token for."""
    found: list[GenerationParams] = []

    def noted(logits: Tensor, params: Any, *arguments: Any, **options: Any) -> Any:
        found.extend(params)
        return sample(logits, params, *arguments, **options)

    monkeypatch.setattr(verify, "sample", noted)
    return found


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("odd", [{"logprobs": True}, {"logprobs": True, "do_sample": True, "seed": 1}])
def test_the_host_chooses_for_nobody_but_who_asks_for_more_than_tokens(
    captures: bool, odd: dict[str, Any], asked: list[GenerationParams]
) -> None:
    """What the device chooses for the others is the same to the last bit, whoever is beside them."""
    stream = PlayedStream(captures=captures)
    engine = simulated_engine(SimulatedProgram(captured=captures), stream=stream, max_requests=8)
    requests = [engine.submit([1, 2, 3 + n], max_new_tokens=15, **each) for n, each in enumerate(OF_DEVICE)]
    alone = engine.submit([7, 8], max_new_tokens=8, **odd)
    steps = 0
    while not alone.finished:
        engine.step()
        steps += 1
    assert len(asked) == 8 and all(params is alone.params for params in asked)
    assert stream.replayed == (steps if captures else 0), "its steps are graphs, too"
    waits = stream.waits
    engine.step()
    assert stream.waits == waits and stream.left > 0, "without it, nobody waits for the tokens again"
    run_until_idle(engine)
    for request in (*requests, alone):
        expect(request)
    by_itself = simulated_engine().submit([7, 8], max_new_tokens=8, **odd)
    by_itself.result()
    assert alone.logprobs == by_itself.logprobs is not None


def test_criteria_are_asked_while_the_next_step_is_computed_and_not_after_the_last_token() -> None:
    told: list[list[int]] = []

    def criterion(input_ids: Tensor, scores: None) -> bool:
        told.append(input_ids[0].tolist())
        assert stream.left, "no step is on its way"
        assert stream.besides, "what it reads comes behind that step"
        return len(told) == 5

    stream = PlayedStream()
    engine = simulated_engine(stream=stream)
    request = engine.submit([1, 2, 3], max_new_tokens=9, stopping_criteria=[criterion])
    assert engine.step() and told == []
    run_until_idle(engine)
    assert request.finish_reason == "stop" and len(request.tokens) == 5 and not stream.besides
    assert told == [[1, 2, 3, *request.tokens[:count]] for count in range(1, 6)]
    told.clear()
    cancelled = engine.submit([1, 2, 3], max_new_tokens=9, stopping_criteria=[criterion])
    engine.step()
    engine.step()
    cancelled.cancel()
    run_until_idle(engine)
    assert len(told) == 1, "nobody asks for one that has left"


def test_a_criterion_that_fails_a_step_late_ends_its_request_alone() -> None:
    def criterion(input_ids: Tensor, scores: None) -> bool:
        if input_ids.shape[1] == 5:
            raise OSError("no such word")
        return False

    engine = simulated_engine(stream=PlayedStream())
    bad = engine.submit([1, 2, 3], max_new_tokens=9, stopping_criteria=[criterion])
    good = engine.submit([1, 2, 4], max_new_tokens=9)
    run_until_idle(engine)
    assert bad.finish_reason == "error" and "no such word" in str(bad.error) and len(bad.tokens) == 1
    expect(good)


def test_for_drafts_the_host_chooses_whether_there_is_one_or_not(asked: list[GenerationParams]) -> None:
    engine = simulated_engine(stream=PlayedStream())
    drafting = engine.submit([1, 2, 1, 2, 1], max_new_tokens=9, prompt_lookup_num_tokens=3)
    beside = engine.submit([3, 4], max_new_tokens=9)
    run_until_idle(engine)
    assert len(asked) == 9 and all(params is drafting.params for params in asked)
    for request in (drafting, beside):
        expect(request)


@pytest.mark.parametrize("budget", [4, 70])
def test_what_is_computed_again_is_chosen_by_whom_it_would_have_been(
    budget: int, asked: list[GenerationParams]
) -> None:
    """The host has a prompt's rows to keep, and with them chooses the first token, and no other."""
    engine = simulated_engine(stream=PlayedStream(), token_budget=budget)
    request = engine.submit([1, 2, 3, 4, 5, 6], max_new_tokens=9, prompt_logprobs=True)
    for _ in range(3):
        for _ in range(4):  # enough to compute all of it again, and a token more
            engine.step()
        assert request.tokens
        engine.drop_computed()
    run_until_idle(engine)
    assert len(asked) == 1
    expect(request)
    alone = simulated_engine().submit([1, 2, 3, 4, 5, 6], max_new_tokens=9, prompt_logprobs=True)
    assert request.result().prompt_logprobs == alone.result().prompt_logprobs is not None


def test_criteria_do_not_have_tokens_drawn_that_are_those_of_the_largest_logit() -> None:
    """Which takes a sort of all scores of all rows."""
    engine = simulated_engine()
    criterion = engine.submit([1], max_new_tokens=2, stopping_criteria=[lambda ids, scores: False]).params
    assert choices([criterion], [0]) is None and criterion.chosen_on_device
    assert choices([criterion, engine.submit([1], max_new_tokens=2, do_sample=True).params], [0, 0]) is not None
