"""Which implementation of an operator runs: the one that a device has, or the one that somebody asks for."""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from typing import Literal, get_args

Implementation = Literal["auto", "reference", "cpu", "triton"]
IMPLEMENTATIONS = get_args(Implementation)

_logger = logging.getLogger(__name__)
# The name, and whether for a batch-invariant engine.
forced: ContextVar[tuple[Implementation, bool]] = ContextVar("selective_implementation", default=("auto", False))


class forced_implementation:
    """Run the ops called inside with the implementation `name`; "auto" lets the device decide again.

    Holds for the current thread (or asyncio task) only: a thread started inside enters it for itself. The
    choice is made when an op runs, not when it is traced, so that one compiled graph serves every
    implementation. "triton" on CPU tensors runs in Triton's interpreter, which is for tests.

    batch_invariant: attention runs as a batch-invariant engine has it, with a request for each row: the result of a
        row is then the same bits whatever the others are. The other implementations give them so by themselves, or
        not at all (`runtime.invariance`).

    Raises:
        ValueError: the name is not one of `Implementation`.
    """

    def __init__(self, name: Implementation, *, batch_invariant: bool = False) -> None:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
        self._forced = (name, batch_invariant)

    def __enter__(self) -> None:
        self._token = forced.set(self._forced)

    def __exit__(self, *_: object) -> None:
        forced.reset(self._token)


def implementation_on(device_type: str) -> str:
    """The name of the implementation that an op called here and now on "cpu" or "cuda" tensors would run.

    Raises:
        ValueError: the forced implementation does not run on this device, or no implementation does.
        RuntimeError: the native CPU kernel was forced and cannot be built.
    """
    return resolved_name(forced.get()[0], device_type)


@functools.cache
def resolved_name(name: Implementation, device_type: str) -> str:
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"the tensors' device must be cpu or cuda, got {device_type}")
    if device_type == "cuda":
        if name == "cpu":
            raise ValueError("implementation must be auto, reference or triton on cuda tensors, got 'cpu'")
        return "triton" if name == "auto" else name
    if name in ("reference", "triton") or native_cpu_available():
        return "cpu" if name == "auto" else name
    if name == "cpu":
        raise RuntimeError("the native CPU kernels cannot be built here; the log has the compiler's message")
    _logger.warning("no native CPU kernel can be built here: attention runs in the slow eager reference")
    return "reference"


def native_cpu_available() -> bool:
    from selective_compile.kernels import ragged_attention_cpu

    return ragged_attention_cpu.available()
