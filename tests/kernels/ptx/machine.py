"""A processor that runs a program in PTX for all threads of a launch at once: as arrays, one number for each thread.

Threads at one place of the program go on together, those that are behind first, so that they meet again.  Where another
order would matter, as where a barrier or a wait is missing, is seen by `accesses` and `shared`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.accesses import LANES, Fault, Threads
from tests.kernels.ptx.formats import UNSIGNED, Bits, width
from tests.kernels.ptx.memory import Memory
from tests.kernels.ptx.reading import Address, Instruction, Program
from tests.kernels.ptx.shared import Shared
from tests.kernels.ptx.under_way import Barrier, Groups

Step = Callable[["Machine", Bits], None]
PATIENCE = 100
RETURNED = np.iinfo(np.int64).max


class Machine:
    """``parameters``: the bytes of each, by name; ``tiles``: what is told by the descriptors among them, by address;
    ``early``: it begins before the kernels in front of it have ended."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        memory: Memory,
        parameters: dict[str, bytes],
        tiles: dict[int, object],
        *,
        shared: int,
        early: bool = False,
    ) -> None:
        self.program, self.memory, self.parameters, self.tiles = program, memory, parameters, tiles
        self.launch = Threads(int(np.prod(grid)), program.threads)
        self.programs, self.lanes = self.launch.programs, self.launch.lanes
        self.program_of, self.thread = self.launch.program_of, self.launch.thread
        self.shared = Shared(self.launch, shared)
        memory.begin(self.launch, early=early)
        self.barriers: list[dict[int, Barrier]] = [{} for _ in range(self.programs)]
        self.copies = Groups(self.lanes)
        self.products = Groups(self.lanes // LANES)
        self.registers: dict[str, Bits] = {}
        # Since the last fence of products: these must not read them.
        self.just_written: set[str] = set()
        self.special = self._special(grid)
        self.place = np.zeros(self.lanes, np.int64)  # the block that a thread does next
        self.waits = np.full(self.lanes, -1)  # the number of the barrier
        self.stuck = np.zeros(self.lanes, bool)  # asked for a phase that is not over
        self.in_vain = 0  # times that all who could go on had done so, since the last phase was over

    def _special(self, grid: tuple[int, int, int]) -> dict[str, Bits]:
        n = self.program_of
        x, y, z = n % grid[0], n // grid[0] % grid[1], n // (grid[0] * grid[1])
        named = {"tid.x": self.thread, "ctaid.x": x, "ctaid.y": y, "ctaid.z": z, "ntid.x": self.program.threads}
        named |= {f"nctaid.{axis}": count for axis, count in zip("xyz", grid, strict=True)}
        named |= {"laneid": self.thread % LANES}
        return {f"%{name}": np.broadcast_to(np.asarray(each, np.uint32), self.lanes) for name, each in named.items()}

    def run(self, steps: list[list[Step]]) -> None:
        """``steps``: of each block, what its instructions do for the threads of a mask."""
        while (self.place < RETURNED).any():
            mask, block = self._next()
            self.place[mask] = block + 1
            for step in steps[block]:
                step(self, mask)
        bulk = any(barrier.copies for barriers in self.barriers for barrier in barriers.values())
        if self.copies.begun or self.products.begun or bulk:
            raise Fault("a program returns before its copies or products are done")

    def _next(self) -> tuple[Bits, int]:
        ready = (self.waits < 0) & (self.place < RETURNED)
        if not ready.any():
            self._release()
            ready = (self.waits < 0) & (self.place < RETURNED)
        if (awake := ready & ~self.stuck).any():
            ready = awake
        else:
            self.stuck[:] = False
            self.in_vain += 1
            if self.in_vain > PATIENCE:
                raise Fault("threads wait for a copy that does not come")
        block = int(self.place[ready].min())
        return ready & (self.place == block), block

    def _release(self) -> None:
        """Those of each program in which all that have not returned wait."""
        waits = self.waits.reshape(self.programs, -1)
        gone = (self.place == RETURNED).reshape(self.programs, -1)
        for number in np.unique(waits[waits >= 0]):
            whole = ((waits == number) | gone).all(1) & ~gone.all(1)
            waits[whole] = -1
            self.launch.rounds[whole] += 1
            self.shared.met(whole)
        if ((self.waits >= 0) | (self.place == RETURNED)).all():
            raise Fault("threads wait for others of their program that never come")

    def read(self, name: str, kind: str) -> Bits:
        """A register, a number that stands there itself, or the place of shared memory; as bits."""
        if name in self.registers:
            return self.registers[name]
        if name in self.special:
            return self.special[name]
        if name.startswith("global_smem"):
            return np.array([Shared.BEGIN], np.uint32)
        if name in self.parameters:
            return np.array([1 + list(self.parameters).index(name)], np.uint32)
        if name.startswith("%") or name[0].isalpha():
            # What no thread has written: anything.
            own = self.program.type_of(name)
            return np.broadcast_to(literal("1", own) if own == "pred" else literal("0xA5A5A5A5", own), self.lanes)
        return literal(name, kind)

    def write(self, name: str, bits: Bits, mask: Bits) -> None:
        if name == "_":
            return
        if len(bits) != self.lanes:
            bits = np.broadcast_to(bits, self.lanes)
        if not mask.all():
            bits = np.where(mask, bits, self.read(name, "")[: self.lanes])
        self.registers[name] = bits
        self.just_written.add(name)

    def addresses(self, operand: Address) -> Bits:
        """[lanes] of shared memory in 32 bits, of the device's in 64."""
        base = np.broadcast_to(self.read(operand.base, "u32"), self.lanes)
        return base + base.dtype.type(operand.offset % (1 << 8 * base.dtype.itemsize))

    def warps_of(self, mask: Bits, instruction: Instruction) -> Bits:
        """[warps]: those that do what all of their threads do together."""
        threads = mask.reshape(-1, LANES)
        if (threads.any(1) != threads.all(1)).any():
            raise Fault(f"only a part of a warp comes to {instruction.text}")
        return threads[:, 0]


def literal(text: str, kind: str) -> Bits:
    """[1] bits of a number as PTX writes it."""
    if text[:2] in ("0f", "0F"):
        return np.array([int(text[2:], 16)], np.uint32)
    if text[:2] in ("0d", "0D"):
        return np.array([int(text[2:], 16)], np.uint64)
    number = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.array([number != 0])
    size = width(kind)
    return np.array([number % (1 << 8 * size)], UNSIGNED[size])
