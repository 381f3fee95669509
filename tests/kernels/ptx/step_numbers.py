"""What instructions on numbers do, for the threads of a mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.formats import UNSIGNED, Bits, decoded, encoded, numpy_type, resized, width
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.reading import Instruction, Program

# What says no more than that a result is rounded to the nearest, or may be less exact.
NOISE = {"rn", "approx", "full"}
COUNTED = {"shl": 1, "shr": 1, "bfe": 1, "bfi": 2}  # operands in front of those that count bits
ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def numbers(program: Program, instruction: Instruction) -> Step:
    """One of `arithmetic`."""
    name, *more, kind = (part for part in instruction.parts if part not in NOISE)
    if "wide" in more:
        return widened(instruction, arithmetic.OPERATIONS["mad.lo" if name == "mad" else name], kind)
    flushes = "ftz" in more
    operation = arithmetic.OPERATIONS[".".join((name, *(part for part in more if part != "ftz")))]
    if flushes:
        operation = arithmetic.without_subnormals(operation)
    if kind.endswith("x2"):
        return pairwise(instruction, operation, kind.removesuffix("x2"))
    if name in ("bfe", "bfi") and width(kind) != 4:
        raise NotImplementedError(instruction.text)
    target, *operands = instruction.operands
    alike = COUNTED.get(name, len(operands))
    kinds = [kind] * alike + ["u32"] * (len(operands) - alike)

    def do(machine: Machine, mask: Bits) -> None:
        given = (decoded(machine.read(each, of), of) for each, of in zip(operands, kinds, strict=False))
        machine.write(target, encoded(operation(*given), "u32" if name == "popc" else kind), mask)

    return do


def pairwise(instruction: Instruction, operation: Callable[..., Bits], kind: str) -> Step:
    """Of the two halves of 32 bits."""
    target, *operands = instruction.operands
    if width(kind) != 2:
        raise NotImplementedError(instruction.text)

    def do(machine: Machine, mask: Bits) -> None:
        wholes = (np.ascontiguousarray(np.broadcast_to(machine.read(n, "b32"), machine.lanes)) for n in operands)
        halves = [whole.view(np.uint16).reshape(-1, 2) for whole in wholes]
        results = [encoded(operation(*(decoded(half[:, n].copy(), kind) for half in halves)), kind) for n in (0, 1)]
        machine.write(target, np.stack(results, 1).view(np.uint32)[:, 0], mask)

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
            if given not in machine.just_written:  # the registers are one, if it can be
                machine.just_written.discard(target)

    return do


def compared(program: Program, instruction: Instruction) -> Step:
    _, name, kind = instruction.parts
    how = arithmetic.COMPARED[name]
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
    *how, to, given = instruction.parts[1:]
    target, *operands = instruction.operands
    size = width(program.type_of(target))
    rounding = next((ROUNDED[part] for part in how if part in ROUNDED), None)
    if set(how) - {"rn", *ROUNDED} or to.startswith("e4m3"):
        raise NotImplementedError(instruction.text)

    def single(machine: Machine, mask: Bits) -> None:
        number = decoded(machine.read(operands[0], given), given)
        if rounding is not None:
            number = rounding(number)
        if numpy_type(to).kind in "iu" and number.dtype.kind == "f":
            number = arithmetic.whole(number, numpy_type(to))
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
