"""Code that is not ours: what comes with a request fails that request alone, and a callback of the user only itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from selective_compile.runtime.state_guard import is_passed_on

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


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
        return Failed(error=f"{what} failed: {type(error).__name__}: {error}")


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


def copied(name: str, objects: Any) -> Any:
    """A copy of each, with the models and tokenizers that they hold shared.

    Raises:
        ValueError: one cannot be copied.
    """
    if not isinstance(objects, (list, tuple)):
        return objects
    held = [value for each in objects for value in getattr(each, "__dict__", {}).values()]
    shared: Mapping[int, Any] = {
        id(value): value for value in held if isinstance(value, (nn.Module, PreTrainedTokenizerBase))
    }
    try:
        return [copy.deepcopy(each, dict(shared)) for each in objects]
    except TypeError as error:
        raise ValueError(f"{name} must be objects that can be copied, for more than one row, got {error}") from error
