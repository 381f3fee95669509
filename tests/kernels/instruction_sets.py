"""Native kernels compiled for instruction sets that this processor has besides its own."""

from __future__ import annotations

import ctypes
from pathlib import Path

from selective_compile.kernels import native

# v3: AVX2; v4: AVX-512 without bf16 products; the plain one: SSE2 and the fallbacks in portable C++.
ARCHITECTURES = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}


def runs(architecture: str) -> bool:
    return ARCHITECTURES[architecture] in native.processor().split()


def built_for(architecture: str, launcher: str, cache: Path) -> ctypes.CDLL:
    """The source beside a launcher, the Python file."""
    instead = {"-march=native": f"-march={architecture}", "-O3": "-O1"}  # which takes half as long to build
    flags = tuple(instead.get(flag, flag) for flag in native.FLAGS)
    return native.load(Path(launcher).with_suffix(".cpp"), cache=cache, flags=flags)
