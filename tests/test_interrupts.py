"""Who is told of an interrupt, and that whoever has asked for none gets none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from selective_compile.interrupts import end_at_once, ending_at_once, raising


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_work_is_told_by_an_exception_within_what_ends_at_once() -> None:
    signal.signal(signal.SIGINT, end_at_once)
    with raising():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with ending_at_once():
            assert signal.getsignal(signal.SIGINT) is end_at_once
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is end_at_once


def test_where_it_is_ignored_it_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_once():
        signal.raise_signal(signal.SIGINT)
    with raising():
        signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_the_handler_as_it_is() -> None:
    before, failures = signal.getsignal(signal.SIGINT), []

    def import_something() -> None:
        try:
            with ending_at_once():
                assert signal.getsignal(signal.SIGINT) is before
        except BaseException as error:  # noqa: BLE001 - an assertion in a thread is told by nobody
            failures.append(error)

    thread = threading.Thread(target=import_something)
    thread.start()
    thread.join()
    assert not failures
