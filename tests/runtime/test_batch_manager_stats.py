"""What the batch manager tells of each iteration."""

from __future__ import annotations

import pytest

from tests.runtime.managed import Client, manage
from tests.runtime.simulated import VOCAB_SIZE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for whoever is slow: who meets in one does not depend on the speed of the machine."""
    monkeypatch.setattr("selective_compile.runtime.batch_manager.PATIENCE", 60.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_stats_of_each_iteration(overlap: bool) -> None:
    client = Client()
    for number in range(3):
        client.ask(number, [number] * 5, max_new_tokens=4)
    with manage(client, overlap=overlap, token_budget=8, block_size=4, max_kv_tokens=64):
        client.wait(3)
    first = client.stats[0]
    assert first["Iteration Counter"] == 0
    assert (first["Scheduled Requests"], first["Context Requests"], first["Generation Requests"]) == (2, 2, 0)
    assert first["Total Context Tokens"] == 8
    assert (first["Max KV cache blocks"], first["Tokens per KV cache block"]) == (16, 4)
    assert first["Used KV cache blocks"] + first["Free KV cache blocks"] == 16
    assert [one["Iteration Counter"] for one in client.stats] == list(range(len(client.stats)))
    assert client.stats[-1]["Active Request Count"] == 0
    assert [one["Limiting Resource"] for one in client.stats[:2]] == ["compute", "compute"]
    assert client.stats[-1]["Limiting Resource"] == "memory"
    assert all(4 * one["Floor Step Seconds"] == one["Step Seconds"] for one in client.stats)
    assert first["Predicted Step Seconds"] is None and client.stats[1]["Predicted Step Seconds"] > 0


def test_stats_of_requests_that_ended_have_their_times() -> None:
    client = Client()
    for number in range(3):
        client.ask(number, max_new_tokens=number + 1)
    client.ask(2**70, [VOCAB_SIZE - 1], max_new_tokens=4)
    client.ask("a", [7, 8], num_beams=3, max_new_tokens=4)
    with manage(client, max_requests=3):
        client.wait(5)
    ended = {one["Request ID"]: one for stats in client.stats for one in stats["Ended Requests"]}
    assert {name: (one["Finish Reason"], one["Generated Tokens"]) for name, one in ended.items()} == {
        0: ("length", 1),
        1: ("length", 2),
        2: ("length", 3),
        2**70: ("length", 4),
        "a": ("length", 4),
    }
    for one in ended.values():
        assert 0 < one["Queue Seconds"] < one["First Token Seconds"] <= one["Total Seconds"]
    assert ended[0]["Between Tokens Seconds"] is None and ended[2]["Between Tokens Seconds"] > 0
    # The beams of a search are one request.
    assert max(one["Active Request Count"] for one in client.stats) == 4  # one has ended by the first of them
    assert {one["Scheduled Requests"] for one in client.stats} == {1, 2, 3}
    assert client.stats[-1]["Scheduled Requests"] == 1
    assert all(
        one["Context Requests"] + one["Generation Requests"] == one["Scheduled Requests"] for one in client.stats
    )


def test_static_batches_report_their_empty_slots() -> None:
    client = Client()
    client.ask("short", max_new_tokens=2)
    client.ask("long", max_new_tokens=4)
    with manage(client, batching="static"):
        client.wait(2)
    assert [one["Empty Generation Slots"] for one in client.stats] == [0, 0, 1, 1]
    assert [one["Generation Requests"] for one in client.stats] == [0, 2, 1, 1]
