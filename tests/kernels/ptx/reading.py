"""PTX as text made into instructions: what Triton writes, which is a part of the language.

Source: PTX ISA, "Syntax" and "Instruction Set".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

NAME = r"[%$\w.]+"
STATEMENT = re.compile(rf"(?:@(!?)({NAME})\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
REGISTERS = re.compile(rf"\.reg\s+\.(\w+)\s+({NAME})(?:<(\d+)>)?")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,)\[]*?(\w+)(?:\[(\d+)\])?\s*(?=[,)\n])")
LABEL = re.compile(r"([$\w]+):$")


@dataclass(frozen=True)
class Address:
    """A register or a name, and bytes behind it; of a tensor, coordinates."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


Operand = str | tuple[str, ...] | Address


@dataclass(frozen=True)
class Instruction:
    """``parts``: its name, divided at the dots; ``guard``: a predicate that is true of those who do it, or false with
    ``unless``."""

    text: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str = ""
    unless: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        """All registers it reads or writes, and names beside them."""
        found = set()
        for operand in self.operands:
            if isinstance(operand, Address):
                found |= {operand.base, *operand.coordinates}
            else:
                found |= set(operand) if isinstance(operand, tuple) else set(operand.split("|"))
        return frozenset(found)


@dataclass
class Program:
    """The entry of a module: its parameters with their sizes in bytes, and basic blocks in their order.

    ``labels``: of which a block begins with it; ``registers``: the type of each that is declared by itself.
    """

    parameters: dict[str, int] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    threads: int = 0

    def type_of(self, register: str) -> str:
        return self.registers.get(register) or self.registers[register.rstrip("0123456789")]


def program(ptx: str) -> Program:
    head, _, rest = ptx[ptx.index(".entry") :].partition("\n{")
    body, found = rest.partition("-- End function")[0], Program()
    sizes = [(name, int(count or 1) * int(kind[1:]) // 8) for kind, name, count in PARAMETER.findall(head)]
    found.parameters = dict(sizes)
    found.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
    scope, scopes = 0, 0
    lines = (line.partition("//")[0].strip() for line in body.splitlines())
    for statement in statements(line for line in lines if line):
        if statement in "{}":
            scopes, scope = (scopes + 1, scopes + 1) if statement == "{" else (scopes, 0)
        elif label := LABEL.match(statement):
            begin(found, own_name(label[1], scope))
        elif statement.startswith(".reg"):
            kind, name, _ = REGISTERS.match(statement).groups()
            found.registers[name] = kind
        elif not statement.startswith("."):
            add(found, instruction(statement, scope))
    return found


def statements(lines) -> list[str]:
    """Divided at semicolons, labels and braces that stand for a scope; braces around operands stay."""
    found = []
    for line in lines:
        while line:
            if line[0] in "{}":
                found.append(line[0])
                line = line[1:].strip()
            elif LABEL.match(line) or line.startswith(".loc") or ";" not in line:
                found.append(line)
                line = ""
            else:
                first, _, line = line.partition(";")
                found.append(first.strip())
                line = line.strip()
    return found


def own_name(label: str, scope: int) -> str:
    """Labels of inline assembly are known in its braces only."""
    return label if label.startswith("$") else f"{label} in {scope}"


def begin(found: Program, label: str | None = None) -> None:
    """Another block."""
    if found.blocks[-1]:
        found.blocks.append([])
    if label:
        found.labels[label] = len(found.blocks) - 1


ENDS = {"bra", "ret", "bar", "barrier", "mbarrier"}


def add(found: Program, new: Instruction) -> None:
    """Where threads may go different ways, or wait, a block ends; a wait is one of its own."""
    if new.parts[:2] == ("mbarrier", "try_wait") or new.parts[0] in ("bar", "barrier"):
        begin(found)
    found.blocks[-1].append(new)
    if new.parts[0] in ENDS:
        begin(found)


def instruction(text: str, scope: int) -> Instruction:
    unless, guard, name, rest = STATEMENT.match(text).groups()
    operands = tuple(map(operand, split_operands(rest)))
    if name.startswith("bra"):
        operands = (own_name(rest.strip(), scope),)
    return Instruction(" ".join(text.split()), tuple(name.split(".")), operands, guard or "", bool(unless))


def split_operands(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    return [each.strip() for each in re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*", text)]


def operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text[1:-1].split(","))
    if text.startswith("["):
        base, _, coordinates = text[1:-1].partition(",")
        place, _, offset = base.replace(" ", "").partition("+")
        inner = tuple(each.strip() for each in coordinates.strip(" {}").split(",")) if coordinates else ()
        return Address(place, int(offset or 0), inner)
    return text
