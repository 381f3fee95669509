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
# Of any other instruction: what it does, the register that it writes first, if any, and how it says that there are
# more.
OTHER = re.compile(r"^(?:@!?\w+ )?(\S+) ?((?:!?U?P\w+, )?R(\d+)\b)?(.*)")
FOUR, PAIR = re.compile(r"\.128|M88\.4"), re.compile(r"64|WIDE|M88\.2|^CS2R(?!\.32)|^D(?:ADD|MUL|FMA)")


def instructions(compiled: Any, folder: Path) -> list[str]:
    """In their order, and the labels that are jumped to, as `.L_x_7:`."""
    found = []
    for line in said_of(compiled, folder, triton.knobs.nvidia.nvdisasm.path, "-c").splitlines():
        instruction = line.partition("*/")[2].partition(";")[0].strip()
        found += [instruction] if instruction else re.findall(r"^\.L_x_\d+:", line)
    return found


def used_under_way(code: list[str]) -> list[str]:
    """Instructions that write registers which a product that is not waited for yet still reads or adds to, or that read
    what it adds to; in a loop, from one iteration to the next, too.

    The hardware does not keep them from it: Triton says where is waited, and the assembler shares out registers.
    """
    loops = [loop + loop for loop in loops_of_products(code)]
    return list(dict.fromkeys(each for walk in (code, *loops) for each in _used_under_way(walk)))


def _used_under_way(code: list[str]) -> list[str]:
    sums: set[int] = set()
    rows: set[int] = set()
    found = []
    for instruction in code:
        if product := PRODUCT.search(instruction):
            width, first, first_row = product.groups()
            own = set(range(int(first), int(first) + int(width) // 2))
            given = set(range(int(first_row), int(first_row) + 4)) if first_row else set()
            found += [instruction] if own & rows or given & sums else []
            sums, rows = sums | own, rows | given
        elif WAIT in instruction:
            sums, rows = set(), set()
        elif other := OTHER.search(instruction):
            operation, _, first, rest = other.groups()
            count = 4 if FOUR.search(operation) else 2 if PAIR.search(operation) else 1
            written = set(range(int(first), int(first) + count)) if first else set()
            wide = count if operation.startswith("ST") else 1
            read = {int(each) + n for each in re.findall(r"\bR(\d+)\b", rest) for n in range(wide)}
            found += [instruction] if written & (sums | rows) or read & sums else []
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
