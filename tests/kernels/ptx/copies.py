"""Copies to shared memory that go on beside threads, and the barriers there which count what has come.

Source: PTX ISA, "cp.async", "cp.async.bulk.tensor", "cp.async.bulk.prefetch", "mbarrier" and "Tensor Swizzling Modes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.kernels.ptx.accesses import Fault
from tests.kernels.ptx.formats import UNSIGNED, Bits
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import Memory
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

    def read(self, memory: Memory, lane: int, begin: tuple[int, ...]) -> Bits:
        """The elements of a tile that a thread asks for, 0 where the tensor ends before it."""
        at = [first + np.arange(count) for first, count in zip(begin, self.tile, strict=True)]
        grid = np.meshgrid(*at, indexing="ij")
        inside = np.logical_and.reduce([(n >= 0) & (n < size) for n, size in zip(grid, self.shape, strict=True)])
        places = sum(n * stride for n, stride in zip(grid, self.strides, strict=True))
        found = np.zeros(self.tile, UNSIGNED[self.element])
        addresses = (self.address + places[inside] * self.element).astype(np.uint64)
        found[inside] = memory.load(np.full(len(addresses), lane), addresses, self.element)
        return found.ravel()


PREFETCH = ("cp", "async", "bulk", "prefetch", "L2", "global")


def copies(program: Program, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts[:3] == ("cp", "async", "commit_group"):
        return lambda machine, mask: machine.copies.commit(mask)
    if parts[:3] == ("cp", "async", "wait_group"):
        return lambda machine, mask: machine.copies.wait(mask, int(instruction.operands[0]))
    if parts == PREFETCH:
        return prefetches(instruction)
    return tile_copies(instruction) if "bulk" in parts else small_copies(instruction)


def small_copies(instruction: Instruction) -> Step:
    """Of 4, 8 or 16 bytes for each thread; what is not read of them is 0."""
    to, source, text, *given = instruction.operands
    size = int(text, 0)

    def read(machine: Machine, sources: Bits, counts: Bits, here: Bits) -> Bits:
        """[lanes, numbers of 4 bytes]"""
        found = np.zeros((machine.lanes, size // 4), np.uint32)
        for n in range(size // 4):
            lanes = np.flatnonzero(here & (counts > 4 * n))
            found[lanes, n] = machine.memory.load(lanes, sources[lanes] + np.uint64(4 * n), 4)
        return found

    def do(machine: Machine, mask: Bits) -> None:
        counts = np.broadcast_to(machine.read(given[0], "u32") if given else np.uint32(size), machine.lanes)
        places, sources = machine.addresses(to), machine.addresses(source)
        if (places[mask] % size).any() or (sources[mask & (counts > 0)] % size).any():
            raise Fault(f"what is copied as {size} bytes does not begin at a multiple of them: {instruction.text}")
        begun = read(machine, sources, counts, mask)
        machine.shared.expect(np.flatnonzero(mask), places[mask], size)

        def work(due: Bits) -> None:
            """Late: it may as well have been done at once."""
            numbers = read(machine, sources, counts, due)
            if (numbers[due] != begun[due]).any():
                raise Fault("what is copied changes meanwhile")
            lanes = np.flatnonzero(due)
            machine.shared.arrived(lanes, places[lanes], size)
            for n in range(size // 4):
                machine.shared.store(lanes, places[lanes] + np.uint32(4 * n), numbers[lanes, n])

        machine.copies.begin(mask, work)

    return do


def prefetches(instruction: Instruction) -> Step:
    """To the second-level cache, where nothing is seen of it but what it asks for."""
    source, size = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        sizes = np.broadcast_to(machine.read(size, "u32"), machine.lanes)[mask]
        machine.memory.prefetch(machine.addresses(source)[mask], sizes)

    return do


def tile_copies(instruction: Instruction) -> Step:
    """Of a tile, by one thread."""
    to, source, barrier = instruction.operands

    def copy(machine: Machine, lane: int, places: Bits, tiles: Tiles, begin: tuple[int, ...], arrival: int) -> int:
        machine.shared.land(places, tiles.read(machine.memory, lane, begin), arrival)
        return tiles.num_bytes

    def do(machine: Machine, mask: Bits) -> None:
        addresses, barriers = machine.addresses(to), machine.addresses(barrier)
        described = np.broadcast_to(machine.read(source.base, "u64"), machine.lanes)
        begins = [np.broadcast_to(machine.read(each, "s32"), machine.lanes) for each in reversed(source.coordinates)]
        for lane in np.flatnonzero(mask).tolist():
            tiles, address = machine.tiles[int(described[lane])], int(addresses[lane])
            if address % max(128, 8 * tiles.row if tiles.row > 16 else 128):
                raise Fault("a tile is copied to where its pattern does not begin")
            begin = tuple(int(each[lane].astype(np.int32)) for each in begins)
            count = tiles.num_bytes // tiles.element
            to_each = swizzled(address + np.arange(count) * tiles.element, tiles.row).astype(np.uint32)
            places = machine.shared.expect(np.full(count, lane), to_each, tiles.element)
            counted = barrier_at(machine, int(machine.program_of[lane]), int(barriers[lane]))
            counted.copies.append(partial(copy, machine, lane, places, tiles, begin, counted.arrivals[-1]))

    return do


def barriers(program: Program, instruction: Instruction) -> Step:
    return {"init": begins, "inval": ends, "arrive": arrives, "try_wait": asks}[instruction.parts[1]](instruction)


def begins(instruction: Instruction) -> Step:
    place, count = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        for lane, address in barriers_at(machine, mask, place, changes=True):
            found = Barrier(int(count), int(count), [machine.shared.new_arrival()], machine.shared.new_arrival)
            machine.barriers[machine.program_of[lane]][address] = found

    return do


def ends(instruction: Instruction) -> Step:
    (place,) = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        for lane, address in barriers_at(machine, mask, place, changes=True):
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
        for lane, address in barriers_at(machine, mask, place):
            barrier_at(machine, machine.program_of[lane], address).arrive(int(counts[lane]))

    return do


def asks(instruction: Instruction) -> Step:
    """Whether a phase is over; whoever asks in vain has the others go on first."""
    target, place, parity = instruction.operands

    def do(machine: Machine, mask: Bits) -> None:
        parities = np.broadcast_to(machine.read(parity, "u32"), machine.lanes)
        over = np.zeros(machine.lanes, bool)
        answers: dict[tuple[int, int, int], bool] = {}  # the same for all who ask at once
        for lane, address in barriers_at(machine, mask, place):
            program, phase = int(machine.program_of[lane]), int(parities[lane])
            barrier = barrier_at(machine, program, address)
            if (key := (program, address, phase)) not in answers:
                answers[key] = barrier.is_over(phase)
            over[lane] = answers[key]
            if over[lane]:
                machine.shared.know(lane, barrier.arrivals[-2])
        machine.write(target, over, mask)
        machine.stuck |= mask & ~over
        machine.in_vain = 0 if over.any() else machine.in_vain

    return do


def barrier_at(machine: Machine, program: int, address: int) -> Barrier:
    found = machine.barriers[program].get(address)
    if found is None:
        raise Fault("a barrier is used before it begins, or behind its end")
    return found


def barriers_at(machine: Machine, mask: Bits, place: Address, *, changes: bool = False) -> Iterator[tuple[int, int]]:
    """Of each thread, its number and the address of its barrier; ``changes``: that begins or ends."""
    lanes = np.flatnonzero(mask)
    addresses = machine.addresses(place)[lanes]
    machine.shared.reach_barrier(lanes, addresses, changes=changes)
    return zip(lanes.tolist(), addresses.tolist(), strict=True)
