"""Launch Triton's kernels on tensors of the CPU: compiled for a GPU that is not there, and run by `machine`."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from selective_compile import kernels
from tests.kernels.ahead_of_time import NoDevice
from tests.kernels.ptx.copies import Tiles
from tests.kernels.ptx.formats import Bits
from tests.kernels.ptx.machine import Machine, Step
from tests.kernels.ptx.memory import Memory, Name
from tests.kernels.ptx.reading import Program, program
from tests.kernels.ptx.steps import steps_of

ROWS = {0: 16, 1: 32, 2: 64, 3: 128}  # bytes, by the swizzle of a descriptor
NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}


def take_over(monkeypatch: pytest.MonkeyPatch, arch: int) -> Processor:
    """Kernels are compiled for a GPU of NVIDIA's and run by a `Processor` until the test ends."""

    processor = Processor({"WIDEN": False, "PDL": arch >= 90})
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(GPUTarget("cuda", arch, 32), 1000 + arch))
    for module in pkgutil.iter_modules(kernels.__path__):
        if module.name.endswith("_triton"):
            found = importlib.import_module(f"{kernels.__name__}.{module.name}")
            if hasattr(found, "on_device"):
                monkeypatch.setattr(found, "on_device", processor)
    return processor


@cache
def understood(ptx: str) -> tuple[Program, list[list[Step]]]:
    found = program(ptx)
    return found, steps_of(found)


@dataclass
class Processor:
    """Stands in for `on_device`: what is launched with it has run when the call returns.

    Args:
        changed: parameters of kernels that depend on whether tensors are on a GPU, and what they are on one.
        edit: makes another PTX, to be run in place of Triton's.
    """

    changed: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[str], str] = str
    launched: list[Any] = field(default_factory=list)  # what was compiled for each launch
    prefetched: list[tuple[Name, int, int]] = field(default_factory=list)  # by all of them, as `Memory` has it
    _in_front: dict[Name, Bits] = field(default_factory=dict)  # bytes that the last launch has written

    def __call__(self, kernel: Any, tensor: Any) -> dict:
        class Launch:
            def __getitem__(_, grid: Any) -> Callable[..., None]:
                return lambda *args, **options: self.launch(kernel, grid, args, options)

        return Launch()

    def launch(self, kernel: Any, grid: Any, args: tuple, options: dict[str, Any]) -> None:
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, args, strict=False)) | {name: options[name] for name in names if name in options}
        given |= {name: value for name, value in self.changed.items() if name in given}
        others = {"enable_fp_fusion": True} | {name: value for name, value in options.items() if name not in names}
        compiled = kernel.warmup(**given, grid=grid, **others)
        self.launched.append(compiled)
        found, steps = understood(self.edit(compiled.asm["ptx"]))
        memory, (x, y, z) = Memory(self._in_front), (*grid, 1, 1)[:3]
        parameters, tiles = bound(found, compiled, given, memory)
        if x * y * z:
            shape = (found, (x, y, z), memory, parameters, tiles)
            with np.errstate(all="ignore"):
                early = bool(given.get("PDL", False))
                Machine(*shape, shared=compiled.metadata.shared, early=early).run(steps)
            self._in_front = memory.written()
            self.prefetched += memory.prefetched


def bound(found: Program, compiled: Any, given: dict[str, Any], memory: Memory) -> tuple[dict, dict]:
    """The bytes of each parameter of a program, and the tiles of those that are descriptors, by their number."""
    described = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    pieces = [
        piece
        for name, kind in compiled.src.signature.items()
        for piece in handed(given.get(name), kind, memory, described)
    ]
    tiles = {n: piece for n, piece in enumerate(pieces, 1) if isinstance(piece, Tiles)}
    # Behind them, memory that Triton would lend.
    whole = [b"" if isinstance(piece, Tiles) else piece for piece in pieces] + [b""] * 9
    return {
        name: piece.ljust(size, b"\0") for (name, size), piece in zip(found.parameters.items(), whole, strict=False)
    }, tiles


def handed(value: Any, kind: str, memory: Memory, described: Iterator[dict]) -> list[bytes | Tiles]:
    """What a launch hands over for an argument."""
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [struct.pack("Q", memory.address(value))]
    if kind.startswith("tensordesc"):
        assert isinstance(value, TensorDescriptor)
        meta = next(described)
        address = memory.address(value.base)
        shape, strides = tuple(value.shape), tuple(value.strides)
        row = ROWS[meta["swizzle"]]
        found = Tiles(address, shape, strides, tuple(meta["block_size"]), meta["elem_size"], row)
        return [found, *(struct.pack("i", n) for n in shape), *(struct.pack("q", n) for n in strides)]
    return [struct.pack(NUMBERS[kind], value)]
