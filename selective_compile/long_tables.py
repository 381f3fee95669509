"""Tables that a call makes for as many tokens as it has, as rotary embeddings of older models do: made once, for as
many as the model declares.

    if self.max_seq_len_cached is None or seq_len > self.max_seq_len_cached:
        self.max_seq_len_cached, self.cos_cached = seq_len, cosines(seq_len)
    return self.cos_cached[:seq_len]

The number of tokens is given to the module that makes them, or read off a tensor that it is given, as by the rotary
embeddings of flash-attn.  A trace of such a forward would have to leave tables in the model.  A call that has so many
tokens leaves nothing to be made in later ones; it is enough to call those modules so.  Declines where a table's first
rows depend on its length, as they do where frequencies are stretched for long requests, and where a module leaves
anything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.first_call import left_by_call, same
from selective_compile.model_call import CANNOT
from selective_compile.model_facts import declared_positions
from selective_compile.module_state import Place, attributes, lock_of, own_attributes, put, same_buffers

FEWEST = 2  # tokens of the calls that are compared: so many, and one more
LARGEST = 2**28  # bytes of tables, all modules together
Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def made_long(model: nn.Module, fewest: int = FEWEST) -> bool:
    """Gives ``model`` such tables for all positions that it declares, as a call with so many tokens would; whether
    there are any.

    ``fewest``: tokens that are more than there is a table for, as there is for those of a call before.
    """
    longest = declared_positions(model)
    if longest is None or longest <= FEWEST + 1:
        return False
    if fewest > FEWEST and not has_tables(model, fewest):
        return False
    fewest = min(fewest, longest - 2)  # so that both of these calls have fewer than there are positions
    try:
        with lock_of(model), same_buffers(model):
            found = long_tables(model, (fewest, fewest + 1), longest)
            own = attributes(model.modules())
            put({**own, **found}, own)
            return bool(found)
    except CANNOT:  # the model, or a module of it, cannot be called so
        return False


def has_tables(model: nn.Module, longest: int) -> bool:
    """Whether a module has a number of up to ``longest`` and a tensor that is as long, as after a call."""
    for module in model.modules():
        own = attributes([module]).values()
        numbers = {value for value in own if type(value) is int and FEWEST < value <= longest}
        if any(size in numbers for value in own if isinstance(value, Tensor) for size in value.shape):
            return True
    return False


def long_tables(model: nn.Module, counts: tuple[int, int], longest: int) -> dict[Place, Any]:
    """By place, what there is to be; equal tables of several modules are one.  Empty where a module declines."""
    left, calls = [], []
    for count in counts:
        with watched(model) as called:
            left.append(left_by_call(model, count))
        calls.append(called)
    found: dict[Place, Any] = {}
    tables: list[Tensor] = []
    for module in makers(left, counts):
        one, other = (each[module] for each in calls)
        of = int if has_number(one, counts[0]) else Tensor  # which takes no memory, where it is told
        args, kwargs = lengthened(one, other, counts, longest, of)
        buffers = [place for place in attributes([module]) if place[1] == "buffer"]
        with own_attributes(module, {}, buffers) as long:
            module(*args, **kwargs)
        for place in {place for each in left for place in each if place[0] is module}:
            short = zip(counts, left, strict=True)
            if not all(begins(long.get(place), each.get(place), count, longest) for count, each in short):
                return {}
            found[place] = shared(long[place], tables)
    return found if sum(table.nbytes for table in tables) <= LARGEST else {}


def makers(left: list[dict[Place, Any]], counts: tuple[int, int]) -> list[nn.Module]:
    """The modules that each of the calls has left its number of tokens in."""
    places = [
        place
        for place in left[0]
        if all(type(each.get(place)) is int and each[place] == count for each, count in zip(left, counts, strict=True))
    ]
    return list(dict.fromkeys(module for module, _, _ in places))


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[nn.Module, Call]]:
    """By module, what it is first called with, within."""
    found: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(module, (args, kwargs))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield found


def lengthened(given: Any, other: Any, counts: tuple[int, int], longest: int, of: type = int) -> Any:
    """``given`` with ``longest`` for each number, or each size of a tensor, that is the first of ``counts`` in it and
    the second in ``other``; such a tensor is of zeros.  ``of``: int, or Tensor."""
    if isinstance(given, dict):
        return {name: lengthened(value, other[name], counts, longest, of) for name, value in given.items()}
    if isinstance(given, tuple):
        parts = zip(given, other, strict=True)
        return tuple(lengthened(one, another, counts, longest, of) for one, another in parts)
    if of is int or not isinstance(given, Tensor) or given.shape == other.shape:
        return longest if type(given) is of is int and (given, other) == counts else given
    sizes = [longest if pair == counts else pair[0] for pair in zip(given.shape, other.shape, strict=True)]
    if math.prod(sizes) * given.element_size() > LARGEST:
        raise ValueError(f"a call must not be given more than {LARGEST} bytes")
    return given.new_zeros(sizes)


def has_number(given: Any, count: int) -> bool:
    if isinstance(given, (dict, tuple)):
        return any(has_number(each, count) for each in (given.values() if isinstance(given, dict) else given))
    return type(given) is int and given == count


def begins(long: Any, short: Any, count: int, longest: int) -> bool:
    """Whether ``short``, left by ``count`` tokens, is how ``long`` begins, in one dimension, or is as long as it."""
    if type(short) is int:
        return short == count and long == longest
    if not isinstance(long, Tensor) or not isinstance(short, Tensor) or long.dim() != short.dim():
        return same(long, short)
    grown = [dim for dim in range(long.dim()) if long.shape[dim] != short.shape[dim]]
    if len(grown) != 1:
        return same(long, short)
    sizes = short.shape[grown[0]], long.shape[grown[0]]
    return sizes == (count, longest) and same(long.narrow(grown[0], 0, count), short)


def shared(value: Any, tables: list[Tensor]) -> Any:
    """``value``, or what is the same among ``tables``, which has it then."""
    if not isinstance(value, Tensor):
        return value
    for table in tables:
        if same(table, value):
            return table
    tables.append(value)
    return value
