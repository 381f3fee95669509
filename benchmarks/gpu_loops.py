"""What an iteration of a prefill's attention takes of a Hopper processor, by its machine code, on any machine.

    python benchmarks/gpu_loops.py

Compiles the attention kernel for sm_90 as it ships, and walks through the loop over keys that every row sees as the two
groups of warps of a program do, which wait for one another in each iteration.  A product begins when the one before it
has ended, and takes the matrix units for its operations at 4,096 a cycle.  Any other instruction takes a scheduler a
cycle for each of its warps; if it is not of float32 sums and products, it is taken to need its unit for two, and an
exponential for eight.  Prints cycles of an iteration, those of its products, and the share that these are: the most
that the kernel can have of the matrix units' rate.

A prediction, for `benchmarks/gpu.py` to hold to: latencies, late copies, tails, and what a cache gives are not in it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from tests.kernels.ahead_of_time import TARGETS
from tests.kernels.machine_code import PRODUCT, WAIT, instructions, loops_of_products
from tests.kernels.test_ragged_attention_triton import compile_attention

HOPPER = TARGETS[1]
SCHEDULERS = 4  # of a processor, which has an instruction of each of them begun in a cycle
OPERATIONS = 4096  # of 16 bits, of a processor's matrix units in a cycle
# Cycles of a scheduler's units for an instruction of a warp: for exponentials and the like; and for all else but sums
# and products of float32, which take no longer than it takes to begin them. The two is an assumption: such instructions
# have half the rate on some processors, and the guide of this one was not to be had.
UNITS = {"special": (8, re.compile("MUFU")), "others": (2, re.compile(r"FMNMX|FSEL|FSETP|F2F|(?!HGMMA|F)[A-Z]"))}
WARPS = 8
# Head sizes and what else is asked of the kernel.
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "heads of 128": (128, {}),
    "heads of 128, values not late": (128, {"LATE": False}),
    "heads of 128, blocks of 64": (128, {"BLOCK_SIZE": 64}),
    "the same, values late": (128, {"BLOCK_SIZE": 64, "LATE": True}),
    "heads of 64": (64, {}),
    "heads of 128, softcap": (128, {"SOFTCAP": 30.0}),
    "heads of 128, e4m3": (128, {"fp8": True}),
    "heads of 256": (256, {}),
}


@dataclass
class Clock:
    """Cycles by now: when the next instruction begins, and until when the matrix units and the others are at work."""

    now: float = 0.0
    products: float = 0.0
    units: dict[str, float] = field(default_factory=lambda: dict.fromkeys(UNITS, 0.0))

    def step(self, instruction: str) -> float:
        """The cycles of a product, if it is one."""
        of_each = WARPS // SCHEDULERS
        operation = re.sub(r"^@!?\w+ ", "", instruction)
        unit = next((name for name, (_, ones) in UNITS.items() if ones.match(operation)), None)
        if unit is not None:
            self.now = max(self.now, self.units[unit])
            self.units[unit] = self.now + UNITS[unit][0] * of_each
        self.now += of_each
        if WAIT in instruction:
            self.now = max(self.now, self.products)
        elif product := PRODUCT.search(instruction):
            cycles = 2 * 64 * int(product[1]) * 16 / OPERATIONS * (WARPS // 4)
            self.products = max(self.products, self.now) + cycles
            return cycles
        return 0.0


def cycles(loop: Sequence[str]) -> tuple[float, float]:
    """Of an iteration, and of its products, when as many have gone before as it takes to be like those behind it."""
    clock = Clock()
    for _ in range(8):
        began = clock.now
        products = sum(clock.step(instruction) for instruction in loop)
    return clock.now - began, products


def main() -> None:
    arguments = parsed(benchmark_parser(__doc__))
    rows = []
    print(f"{'':32} {'instructions':>12} {'cycles':>7} {'products':>9} {'share':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, others) in list(STEPS.items())[: 2 if arguments.quick else None]:
            compiled = compile_attention(HOPPER, "bf16", size, 512, split=True, **others)
            clear = loops_of_products(instructions(compiled, Path(folder)))[-1]
            whole, products = cycles(clear)
            rows.append({"name": name, "instructions": len(clear), "cycles": whole, "products": products})
            print(f"{name:32} {len(clear):12} {whole:7.0f} {products:9.0f} {products / whole:6.2f}")
    keep(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
