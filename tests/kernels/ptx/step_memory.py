"""What instructions do that read and write memory and parameters, or say in which order."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.formats import UNSIGNED, Bits, numpy_type, resized, width
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import Memory, aligned
from tests.kernels.ptx.reading import Address, Instruction, Program
from tests.kernels.ptx.shared import Shared


def loads(program: Program, instruction: Instruction) -> Step:
    target, place = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    kind = instruction.parts[-1]
    size = width(kind)

    def extended(bits: Bits, name: str) -> Bits:
        wanted = width(program.type_of(name))
        if kind[0] == "s":
            return bits.view(numpy_type(kind)).astype(f"i{wanted}").view(UNSIGNED[wanted])
        return resized(bits, wanted)

    def of_parameter(machine: Machine, mask: Bits) -> None:
        given = machine.parameters[place.base][place.offset : place.offset + size]
        machine.write(target, extended(np.frombuffer(given, UNSIGNED[size]), target), mask)

    how = {"past_cache": True} if "cg" in instruction.parts else {}

    def of_memory(machine: Machine, mask: Bits) -> None:
        memory, lanes, addresses = reached(machine, mask, instruction, place, size * len(targets))
        for n, each in enumerate(targets):
            at = addresses + addresses.dtype.type(n * size)
            whole = np.zeros(machine.lanes, UNSIGNED[size])
            whole[mask] = memory.load(lanes, at, size, **how)
            machine.write(each, extended(whole, each), mask)

    return of_parameter if instruction.parts[1] == "param" else of_memory


def stores(program: Program, instruction: Instruction) -> Step:
    place, given = instruction.operands
    values = given if isinstance(given, tuple) else (given,)
    kind = instruction.parts[-1]
    size = width(kind)

    def do(machine: Machine, mask: Bits) -> None:
        memory, lanes, addresses = reached(machine, mask, instruction, place, size * len(values))
        for n, each in enumerate(values):
            bits = resized(np.broadcast_to(machine.read(each, kind), machine.lanes)[mask], size)
            memory.store(lanes, addresses + addresses.dtype.type(n * size), bits)

    return do


def reached(
    machine: Machine, mask: Bits, instruction: Instruction, place: Address, count: int
) -> tuple[Shared | Memory, Bits, Bits]:
    """The memory that threads reach, which they are, and where each of them reaches ``count`` bytes."""
    lanes, addresses = np.flatnonzero(mask), machine.addresses(place)[mask]
    aligned(addresses, count)
    of_program = instruction.parts[1].startswith("shared")
    return machine.shared if of_program else machine.memory, lanes, addresses


def fences(program: Program, instruction: Instruction) -> Step:
    """Of a fence of one thread alone, what that knows from others counts no more than what it has written: not here."""
    if instruction.parts != ("fence", "proxy", "async", "shared::cta"):
        raise NotImplementedError(instruction.text)
    return lambda machine, mask: machine.shared.fence(np.flatnonzero(mask))
