"""Code that comes with a request: what it raises is that request's failure and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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

    The one place that takes any exception: nothing is known of the code, and the requests beside it have no part in it.
    """
    try:
        return Done(result=call())
    except Exception as error:
        logger.exception("%s of a request failed; the request ends with an error", what)
        return Failed(error=f"{what} failed: {type(error).__name__}: {error}")
