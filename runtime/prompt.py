"""Checks on what a user submits, before anything of it is kept."""

from __future__ import annotations

import math
import operator
import sys
from array import array
from collections.abc import Iterable, Mapping, Set
from typing import Any

from selective_compile.options import integer_of
from selective_compile.runtime.request_state import RequestId, Terms


def token_ids(prompt_ids: Any, vocab_size: int, *, least: int = 1, name: str = "prompt_ids") -> array[int]:
    """The prompt as 64-bit integers.

    Args:
        prompt_ids: one request's token ids: a sequence, an array or a tensor of one dimension.
        vocab_size: V, the ids are 0 .. V - 1.
        least: how many there must be.
        name: what they are called where they were given.

    Raises:
        ValueError: it is empty, not one-dimensional, or holds something else than token ids.
    """
    if getattr(prompt_ids, "is_meta", False):
        raise ValueError(f"{name} must hold token ids, got a tensor on the device meta")
    # Arrays and tensors become Python numbers in one go rather than element by element.
    items = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    if isinstance(items, (str, bytes, Mapping, Set)) or not isinstance(items, Iterable):
        raise ValueError(f"{name} must be a sequence of token ids, got {_described(prompt_ids)}")
    ids = array("q", (_token_id(item, vocab_size, name) for item in items))
    if len(ids) < least:
        raise ValueError(f"{name} must hold at least one token id, got none")
    return ids


def _described(given: Any) -> str:
    """What tokenizers return holds the ids."""
    if isinstance(given, Mapping) and "input_ids" in given:
        return f"a {type(given).__name__}, of which its 'input_ids' are those"
    return repr(given)


def _token_id(item: Any, vocab_size: int, name: str) -> int:
    try:
        token = None if isinstance(item, bool) else operator.index(item)
    except (TypeError, RuntimeError):  # the latter of a tensor that holds no values
        token = None
    if token is None:
        batch = isinstance(item, (list, tuple))
        got = f"{len(item)} ids in one place, as in a batch: give one of its rows" if batch else f"{item!r} among them"
        raise ValueError(f"{name} must be integers in one dimension, got {got}")
    if not 0 <= token < vocab_size:
        raise ValueError(f"{name} must be at least 0 and less than the vocabulary size {vocab_size}, got {token}")
    return token


def check_request_id(request_id: Any) -> RequestId:
    """The id itself, if it is one; an integer of whatever kind as Python has it.

    Raises:
        ValueError: it is neither a string nor an integer, or a huge one.
    """
    return _name("request_id", request_id, "a string or an integer")


def _name(name: str, value: Any, kinds: str) -> RequestId:
    found = value if isinstance(value, str) else integer_of(value)
    if found is None:
        raise ValueError(f"{name} must be {kinds}, got {value!r}")
    if isinstance(found, int) and found.bit_length() > NAME_BITS:
        raise ValueError(f"{name} must be of at most {NAME_BITS} bits, got one of {found.bit_length()}")
    return found


# A rank is a float, which holds all integers of so many bits.
PRIORITY_BITS = 53
# Of integers that name requests and users: a UUID has half as many, and Python writes out a number of that size.
NAME_BITS = 256


def check_terms(*, arrival: float, priority: Any, deadline: Any, user: Any, cache_salt: Any) -> Terms:
    """The terms of a request, with its deadline counted from its arrival turned into a moment.

    Raises:
        ValueError: a value outside of what it must be.
    """
    rank = integer_of(priority)
    if rank is None:
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if rank.bit_length() > PRIORITY_BITS:
        raise ValueError(f"priority must be of at most {PRIORITY_BITS} bits, got one of {rank.bit_length()}")
    whole = integer_of(deadline)
    deadline = deadline if whole is None else whole
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float))):
        raise ValueError(f"deadline must be a number of seconds or None, got {deadline!r}")
    if isinstance(deadline, int) and deadline > sys.float_info.max:
        raise ValueError(f"deadline must be a number that a float can hold, got one of {deadline.bit_length()} bits")
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline must be more than 0 seconds from now, got {deadline!r}")
    if user is not None:
        user = _name("user", user, "a string, an integer or None")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt must be a string or None, got {cache_salt!r}")
    moment = math.inf if deadline is None else arrival + deadline
    return Terms(arrival=arrival, priority=rank, deadline=moment, user=user, cache_salt=cache_salt)


def check_length(prompt_length: int, max_new_tokens: int, *, max_positions: int | None, pool_tokens: int) -> None:
    """Refuse a request that the model's positions or the whole pool would not be enough for.

    The last new token is not computed with, so it takes no position and no slot.

    Raises:
        ValueError: the prompt, or the prompt and what may be generated, is too long.
    """
    what, limit = "block pool", pool_tokens
    if max_positions is not None and max_positions <= pool_tokens:
        what, limit = "model's positions", max_positions
    if prompt_length > limit:
        raise ValueError(f"prompt_ids must be at most {limit} tokens for the {what}, got {prompt_length}")
    if prompt_length + max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - prompt_length + 1} for the {what} of {limit}, "
            f"after {prompt_length} of prompt, got {max_new_tokens}"
        )
