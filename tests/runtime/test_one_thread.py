"""A thread of one's own: calls in turn, what they raise, and when it ends."""

from __future__ import annotations

import threading

import pytest

from selective_compile.runtime.one_thread import OneThread


def fail() -> None:
    raise SystemExit(3)


def test_calls_are_made_in_turn_and_what_they_raise_ends_nothing() -> None:
    thread, found = OneThread("ours"), list[tuple[int, str]]()
    made = [thread.submit(lambda n=n: found.append((n, threading.current_thread().name))) for n in range(3)]
    failed = thread.submit(fail)
    assert thread.submit(divmod, 7, 2).result(30) == (3, 1)
    assert all(each.done() for each in made) and found == [(n, "ours") for n in range(3)]
    with pytest.raises(SystemExit):
        failed.result(30)


@pytest.mark.parametrize("begun", [False, True])
def test_it_ends_after_the_calls_that_it_has(begun: bool) -> None:
    thread, found = OneThread("ours"), list[int]()
    going_on = threading.Event()
    if begun:
        thread.submit(going_on.wait)
        thread.submit(found.append, 1)
    going_on.set()
    thread.close()
    assert found == [1] * begun and not thread._thread.is_alive()
