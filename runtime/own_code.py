"""Code that is not ours: what comes with a request fails that request alone, and a callback of the user only itself."""

from __future__ import annotations

import copy
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from selective_compile.runtime.state_guard import is_passed_on

logger = logging.getLogger(__name__)
# What holds nothing of a row: others look at it, too, or say something by it.
SHARED = (
    *(nn.Module, PreTrainedTokenizerBase, threading.Event, threading.Condition, threading.Semaphore, queue.Queue),
    *(type(threading.Lock()), type(threading.RLock()), queue.SimpleQueue),
)
Result = TypeVar("Result")


class ErrorText(str):
    """What to say of an exception that a request's own code raised, with that itself, without its traceback: that would
    keep alive what the engine computed."""

    cause: BaseException | None = None

    @classmethod
    def of(cls, what: str, error: BaseException) -> Self:
        text = cls(f"{what} failed: {type(error).__name__}: {error}")
        text.cause = error.with_traceback(None)
        return text


def cause_of(error: str | None) -> BaseException | None:
    return error.cause if isinstance(error, ErrorText) else None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """In place of a result."""

    error: str


@dataclass(frozen=True, kw_only=True)
class Done(Generic[Result]):
    result: Result


def attempt(what: str, call: Callable[[], Result]) -> Done[Result] | Failed:
    """The result of a call into a request's own code, or what it raised.

    Any exception is taken: nothing is known of the code, and the requests beside it have no part in it. So it cannot
    end the thread with a SystemExit or a CancelledError either; what a signal's handler raises, as a KeyboardInterrupt,
    is not its own, and passed on.
    """
    try:
        return Done(result=call())
    except BaseException as error:
        if is_passed_on(error):
            raise
        logger.exception("%s of a request failed", what)
        return Failed(error=ErrorText.of(what, error))


class Logged:
    """Around a callback of the user: whatever it raises is his, and must not end the thread that called it.

    What is not of the kind that it `takes`, or comes of a signal, is passed on.
    """

    def __init__(self, name: str, *, takes: type[BaseException] = Exception) -> None:
        self._name = name
        self._takes = takes
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.failed = error is not None
        if isinstance(error, self._takes) and not is_passed_on(error):
            logger.error("callback %s raised", self._name, exc_info=error)
            return True
        return False


class Copied:
    """A copy of an object that came with a call, for one of its rows; what is set in that meanwhile is set in it, too,
    as an attribute that says to stop."""

    def __init__(self, own: Any, copy: Any) -> None:
        self._own, self.copy = own, copy
        self._known = dict(getattr(own, "__dict__", {}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in list(getattr(self._own, "__dict__", {}).items()):
            if name not in self._known or self._known[name] is not value:
                self._known[name] = value
                setattr(self.copy, name, value)
        return self.copy(*args, **kwargs)


def copied(name: str, objects: Any) -> Any:
    """A copy of each, with the models, tokenizers and signals that they hold shared.

    Raises:
        ValueError: one cannot be copied.
    """
    if not isinstance(objects, (list, tuple)):
        return objects
    held = [value for each in objects for value in getattr(each, "__dict__", {}).values()]
    shared: Mapping[int, Any] = {id(value): value for value in held if isinstance(value, SHARED)}
    try:
        copies = [copy.deepcopy(each, dict(shared)) for each in objects]
        return [
            new if new is own or has_class_of_transformers(own) else Copied(own, new)
            for own, new in zip(objects, copies, strict=True)
        ]
    except TypeError as error:
        raise ValueError(f"{name} must be objects that can be copied, for more than one row, got {error}") from error


def has_class_of_transformers(own: Any) -> bool:
    """Attributes of such objects nobody sets from outside, and they are known by their classes elsewhere."""
    return type(own).__module__.startswith("transformers.")
