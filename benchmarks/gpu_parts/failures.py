"""What a job can fail with, and what is told of it: a line for people, and the end of the traceback for the file."""

from __future__ import annotations

import re
import subprocess
import traceback

import torch
from triton.errors import TritonError

# What a cell of a part can fail with and the next one go on: wrong results, memory, compilers, what a peer refuses.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    LookupError,
    ArithmeticError,
    NameError,
    ImportError,
    OSError,
    MemoryError,
    subprocess.SubprocessError,
    TritonError,
)
DETAIL = 6000  # characters: where a chain of errors ends, and the message of a compiler in it
LINE = 200
# Compilers and Dynamo say what was wrong in a line somewhere in theirs, and behind it what to set to see more.
SAYING = re.compile(r"(?:\w+\.)*((?:\w*(?:Error|Exception)|Fatal Python error): \S.*)")


class DeviceLost(Exception):
    """Of no more use to this process: an error of CUDA stays until it ends."""


def is_lost(device: torch.device) -> bool:
    """Whether everything on the device fails from now on, as behind an access out of bounds."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # allocates nothing, so that full memory is no loss
    except RuntimeError:
        return True
    return False


def reason(error: BaseException) -> str:
    """The error in one line, that which says what was wrong."""
    for each in _chain(error):
        if isinstance(each, TritonError):
            return f"{type(each).__name__}: {_last_of_triton(str(each))}"[:LINE]
    own = "".join(traceback.format_exception_only(error))
    if (said := _saying(own)) is not None:
        return said[:LINE]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = f"{type(error).__name__}: {lines[0] if lines else _where(error)}"
    return (first if error.__cause__ is None else f"{first}; {reason(error.__cause__)}")[:LINE]


def detail(error: BaseException) -> str:
    """The end of the traceback, with those of the errors that it came from."""
    return "".join(traceback.format_exception(error))[-DETAIL:]


def said_in(text: str) -> str:
    """The line of a process's error output that says what it ended with."""
    lines = text.strip().splitlines()
    return (_saying(text) or (lines[-1] if lines else "it said nothing"))[:LINE]


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


def _saying(text: str) -> str | None:
    found = [match.group(1) for line in text.splitlines() if (match := SAYING.match(line.strip()))]
    return found[-1] if found else None


def _last_of_triton(message: str) -> str:
    """Behind the source with a mark below it, or behind what ptxas said, but for the command that repeats that."""
    lines = [line.strip() for line in message.splitlines()]
    said = [line for line in lines if any(map(str.isalnum, line)) and not line.startswith("Repro command")]
    return said[-1] if said else ""


def _where(error: BaseException) -> str:
    """Of one that says nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"line {frames[-1].lineno} of {frames[-1].name}: {frames[-1].line}" if frames else ""
