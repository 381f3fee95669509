"""What instructions on numbers do, for the threads of a mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.formats import UNSIGNED, Bits, decoded, encoded, numpy_type, resized, width
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.reading import Instruction, Program

# What says no more than how exact a result is.
NOISE = {"rn", "rz", "ftz", "approx", "full"}


def numbers(program: Program, instruction: Instruction) -> Step:
    """One of `arithmetic`."""
    name, *more, kind = (part for part in instruction.parts if part not in NOISE)
    if "wide" in more:
        return widened(instruction, arithmetic.OPERATIONS["mad.lo" if name == "mad" else name], kind)
    operation = arithmetic.OPERATIONS[".".join((name, *more))]
    kinds = [kind] * 3 if name not in ("shl", "shr", "bfe") else [kind, "u32", "u32"]
    target, *operands = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        given = (decoded(machine.read(each, of), of) for each, of in zip(operands, kinds, strict=False))
        machine.write(target, encoded(operation(*given), "u32" if name == "popc" else kind), mask)

    return do


def widened(instruction: Instruction, operation: Callable[..., Bits], kind: str) -> Step:
    """A product of twice as many bits, and what is added to it."""
    twice = f"{kind[0]}{16 * width(kind)}"
    target, first, second, *added = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        factors = (decoded(machine.read(each, kind), kind).astype(numpy_type(twice)) for each in (first, second))
        sums = (decoded(machine.read(each, twice), twice) for each in added)
        machine.write(target, encoded(operation(*factors, *sums), twice), mask)

    return do


def moved(program: Program, instruction: Instruction) -> Step:
    """Also of a register's parts, and of what is made of them."""
    target, given = instruction.operands
    kind = instruction.parts[-1]

    def do(machine: Machine, mask: Bits) -> None:
        if isinstance(target, tuple):
            whole = np.ascontiguousarray(np.broadcast_to(machine.read(given, kind), machine.lanes))
            pieces = whole.view(UNSIGNED[whole.dtype.itemsize // len(target)]).reshape(machine.lanes, -1)
            for n, each in enumerate(target):
                machine.write(each, np.ascontiguousarray(pieces[:, n]), mask)
        elif isinstance(given, tuple):
            part = f"b{8 * width(kind) // len(given)}"
            pieces = [resized(np.broadcast_to(machine.read(each, part), machine.lanes), width(part)) for each in given]
            machine.write(target, np.stack(pieces, 1).view(UNSIGNED[width(kind)])[:, 0], mask)
        else:
            machine.write(target, machine.read(given, kind), mask)

    return do


def compared(program: Program, instruction: Instruction) -> Step:
    how, kind = arithmetic.COMPARED[instruction.parts[1]], instruction.parts[-1]
    target, first, second = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        given = (decoded(machine.read(each, kind), kind) for each in (first, second))
        machine.write(target, how(*given), mask)

    return do


def selected(program: Program, instruction: Instruction) -> Step:
    target, first, second, condition = instruction.operands
    kind = instruction.parts[-1]

    def do(machine: Machine, mask: Bits) -> None:
        taken = machine.read(condition, "pred")
        machine.write(target, np.where(taken, machine.read(first, kind), machine.read(second, kind)), mask)

    return do


def converted(program: Program, instruction: Instruction) -> Step:
    """Of one number, of two to a pair, the second one below, or of a pair to another one."""
    to, given = instruction.parts[-2:]
    target, *operands = instruction.operands
    size = width(program.type_of(target))

    def single(machine: Machine, mask: Bits) -> None:
        number = decoded(machine.read(operands[0], given), given)
        if numpy_type(to).kind in "iu" and number.dtype.kind == "f":
            number = np.rint(number) if "rni" in instruction.parts else np.trunc(number)
        bits = encoded(number.astype(numpy_type(to)), to)
        # A signed number fills a wider register with its sign.
        if to[0] == "s" and bits.dtype.itemsize < size:
            bits = bits.view(numpy_type(to)).astype(f"i{size}").view(UNSIGNED[size])
        machine.write(target, resized(bits, size), mask)

    def pair_of_pair(machine: Machine, mask: Bits) -> None:
        both = resized(machine.read(operands[0], "b16"), 2)
        halves = [encoded(decoded(part, given[:-2]), to[:-2]) for part in (both & 0xFF, both >> 8)]
        machine.write(target, np.stack(halves, 1).view(np.uint32)[:, 0], mask)

    def pair(machine: Machine, mask: Bits) -> None:
        high, low = (np.broadcast_to(decoded(machine.read(each, given), given), machine.lanes) for each in operands)
        halves = [encoded(each, to[:-2]) for each in (low, high)]
        machine.write(target, np.stack(halves, 1).view(np.uint32)[:, 0], mask)

    if given.endswith("x2"):
        return pair_of_pair
    return pair if len(operands) == 2 else single


def of_parameter(program: Program, instruction: Instruction) -> Step:
    """Where a descriptor lies among the parameters is where it lies in memory, too."""
    target, given = instruction.operands
    return lambda machine, mask: machine.write(target, machine.read(given, "b64"), mask)
