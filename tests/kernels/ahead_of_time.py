"""Compile Triton kernels for GPUs that are not there, and look at what comes out."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.compiler.compiler as compiler
from triton.runtime.cache import get_cache_key

from tests.kernels.compiled_before import COMPILED_BEFORE


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU to compile for."""

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int

    @property
    def early(self) -> bool:
        """Whether kernels that have a parameter ``PDL`` begin before those in front of them have ended."""
        return self.arch in (90, 100)

    def __str__(self) -> str:
        return str(self.arch)

    @contextmanager
    def active(self) -> Iterator[compiler.GPUTarget]:
        """Kernels may ask for which GPU they are compiled, and are told of the one that is there."""
        gpu = compiler.GPUTarget(self.backend, self.arch, self.warp_size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton.runtime.driver, "_active", NoDevice(gpu))
            yield gpu


# Shared memory that a block can have, in bytes: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"; AMD CDNA 3 ISA, "Local data share".
TARGETS = (
    Target(backend="cuda", arch=80, warp_size=32, shared_memory=163 * 1024),
    Target(backend="cuda", arch=90, warp_size=32, shared_memory=227 * 1024),
    Target(backend="cuda", arch=100, warp_size=32, shared_memory=227 * 1024),
    Target(backend="hip", arch="gfx942", warp_size=64, shared_memory=64 * 1024),
)
# A consumer part, with less shared memory than any other for CUDA.
CONSUMER = Target(backend="cuda", arch=89, warp_size=32, shared_memory=99 * 1024)


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A kernel for a GPU that is not there, compiled when its code is asked for."""

    source: Any
    target: Target
    options: dict[str, Any]

    @cached_property
    def compiled(self) -> Any:
        with self.target.active() as gpu:
            return triton.compile(self.source, target=gpu, options=self.options)

    @property
    def asm(self) -> Any:
        return self.compiled.asm

    @property
    def metadata(self) -> Any:
        return self.compiled.metadata

    @cached_property
    def key(self) -> str:
        """By what Triton knows it in its own cache (the compiler, the kernel's text and that of all it calls, options),
        and the parameters by their names, which are left out there."""
        with self.target.active() as gpu:
            backend = compiler.make_backend(gpu)
            options = backend.parse_options(self.options | self.source.parse_options())
            known = get_cache_key(self.source, backend, options, env_vars=compiler.get_cache_invalidating_env_vars())
        constants = {name: getattr(value, "cache_key", repr(value)) for name, value in self.source.constants.items()}
        given = sorted(self.source.signature.items()), sorted(constants.items(), key=repr)
        return hashlib.sha256(f"{known} {given}".encode()).hexdigest()


def compile_ahead(
    kernel: Any, target: Target, types: dict[str, str], constants: dict[str, Any], **options: int
) -> Ahead:
    """With what a launch would find: tensors aligned to 16 bytes, strides multiples of 16.

    types: of the parameters that are not int32 numbers.
    """
    signature, attributes = {}, {}
    if any(parameter.name == "PDL" for parameter in kernel.params):
        constants = constants | {"PDL": target.early}
        options |= {"launch_pdl": True} if target.early else {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "i32")
        if signature[name].startswith("tensordesc"):
            continue
        if not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = compiler.ASTSource(kernel, signature, constants, attributes)
    return Ahead(source=source, target=target, options=options | {"enable_fp_fusion": True})


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a thread has of registers and of local memory, and a block of shared memory, in bytes."""

    registers: int
    spilled: int
    shared: int

    @classmethod
    def of(cls, compiled: Any, target: Target, folder: Path) -> Usage:
        """Triton's own `n_regs` and `n_spills` want a driver."""
        if target.backend == "hip":
            # Scalar registers spilled into lanes of vector registers never reach memory and are not counted.
            names, text = (r"\.vgpr_count:\s+", r"\.private_segment_fixed_size:\s+"), compiled.asm["amdgcn"]
        else:
            names = ("REG:", "STACK:", "LOCAL:")
            text = said_of(compiled, folder, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
        registers, *local = (int(re.search(name + r"(\d+)", text)[1]) for name in names)
        return cls(registers=registers, spilled=sum(local), shared=compiled.metadata.shared)


def said_of(compiled: Any, folder: Path, tool: str, *options: str) -> str:
    """What a tool of NVIDIA's says of the machine code."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    return subprocess.run([tool, *options, binary], capture_output=True, text=True, check=True).stdout


def assert_ships(ahead: Ahead, folder: Path) -> None:
    """There is machine code, it fits into the target's shared memory and spills no register; prints what it takes."""
    print(COMPILED_BEFORE.what_shipped(ahead.key, lambda: shipped(ahead, folder)))


def shipped(ahead: Ahead, folder: Path) -> str:
    target = ahead.target
    assert len(ahead.asm["cubin" if target.backend == "cuda" else "hsaco"]) > 0
    usage = Usage.of(ahead, target, folder)
    assert_waits(ahead)
    took = f"{target}: {usage}"  # as `benchmarks/gpu_registers.py` reads it
    if usage.spilled or usage.shared > target.shared_memory:
        print(took)  # of what does not ship, too
    assert usage.shared <= target.shared_memory
    assert usage.spilled == 0
    return took


# Of PTX, what reads, writes, prefetches or copies memory, textures included, and calls of functions, which may.
MEMORY = r"ldu?|st|red|atom|multimem|cp|prefetchu?|applypriority|discard|tensormap|tex|tld4|su(?:ld|st|red)|call"
INSTRUCTION = re.compile(rf"(?<![\w.%$])(?:{MEMORY})(?![\w%$])[\w.:]*")
# Memory that no kernel in front has written; and of copies under way, what counts them or waits for them.
OWN, UNDER_WAY = {"param", "shared", "local", "const"}, {"commit_group", "wait_group", "wait_all"}


def global_accesses(ptx: str) -> list[str]:
    """The instructions that may reach memory of several kernels: those that say so, and those that do not say which."""
    found = []
    for instruction in INSTRUCTION.findall(ptx):
        parts = {part.partition("::")[0] for part in instruction.split(".")}
        if "global" in parts or not parts & (OWN | UNDER_WAY):
            found.append(instruction)
    return found


def may_come_first(instruction: str) -> bool:
    """Whether it reads past the first-level cache, where something may be left of what memory held before the kernels
    that are complete. What it reads no kernel that is not complete may have written, which `ptx.memory` watches over.
    Or whether it asks the second-level cache for memory, and nobody for what is there.
    """
    return instruction.split(".")[:3] == ["ld", "global", "cg"] or instruction == "cp.async.bulk.prefetch.L2.global"


def assert_waits(compiled: Any) -> None:
    """A kernel that begins early reaches nothing in memory before it has waited but what `may_come_first` alone does;
    and no program returns or says that the next kernel may begin; behind it, all that do not return do say so."""
    early = getattr(compiled.metadata, "launch_pdl", False)
    before, waits, behind = compiled.asm.get("ptx", "").partition("griddepcontrol.wait")
    assert bool(waits) is early and ("griddepcontrol.launch_dependents" in behind) is early
    assert not waits or not re.search(r"\bret;|griddepcontrol", before)
    assert not waits or all(map(may_come_first, global_accesses(before)))


def innermost_loops(compiled: Any) -> list[str]:
    """The loops without a loop in them, in order, as Triton's own language for GPUs has them."""
    loops: list[str] = []
    lines = compiled.asm["ttgir"].splitlines()
    for n, line in enumerate(lines):
        if "scf.for" in line:
            indent = len(line) - len(line.lstrip())
            end = next(m for m in range(n + 1, len(lines)) if lines[m].startswith(" " * indent + "}"))
            body = "\n".join(lines[n : end + 1])
            loops += [] if "scf.for" in body[len(line) :] else [body]
    return loops


@dataclass(frozen=True)
class NoDevice:
    """As much of a Triton driver as compiling for a launch asks for; its number is no real device's.

    By the ``number`` Triton keeps what it has compiled: another one for each target.
    """

    target: compiler.GPUTarget = compiler.GPUTarget("cuda", 90, 32)
    number: int = 1000

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> compiler.GPUTarget:
        return self.target
