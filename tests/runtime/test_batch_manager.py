"""The batch manager: a request's responses, and what they say of one that is wrong."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.runtime import BatchManager
from tests.runtime.managed import Client, assert_nothing_left, manage, slow_from, tokens_of, until
from tests.runtime.simulated import SimulatedProgram, simulated_engine


def test_a_response_has_the_tensors_of_its_request() -> None:
    client = Client()
    client.ask(2**63 + 5, [4, 5], max_new_tokens=6, logprobs=True)
    with manage(client) as manager:
        client.wait(1)
    ((response,),) = client.parts.values()
    expected = [4, 5, *tokens_of([4, 5], max_new_tokens=6)]
    assert response["output_ids"].tolist() == [[expected]]
    assert response["output_ids"].dtype == torch.int64
    assert response["sequence_length"].tolist() == [[8]]
    assert response["log_probs"].shape == (1, 1, 6) and response["cum_log_probs"].shape == (1, 1)
    assert float(response["log_probs"].sum()) == pytest.approx(float(response["cum_log_probs"]))
    assert client.errors == {}
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_streamed_request_gets_a_response_for_each_token(overlap: bool) -> None:
    client = Client()
    client.ask("a", [4, 5], streaming=True, max_new_tokens=6)
    with manage(client, overlap=overlap):
        client.wait(1)
    parts = client.parts["a"]
    assert [part["output_ids"].shape for part in parts] == [(1, 1, 1)] * 6
    assert [int(part["output_ids"]) for part in parts] == tokens_of([4, 5], max_new_tokens=6)
    assert [int(part["sequence_length"]) for part in parts] == [3, 4, 5, 6, 7, 8]


def test_what_is_wrong_with_one_request_arrives_as_its_last_response() -> None:
    client = Client()
    client.ask("empty", [])
    client.ask("unknown", nonsense=1)
    client.ask("good")
    with manage(client) as manager:
        client.wait(3)
    assert client.errors["empty"] == "prompt_ids must hold at least one token id, got none"
    assert "got 'nonsense'" in client.errors["unknown"]
    assert len(client.parts["good"]) == 1
    assert_nothing_left(manager)


class Ids:
    """Token ids that cannot be read, as on a device that failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def tolist(self) -> list[int]:
        raise self.error


def test_whatever_submission_raises_is_a_last_response_and_those_behind_go_on(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.ask("device", Ids(RuntimeError("CUDA error")))
    client.ask("no options", [1], max_new_tokens=10**400)
    client.ask("good")
    with manage(client, max_active=3) as manager:
        client.wait(3)
        assert manager.num_active == 0
        client.ask("later")
        client.wait(4)
    assert client.errors["device"] == "submission failed: RuntimeError: CUDA error"
    assert "submission of a request failed" in caplog.text
    assert client.errors["no options"].startswith("max_new_tokens must be")
    assert set(client.errors) == {"device", "no options"} and len(client.done) == 4
    assert_nothing_left(manager)


@pytest.mark.parametrize("request_id", [None, [7], {}, True, 1.0])
def test_an_id_that_is_none_is_refused_by_name(request_id: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    answers: list[tuple[Any, dict[str, Tensor], bool, str]] = []
    client.ask(request_id, streaming=True)
    client.queue.append("no request")  # type: ignore[arg-type]
    client.ask("good")

    def send(*answer: Any) -> None:
        answers.append(answer)

    with BatchManager(simulated_engine(), client.get, send) as manager:
        until(lambda: len(answers) >= 2, told=answers)
    refused = [answer for answer in answers if answer[0] != "good"]
    assert refused == [(request_id, {}, True, f"request_id must be a string or an integer, got {request_id!r}")]
    assert "get_requests must give InferenceRequests, got 'no request'" in caplog.text
    assert_nothing_left(manager)


def test_an_id_of_numpy_is_the_integer() -> None:
    client = Client()
    client.ask(np.int64(7))  # type: ignore[arg-type]
    with manage(client) as manager:
        client.wait(1)
    assert [type(request_id) for request_id in client.done] == [int] and not client.errors
    assert_nothing_left(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_is_killed_by_a_submission_says_so_to_those_behind_it() -> None:
    client = Client()
    for request_id, ids in (("a", [1]), ("b", Ids(KeyboardInterrupt("killed"))), ("c", [1])):
        client.ask(request_id, ids)
    with manage(client) as manager:
        client.wait(3)
    assert client.errors == dict.fromkeys(
        "abc", "the worker thread of the batch manager ended: KeyboardInterrupt: killed"
    )
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_id_in_use_is_refused_and_one_that_ended_may_be_used_again(overlap: bool) -> None:
    client = Client()

    def again(request_id: Any, is_final: bool) -> None:
        if is_final and client.done.count("a") == 1 and not client.queue:
            client.ask("a", [7])

    client.ask("a", max_new_tokens=20)
    client.ask("a")
    client.on_response = again
    with manage(client, overlap=overlap) as manager:
        client.wait(3)
    assert client.errors["a"].startswith("request_id must not be that of an unfinished request")
    assert [len(part["output_ids"][0, 0]) for part in client.parts["a"]] == [23, 6]
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_refusal_of_an_id_in_use_does_not_end_the_request_that_has_it(overlap: bool) -> None:
    """Whoever reads the responses of an id up to the last one has those of the first request, and then the refusals."""
    answers: list[tuple[list[int], bool, str]] = []
    client, program = Client(), SimulatedProgram()

    def send(request_id: Any, tensors: dict[str, Tensor], is_final: bool, error: str) -> None:
        answers.append((tensors["output_ids"].flatten().tolist() if tensors else [], is_final, error))
        if len(answers) == 3:
            client.ask("a", [8], streaming=True)
            client.ask("a", [9])
        if is_final:
            client.done.append(request_id)

    def wait_for_refusals() -> None:
        if manager._delivery.num_refusals_that_wait < 2:
            time.sleep(0.02)

    client.ask("a", [4, 5], streaming=True, max_new_tokens=200)
    manager = BatchManager(simulated_engine(program, overlap=overlap), client.get, send)
    program.before_run = wait_for_refusals
    with manager:
        client.wait(3)
    *parts, last, second, third = answers
    assert [token for tokens, _, _ in (*parts, last) for token in tokens] == tokens_of([4, 5], max_new_tokens=200)
    assert last[1:] == (True, "") and not any(is_final or error for _, is_final, error in parts)
    refusal = "request_id must not be that of an unfinished request, got 'a'"
    assert second == third == ([], True, refusal)
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stopped_request_gets_its_last_response(overlap: bool) -> None:
    client, program = Client(), SimulatedProgram()
    program.before_run = slow_from(20)
    client.ask("a", max_new_tokens=500, streaming=True)
    client.ask("b", max_new_tokens=3)

    def stop_soon(request_id: Any, is_final: bool) -> None:
        if len(client.parts.get("a", ())) == 4:
            client.stops = {"a", "who is that"}

    client.on_response = stop_soon
    with manage(client, program, overlap=overlap) as manager:
        client.wait(2)
    assert 4 <= sum(part["output_ids"].numel() for part in client.parts["a"]) < 500
    assert client.errors == {} and set(client.done) == {"a", "b"}
    assert_nothing_left(manager)


def test_its_public_name() -> None:
    assert sc.runtime.BatchManager is BatchManager


def test_max_active_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_active must be a positive integer or None, got 0"):
        manage(Client(), max_active=0)


def test_senders_must_be_positive() -> None:
    with pytest.raises(ValueError, match="senders must be a positive integer, got 0"):
        BatchManager(simulated_engine(), Client().get, Client().send, senders=0)
