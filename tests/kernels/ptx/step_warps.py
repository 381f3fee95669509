"""What instructions do that a warp does together, or four of them."""

from __future__ import annotations

import itertools

import numpy as np

from tests.kernels.ptx import warps
from tests.kernels.ptx.accesses import LANES, Fault
from tests.kernels.ptx.formats import Bits, decoded, encoded
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import aligned
from tests.kernels.ptx.reading import Instruction, Program
from tests.kernels.ptx.warpgroups import DEPTH, loaded


def exchanges(program: Program, instruction: Instruction) -> Step:
    both, given, by, clamp, _ = instruction.operands
    target, _, predicate = both.partition("|")
    how = instruction.parts[2]

    def do(machine: Machine, mask: Bits) -> None:
        machine.warps_of(mask, instruction)
        numbers, other, end = (
            np.broadcast_to(machine.read(each, "b32"), machine.lanes).reshape(-1, LANES) for each in (given, by, clamp)
        )
        found, there = warps.exchanged(numbers, other.astype(np.int64), end.astype(np.int64), how)
        machine.write(target, found.ravel(), mask)
        if predicate:
            machine.write(predicate, there.ravel(), mask)

    return do


def reduces(program: Program, instruction: Instruction) -> Step:
    target, given, _ = instruction.operands
    how, kind = instruction.parts[2], instruction.parts[-1]

    def do(machine: Machine, mask: Bits) -> None:
        machine.warps_of(mask, instruction)
        numbers = decoded(np.broadcast_to(machine.read(given, kind), machine.lanes), kind).reshape(-1, LANES)
        machine.write(target, encoded(warps.reduced(numbers, how).ravel(), kind), mask)

    return do


def elects(program: Program, instruction: Instruction) -> Step:
    register, predicate = instruction.operands[0].split("|")

    def do(machine: Machine, mask: Bits) -> None:
        machine.warps_of(mask, instruction)
        machine.write(predicate, machine.thread % LANES == 0, mask)
        machine.write(register, np.zeros(machine.lanes, np.uint32), mask)

    return do


def moves_matrices(program: Program, instruction: Instruction, *, store: bool) -> Step:
    first, second = instruction.operands
    registers, place = (second, first) if store else (first, second)
    transposed = "trans" in instruction.parts

    def do(machine: Machine, mask: Bits) -> None:
        here = machine.warps_of(mask, instruction)
        rows = machine.addresses(place).reshape(-1, LANES)[here][:, : 8 * len(registers)]
        aligned(rows, 16)
        lanes = np.repeat(np.flatnonzero(here) * LANES, rows.shape[1] * 8)
        at = (rows[..., None] + 2 * np.arange(8, dtype=rows.dtype)).ravel()
        shape = (int(here.sum()), len(registers), 8, 8)
        if store:
            given = np.stack([machine.read(each, "b32").reshape(-1, LANES)[here] for each in registers], 1)
            moved = warps.matrix(given)
            machine.shared.store(
                lanes, at, np.ascontiguousarray(moved.swapaxes(-1, -2) if transposed else moved).ravel()
            )
            return
        found = machine.shared.load(lanes, at, 2).reshape(shape)
        parts = warps.fragment(found.swapaxes(-1, -2) if transposed else found)
        for n, each in enumerate(registers):
            whole = np.zeros((len(here), LANES), np.uint32)
            whole[here] = parts[:, n]
            machine.write(each, whole.ravel(), mask)

    return do


def by_warp(machine: Machine, names: tuple[str, ...], here: Bits) -> list[Bits]:
    return [np.broadcast_to(machine.read(each, "b32"), machine.lanes).reshape(-1, LANES)[here] for each in names]


def give(machine: Machine, names: tuple[str, ...], registers: list[Bits], here: Bits) -> None:
    """Registers of some warps."""
    for name, bits in zip(names, registers, strict=True):
        whole = np.zeros((len(here), LANES), np.uint32)
        whole[here] = bits
        machine.write(name, whole.ravel(), np.repeat(here, LANES))


def multiplies(program: Program, instruction: Instruction) -> Step:
    if "m16n8k16" not in instruction.parts:
        raise NotImplementedError(instruction.text)
    target, left, right, added = instruction.operands
    kind = instruction.parts[-2]

    def do(machine: Machine, mask: Bits) -> None:
        here = machine.warps_of(mask, instruction)
        given = (by_warp(machine, each, here) for each in (left, right, added))
        give(machine, target, warps.multiplied(*given, kind), here)

    return do


def products(program: Program, instruction: Instruction) -> Step:
    """`wgmma`: of four warps, each of which has a fourth of the rows."""
    what = instruction.parts[1]
    if what == "fence":
        return lambda machine, mask: machine.just_written.clear()
    if what == "commit_group":
        return lambda machine, mask: machine.products.commit(groups_of(machine, mask, instruction))
    if what == "wait_group":
        newest = int(instruction.operands[0])
        return lambda machine, mask: machine.products.wait(groups_of(machine, mask, instruction), newest)
    target, left, right, added, *signs = instruction.operands
    *signs, last = signs
    kind, columns = instruction.parts[-1], int(instruction.parts[4].partition("n")[2].partition("k")[0])
    from_registers = isinstance(left, tuple)
    transposed = ("0" if from_registers else signs.pop(), last)
    if signs != ["1", "1"]:
        raise NotImplementedError(instruction.text)
    names = frozenset(target) | (frozenset(left) if from_registers else frozenset())

    def do(machine: Machine, mask: Bits) -> None:
        here = groups_of(machine, mask, instruction)
        if written := names & machine.just_written:
            raise Fault(f"a product has registers that were written since the last fence: {sorted(written)}")
        first, second, adds = (
            np.broadcast_to(machine.read(name, of), machine.lanes)[::LANES][here]
            for name, of in ((right if from_registers else left, "b64"), (right, "b64"), (added, "pred"))
        )
        lanes = np.flatnonzero(here) * LANES
        b, read = loaded(machine.shared, lanes, second, columns, kind, transposed=transposed[1] == "1")
        if from_registers:
            a = warps.rows_and_columns(by_warp(machine, left, here), kind).astype(np.float32)
        else:
            whole, more = loaded(machine.shared, lanes, first, 64, kind, transposed=transposed[0] == "1")
            read += more
            quarter = machine.thread[lanes] // LANES % 4
            a = whole.reshape(-1, 4, 16, DEPTH)[np.arange(len(quarter)), quarter]
        sums = warps.sums(by_warp(machine, target, here))
        result = np.where(adds[:, None, None], sums, 0) + a @ b.transpose(0, 2, 1)
        give(machine, target, warps.sums_apart(result), here)
        machine.just_written -= names
        fours = lanes.reshape(-1, 4)

        def ended(due: Bits) -> None:
            for place, four in zip(read, itertools.cycle(fours)):
                if len(own := four[due[four // LANES]]):
                    machine.shared.multiplied(own, place)

        machine.products.begin(here, ended, names)

    return do


def groups_of(machine: Machine, mask: Bits, instruction: Instruction) -> Bits:
    """[warps]: those that do what four of them do together."""
    here = machine.warps_of(mask, instruction)
    groups = here.reshape(-1, 4)
    if (groups.any(1) != groups.all(1)).any():
        raise Fault(f"only some of four warps come to {instruction.text}")
    return here
