"""Hopper's machine code of what Triton compiles: what runs beside products that its matrix units go on with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import triton

from tests.kernels.ahead_of_time import said_of

# A product of 64 rows: its width, the first register that it adds to and, where rows come from registers, the first of
# the four they come from.
PRODUCT = re.compile(r"HGMMA\.64x(\d+)\S* R(\d+), (?:R(\d+), )?")
# The wait for those that were begun: all of them, as kernels here have it.
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
# What any other instruction writes, of so many bits.
WRITTEN = re.compile(r"^(?:@!?\w+ )?(?!ST|RED|ATOM|BAR|BRA|SYNCS)(\S+) (?:!?U?P\w+, )?R(\d+)\b")


def instructions(compiled: Any, folder: Path) -> list[str]:
    """In their order, and the labels that are jumped to, as `.L_x_7:`."""
    found = []
    for line in said_of(compiled, folder, triton.knobs.nvidia.nvdisasm.path, "-c").splitlines():
        instruction = line.partition("*/")[2].partition(";")[0].strip()
        found += [instruction] if instruction else re.findall(r"^\.L_x_\d+:", line)
    return found


def written_under_way(code: list[str]) -> list[str]:
    """Instructions that write registers which a product that is not waited for yet still reads or adds to.

    The hardware does not keep them from it: Triton says where is waited, and the assembler shares out registers.
    """
    under_way: set[int] = set()
    found = []
    for instruction in code:
        if product := PRODUCT.search(instruction):
            width, sums, rows = product.groups()
            under_way.update(range(int(sums), int(sums) + int(width) // 2))
            under_way.update(range(int(rows), int(rows) + 4) if rows else ())
        elif WAIT in instruction:
            under_way.clear()
        elif written := WRITTEN.search(instruction):
            operation, first = written.groups()
            count = 4 if ".128" in operation else 2 if re.search("64|WIDE", operation) else 1
            found += [instruction] if under_way & set(range(int(first), int(first) + count)) else []
    return found


def loops_of_products(code: list[str]) -> list[list[str]]:
    """The instructions of each loop with products, in their order.

    A jump back without a condition ends none: behind all else stands where a copy is waited for, and jumps back there.
    """
    labels = {instruction.rstrip(":"): n for n, instruction in enumerate(code) if instruction.startswith(".L_x_")}
    found = []
    for n, instruction in enumerate(code):
        if (jump := re.search(r"^@.*BRA.*`\((\.L_x_\d+)\)", instruction)) and labels[jump[1]] < n:
            body = [each for each in code[labels[jump[1]] : n + 1] if each.rstrip(":") not in labels]
            found += [body] if any(map(PRODUCT.search, body)) else []
    return found
