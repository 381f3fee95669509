"""What the scripts in ``benchmarks/`` have in common: options, and how results are kept."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from selective_compile.bench.machine import machine, versions


def benchmark_parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of the engine has; ``doc`` is the script's."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--threads", type=int, help="of torch's; default: as torch chooses")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--json", type=Path, help="where to write what was found, with the machine and the versions")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of the command line, of which ``threads`` holds from now on."""
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def keep(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write the results, if they are to be kept."""
    if path is not None:
        about = {"machine": machine(), "versions": versions()}
        path.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
