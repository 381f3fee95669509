"""Copies to shared memory that go on beside threads, and the barriers there which count what has come.

Source: PTX ISA, "cp.async", "cp.async.bulk.tensor", "mbarrier" and "Tensor Swizzling Modes".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.kernels.ptx.formats import UNSIGNED, Bits
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import Fault, Memory
from tests.kernels.ptx.reading import Address, Instruction, Program
from tests.kernels.ptx.under_way import Barrier
from tests.kernels.ptx.warpgroups import swizzled


@dataclass(frozen=True)
class Tiles:
    """A tensor as tiles that are copied at once; sizes, strides and those of a tile from the outermost on, in elements.

    ``row``: bytes of a row of the swizzle, 16 without one.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]
    element: int
    row: int

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.tile)) * self.element

    def read(self, memory: Memory, begin: tuple[int, ...]) -> Bits:
        """The elements of a tile, 0 where the tensor ends before it."""
        at = [first + np.arange(count) for first, count in zip(begin, self.tile, strict=True)]
        grid = np.meshgrid(*at, indexing="ij")
        inside = np.logical_and.reduce([(n >= 0) & (n < size) for n, size in zip(grid, self.shape, strict=True)])
        places = sum(n * stride for n, stride in zip(grid, self.strides, strict=True))
        found = np.zeros(self.tile, UNSIGNED[self.element])
        addresses = (self.address + places[inside] * self.element).astype(np.uint64)
        found[inside] = memory.load(addresses, self.element)
        return found.ravel()


def copies(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts[:3] == ("cp", "async", "commit_group"):
        return lambda machine, mask: machine.copies.commit(mask)
    if parts[:3] == ("cp", "async", "wait_group"):
        return lambda machine, mask: machine.copies.wait(mask, int(instruction.operands[0]))
    return tile_copies(instruction) if "bulk" in parts else small_copies(instruction)


def small_copies(instruction: Instruction) -> Step:
    """Of 4, 8 or 16 bytes for each thread; what is not read of them is 0."""
    to, source, text, *given = instruction.operands
    size = int(text, 0)

    def work(machine: Machine, places: Bits, sources: Bits, counts: Bits, here: Bits) -> None:
        unit = 4
        for n in range(0, size, unit):
            read = here & (counts > n)
            numbers = np.zeros(machine.lanes, np.uint32)
            numbers[read] = machine.memory.load(sources[read] + np.uint64(n), unit)
            at = places[here] + np.uint32(n)
            machine.shared.store(machine.program_of[here], at, numbers[here])

    def do(machine: Machine, mask: Bits) -> None:
        counts = np.broadcast_to(machine.read(given[0], "u32") if given else np.uint32(size), machine.lanes)
        places, sources = machine.addresses(to), machine.addresses(source)
        if (places[mask] % size).any() or (sources[mask & (counts > 0)] % size).any():
            raise Fault(f"what is copied as {size} bytes does not begin at a multiple of them: {instruction.text}")
        machine.copies.begin(mask, partial(work, machine, places, sources, counts))

    return do


def tile_copies(instruction: Instruction) -> Step:
    """Of a tile, by one thread."""
    to, source, barrier = instruction.operands

    def copy(machine: Machine, program: int, place: int, tiles: Tiles, begin: tuple[int, ...]) -> int:
        numbers = tiles.read(machine.memory, begin)
        if place % max(128, 8 * tiles.row if tiles.row > 16 else 128):
            raise Fault("a tile is copied to where its pattern does not begin")
        places = swizzled(place + np.arange(len(numbers)) * tiles.element, tiles.row).astype(np.uint32)
        machine.shared.store(np.full(len(numbers), program), places, numbers, fenced=True)
        return tiles.num_bytes

    def do(machine: Machine, mask: Bits) -> None:
        places, barriers = machine.addresses(to), machine.addresses(barrier)
        described = np.broadcast_to(machine.read(source.base, "u64"), machine.lanes)
        begins = [np.broadcast_to(machine.read(each, "s32"), machine.lanes) for each in reversed(source.coordinates)]
        for lane in np.flatnonzero(mask):
            program = int(machine.program_of[lane])
            begin = tuple(int(each[lane].astype(np.int32)) for each in begins)
            start = partial(copy, machine, program, int(places[lane]), machine.tiles[int(described[lane])], begin)
            counted = barrier_at(machine, program, int(barriers[lane]))
            if machine.order.copies_early:
                counted.came(start())
            else:
                counted.copies.append(start)

    return do


def barriers(program: Program, instruction: Instruction) -> Step:
    return {"init": begins, "inval": ends, "arrive": arrives, "try_wait": asks}[instruction.parts[1]](instruction)


def begins(instruction: Instruction) -> Step:
    place, count = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        for lane, address in lanes_and_addresses(machine, mask, place):
            machine.barriers[machine.program_of[lane]][address] = Barrier(int(count), int(count))

    return do


def ends(instruction: Instruction) -> Step:
    (place,) = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        for lane, address in lanes_and_addresses(machine, mask, place):
            if barrier_at(machine, machine.program_of[lane], address).copies:
                raise Fault("a barrier ends before the copies that it counts")
            del machine.barriers[machine.program_of[lane]][address]

    return do


def arrives(instruction: Instruction) -> Step:
    *_, place, count = instruction.operands
    if instruction.parts[2] != "expect_tx":
        raise NotImplementedError(instruction.text)

    def do(machine: Machine, mask: Bits) -> None:
        counts = np.broadcast_to(machine.read(count, "u32"), machine.lanes)
        for lane, address in lanes_and_addresses(machine, mask, place):
            barrier_at(machine, machine.program_of[lane], address).arrive(int(counts[lane]))

    return do


def asks(instruction: Instruction) -> Step:
    """Whether a phase is over; whoever asks in vain has the others go on first."""
    target, place, parity = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        parities = np.broadcast_to(machine.read(parity, "u32"), machine.lanes)
        over = np.zeros(machine.lanes, bool)
        for lane, address in lanes_and_addresses(machine, mask, place):
            barrier = barrier_at(machine, machine.program_of[lane], address)
            if barrier.phase % 2 == parities[lane]:
                barrier.finish_copies()
            over[lane] = barrier.phase % 2 != parities[lane]
        machine.write(target, over, mask)
        machine.stuck |= mask & ~over
        machine.in_vain = 0 if over.any() else machine.in_vain

    return do


def barrier_at(machine: Machine, program: int, address: int) -> Barrier:
    found = machine.barriers[program].get(address)
    if found is None:
        raise Fault("a barrier is used before it begins, or behind its end")
    return found


def lanes_and_addresses(machine: Machine, mask: Bits, place: Address):
    lanes = np.flatnonzero(mask)
    return zip(lanes.tolist(), machine.addresses(place)[lanes].tolist(), strict=True)
