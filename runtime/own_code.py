"""Code that comes with a request: what it raises is that request's failure and nobody else's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

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
