"""Tokens on their way from the step that gave them to the handles of their requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from selective_compile.forks import ThisProcess
from selective_compile.runtime.one_thread import OneThread

Delivery = tuple[Callable[..., None], tuple[Any, ...]]


class Outbox:
    """Makes deliveries in the order in which they are put. The engine calls it under its guard.

    Without a thread each is made at once. With one they wait for `send`, which the engine calls when it is about to run
    the model: whoever is woken by a token then does its own work while the model computes, and not while the next step
    is being planned.
    """

    def __init__(self, *, threaded: bool) -> None:
        self._thread = _thread() if threaded else None
        self._process = ThisProcess.number
        self._put: list[Delivery] = []
        self._sent: Future[None] | None = None

    def put(self, deliver: Callable[..., None], *arguments: Any) -> None:
        """`deliver(*arguments)`, which must not wait for anything that the engine's guard protects."""
        if self._thread is None:
            deliver(*arguments)
        else:
            self._put.append((deliver, arguments))

    def send(self) -> None:
        """Have the thread make what was put, beside what comes now."""
        if self._thread is not None and self._process != ThisProcess.number:
            self._thread, self._sent, self._process = _thread(), None, ThisProcess.number
        if self._put and self._thread is not None:
            self._sent = self._thread.submit(_deliver, self._put)
            self._put = []

    def flush(self) -> None:
        """Wait until all that was put is made."""
        self.send()
        if self._sent is not None:
            sent, self._sent = self._sent, None
            sent.result()


def _thread() -> OneThread:
    return OneThread("selective-compile-tokens")


def _deliver(deliveries: list[Delivery]) -> None:
    for deliver, arguments in deliveries:
        deliver(*arguments)
