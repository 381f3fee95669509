"""The calls of a compiled step, made one after the other in native code: see `native_calls`."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from selective_compile.call_values import Pointer, Size, Storage
from selective_compile.kernels.call_sequence_cpu import THREW, make_calls
from selective_compile.kernels.statuses import REFUSALS
from selective_compile.native_calls import NativeCalls, Value
from selective_compile.tensor_state import States

ALIGNED = 64
KEPT = 2**20  # bytes of a block that is kept in any case; blocks are multiples of it


class CallSequence:
    """The calls of a step as a function of its arguments.

    Memory between the calls is a block for each step that runs at the moment, kept for the next one if it is not much
    larger than what a step needs. What no call needs any more has its place taken by what a later one writes.

    Bases of addresses are, in this order: 0, the arguments, the slots of the block, the result.
    """

    def __init__(self, calls: NativeCalls, *, num_arguments: int, num_weights: int) -> None:
        """``num_weights`` of the arguments, the first, are the same tensors as long as their states are."""
        self._calls = calls
        self._num_weights = num_weights
        slots = _slots(calls)
        self._slot_sizes = slots.sizes
        bases = {storage: 1 + num_arguments + slot for storage, slot in slots.of.items()}
        bases[calls.output.storage] = 1 + num_arguments + len(slots.sizes)
        code = array("q")
        for call in calls.calls:
            code.extend((call.function, call.packed, call.checked, len(call.arguments)))
            for argument in call.arguments:
                code.extend(_encoded(argument, bases))
        self._code = code
        self._blocks: list[Tensor] = []  # not in use: steps of several engines may run at once
        self._weights: tuple[States | None, array[int]] = (None, array("q"))

    def __call__(self, arguments: Sequence[Tensor], seen: States) -> Tensor:
        """
        Args:
            arguments: with the dtypes and strides of those that the calls were found for, and sizes that fit together;
                this is not looked at.
            seen: the states of the weights; the same object as long as none changes.

        Raises:
            ValueError: the step's metadata point outside of the tensors.
            RuntimeError: generated code has thrown.
        """
        sizes = [arguments[place].shape[dim] for place, dim in self._calls.sizes]
        symbols = array("q", [torch.get_num_threads(), *sizes])
        of, weights = self._weights
        if of is not seen:
            weights = array("q", [0, *[weight.data_ptr() for weight in arguments[: self._num_weights]]])
            self._weights = seen, weights
        shape = [_number(size, symbols) for size in self._calls.output.shape]
        output = torch.empty(shape, dtype=self._calls.output.dtype, device="cpu")
        starts = list(accumulate([_aligned(_number(size, symbols)) for size in self._slot_sizes], initial=0))
        num_bytes = starts.pop() + ALIGNED
        block = self._block(num_bytes)
        first = _aligned(block.data_ptr())
        bases = array("q", weights)
        bases.extend([each.data_ptr() for each in arguments[self._num_weights :]])
        bases.extend([first + start for start in starts])
        bases.append(output.data_ptr())
        status = make_calls(self._code, len(self._calls.calls), bases, symbols)
        if block.numel() <= max(KEPT, 4 * num_bytes):
            self._blocks.append(block)
        if status == THREW:
            raise RuntimeError("a kernel of the step has thrown: indices must be within bounds")
        if status:
            raise ValueError(REFUSALS[status])
        return output

    def _block(self, num_bytes: int) -> Tensor:
        with contextlib.suppress(IndexError):  # all are in use
            block = self._blocks.pop()
            if block.numel() >= num_bytes:
                return block
            del block  # before there is another one
        return torch.empty(-(-num_bytes // KEPT) * KEPT, dtype=torch.uint8, device="cpu")


class _Slots:
    def __init__(self) -> None:
        self.of: dict[Storage, int] = {}
        self.sizes: list[int | Size] = []


def _slots(calls: NativeCalls) -> _Slots:
    """A place in the block for each storage that is neither an argument nor the result; those that are never needed at
    once may share one."""
    last = {
        argument.storage: number
        for number, call in enumerate(calls.calls)
        for argument in call.arguments
        if isinstance(argument, Pointer)
    }
    found, free = _Slots(), list[int]()
    for number, call in enumerate(calls.calls):
        used = [each.storage for each in call.arguments if isinstance(each, Pointer)]
        own = [each for each in dict.fromkeys(used) if each.argument < 0 and each is not calls.output.storage]
        for storage in own:
            if storage not in found.of:
                found.of[storage] = _taken(found, free, storage.num_bytes)
        free += [found.of[storage] for storage in own if last[storage] == number]
    return found


def _taken(found: _Slots, free: list[int], size: int | Size | None) -> int:
    assert size is not None, "an argument has no slot"
    for slot in free:
        if _covers(found.sizes[slot], size):
            free.remove(slot)
            return slot
    found.sizes.append(size)
    return len(found.sizes) - 1


def _covers(one: int | Size, other: int | Size) -> bool:
    one, other = (each if isinstance(each, Size) else Size(each, ()) for each in (one, other))
    return one.covers(other)


def _encoded(value: Value, bases: dict[Storage, int]) -> list[int]:
    """As call_sequence_cpu.cpp reads it."""
    base = 0
    if isinstance(value, Pointer):
        storage = value.storage
        base = bases[storage] if storage.argument < 0 else 1 + storage.argument
        value = value.offset
    if isinstance(value, int):
        return [base, value, 0]
    return [base, value.constant, len(value.terms), *[number for term in value.terms for number in term]]


def _number(size: int | Size, symbols: Sequence[int]) -> int:
    return size if isinstance(size, int) else size.at(symbols)


def _aligned(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED
