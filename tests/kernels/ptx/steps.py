"""What each instruction does: functions of a machine and of the threads that do it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.kernels.ptx import copies, step_memory, step_numbers, step_warps
from tests.kernels.ptx.accesses import LANES, Fault
from tests.kernels.ptx.formats import Bits
from tests.kernels.ptx.machine import RETURNED, Machine, Step
from tests.kernels.ptx.reading import Instruction, Program

NAN = np.uint32(0x7FFFFFFF)


def steps_of(program: Program) -> list[list[Step]]:
    return [[step(program, each) for each in block] for block in program.blocks]


def step(program: Program, instruction: Instruction) -> Step:
    """An instruction with its guard; of registers of products under way nothing is to be written or, but to be thrown
    away, read.

    Raises:
        NotImplementedError: it is not known here.
    """
    make = MAKERS.get(instruction.parts[0], step_numbers.numbers)
    try:
        act = make(program, instruction)
    except (KeyError, ValueError, IndexError) as error:
        raise NotImplementedError(instruction.text) from error
    guard, unless, names = instruction.guard, instruction.unless, instruction.names
    product = instruction.parts[0] == "wgmma"

    def do(machine: Machine, mask: Bits) -> None:
        if guard:
            chosen = machine.read(guard, "pred")
            mask = mask & (~chosen if unless else chosen)
            if not mask.any():
                return
        if product or not machine.products.begun:
            act(machine, mask)
        else:
            beside_products(machine, mask, names, act)

    return do


def beside_products(machine: Machine, mask: Bits, names: frozenset[str], act: Step) -> None:
    """What they add to reads as NaN, as do the rows that they multiply; both are as before when ``act`` returns."""
    under_way = names & machine.products.names(mask.reshape(-1, LANES).any(1))
    kept = {name: machine.read(name, "b32") for name in under_way}
    hidden = {name: np.where(mask, NAN, bits) for name, bits in kept.items()}
    machine.registers |= hidden
    act(machine, mask)
    if any(machine.registers[name] is not bits for name, bits in hidden.items()):
        raise Fault(f"a register of a product under way is written, one of {sorted(kept)}")
    machine.registers |= kept


def branches(program: Program, instruction: Instruction) -> Step:
    to = program.labels[instruction.operands[0]]

    def do(machine: Machine, mask: Bits) -> None:
        machine.place[mask] = to

    return do


def returns(program: Program, instruction: Instruction) -> Step:
    def do(machine: Machine, mask: Bits) -> None:
        machine.place[mask] = RETURNED

    return do


def waits_for_all(program: Program, instruction: Instruction) -> Step:
    if instruction.parts[1] == "warp":  # whose threads go on together
        return nothing(program, instruction)
    if len(instruction.operands) != 1:
        raise NotImplementedError(instruction.text)
    number = int(instruction.operands[0])

    def do(machine: Machine, mask: Bits) -> None:
        machine.waits[mask] = number

    return do


def nothing(program: Program, instruction: Instruction) -> Step:
    return lambda machine, mask: None


def waits_for_kernels(program: Program, instruction: Instruction) -> Step:
    if instruction.parts[1] != "wait":
        return nothing(program, instruction)

    def do(machine: Machine, mask: Bits) -> None:
        machine.memory.ahead[mask] = False

    return do


MAKERS: dict[str, Callable[[Program, Instruction], Step]] = {
    "mov": step_numbers.moved,
    "setp": step_numbers.compared,
    "selp": step_numbers.selected,
    "cvt": step_numbers.converted,
    "cvta": step_numbers.of_parameter,
    "ld": step_memory.loads,
    "st": step_memory.stores,
    "fence": step_memory.fences,
    "cp": copies.copies,
    "mbarrier": copies.barriers,
    "shfl": step_warps.exchanges,
    "redux": step_warps.reduces,
    "elect": step_warps.elects,
    "ldmatrix": partial(step_warps.moves_matrices, store=False),
    "stmatrix": partial(step_warps.moves_matrices, store=True),
    "mma": step_warps.multiplies,
    "wgmma": step_warps.products,
    "bra": branches,
    "ret": returns,
    "bar": waits_for_all,
    "barrier": waits_for_all,
    "griddepcontrol": waits_for_kernels,
}
