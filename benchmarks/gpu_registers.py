"""Registers, spills and shared memory of the Triton kernels as they ship, compiled for GPUs that are not there.

    python benchmarks/gpu_registers.py                        # all of them: minutes
    python benchmarks/gpu_registers.py -k attention_compiles  # as pytest selects tests

Compiles what the tests compile (`tests/kernels/ahead_of_time.py`), so that the table is of the same configurations as
the tests that fail on a spill, and prints a line for each and a column for each target: registers of a thread, KiB of
shared memory of a block, and bytes that spill, if there are any.  Needs pytest, torch and triton, but no GPU.  The
exit status is pytest's.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
USAGE = re.compile(r"^(\w+): Usage\(registers=(\d+), spilled=(\d+), shared=(\d+)\)$", re.MULTILINE)


class Table:
    """A plugin of pytest that keeps what a test has printed of a kernel's usage."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        for target, registers, spilled, shared in USAGE.findall(report.capstdout) if report.when == "call" else ():
            cell = f"{registers}, {int(shared) / 1024:.0f}" + (f", spills {spilled}" if spilled != "0" else "")
            self.rows.setdefault(_configuration(report.nodeid, target), {})[target] = cell

    def __str__(self) -> str:
        targets = sorted(
            {target for cells in self.rows.values() for target in cells}, key=lambda each: (len(each), each)
        )
        lines = [["configuration", *targets], ["---"] * (1 + len(targets))]
        lines += [[name, *(cells.get(target, "") for target in targets)] for name, cells in self.rows.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _configuration(nodeid: str, target: str) -> str:
    """A test's file, name and parameters, without the target's and without what all these tests say of themselves."""
    file, _, test = nodeid.partition("::")
    name, _, parameters = test.rstrip("]").partition("[")
    others = parameters.split("-")
    if target in others:
        others.remove(target)
    said = re.sub("^test_|(it_)?compiles?_ahead_of_time|without_spills|and_|it_ships", "", name).strip("_")
    kernel = Path(file).stem.removeprefix("test_").removesuffix("_triton")
    return " ".join(filter(None, [f"`{kernel}`", said.replace("_", " "), *others]))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="chosen", default="compile or ship or spill", help="tests, as pytest's -k has them")
    arguments, table = parser.parse_args(), Table()
    files = sorted(map(str, (ROOT / "tests" / "kernels").glob("test_*.py")))
    options = ["--rootdir", str(ROOT), "-q", "--no-header", "--no-summary", "-k", arguments.chosen]
    status = pytest.main([*options, *files], plugins=[table])
    print(table)
    sys.exit(status)


if __name__ == "__main__":
    main()
