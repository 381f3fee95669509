"""Calls of native functions one after the other: the launcher of the C++ code beside this file."""

from __future__ import annotations

import struct
from array import array

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason
build_beside = _functions.build_beside

MOST_ARGUMENTS = 64
THREW = -1
_pack = struct.Struct("=4q").pack


def make_calls(code: array[int], calls: int, bases: array[int], symbols: array[int]) -> int:
    """Make so many calls of ``code``, as `CallSequence` in call_sequence_cpu.cpp has them.

    Returns:
        0, or the status of the call that failed, behind which none was made; `THREW`: one has thrown.
    """
    addresses = (each.buffer_info()[0] for each in (bases, symbols))
    found: int = _functions["selective_calls"](_pack(code.buffer_info()[0], calls, *addresses))
    return found
