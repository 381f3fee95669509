"""What instructions do that read and write memory and parameters, or say in which order."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.formats import UNSIGNED, Bits, numpy_type, resized, width
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import aligned
from tests.kernels.ptx.reading import Instruction, Program


def loads(program: Program, instruction: Instruction) -> Step:
    target, place = instruction.operands
    targets = target if isinstance(target, tuple) else (target,)
    kind, space = instruction.parts[-1], instruction.parts[1].partition("::")[0]
    size = width(kind)

    def extended(bits: Bits, name: str) -> Bits:
        wanted = width(program.type_of(name))
        if kind[0] == "s":
            return bits.view(numpy_type(kind)).astype(f"i{wanted}").view(UNSIGNED[wanted])
        return resized(bits, wanted)

    def of_parameter(machine: Machine, mask: Bits) -> None:
        given = machine.parameters[place.base][place.offset : place.offset + size]
        machine.write(target, extended(np.frombuffer(given, UNSIGNED[size]), target), mask)

    def of_memory(machine: Machine, mask: Bits) -> None:
        addresses = machine.addresses(place)[mask]
        aligned(addresses, size * len(targets))
        for n, each in enumerate(targets):
            at = addresses + addresses.dtype.type(n * size)
            if space == "shared":
                bits = machine.shared.load(machine.program_of[mask], at, size)
            else:
                bits = machine.memory.load(at, size)
            whole = np.zeros(machine.lanes, UNSIGNED[size])
            whole[mask] = bits
            machine.write(each, extended(whole, each), mask)

    return of_parameter if space == "param" else of_memory


def stores(program: Program, instruction: Instruction) -> Step:
    place, given = instruction.operands
    values = given if isinstance(given, tuple) else (given,)
    kind, space = instruction.parts[-1], instruction.parts[1].partition("::")[0]
    size = width(kind)

    def do(machine: Machine, mask: Bits) -> None:
        addresses = machine.addresses(place)[mask]
        aligned(addresses, size * len(values))
        for n, each in enumerate(values):
            bits = resized(np.broadcast_to(machine.read(each, kind), machine.lanes)[mask], size)
            at = addresses + addresses.dtype.type(n * size)
            if space == "shared":
                machine.shared.store(machine.program_of[mask], at, bits)
            else:
                machine.memory.store(at, bits)

    return do


def fences(program: Program, instruction: Instruction) -> Step:
    """What the threads of it have written is seen by all that runs beside them."""

    def do(machine: Machine, mask: Bits) -> None:
        fresh = machine.shared.fresh.reshape(machine.programs, -1)
        fresh[np.unique(machine.program_of[mask])] = False

    return do
