"""How many registers a thread of a Triton launch may have."""

from __future__ import annotations

from typing import Final, Literal

import torch

Backend = Literal["cuda", "hip"]
# Of a processor for CUDA, which the threads of a program share; and the most that one can have.
SHARED, MOST = 65536, 255
THREADS: Final = 32  # of a warp for CUDA


def backend() -> Backend:
    """What Triton compiles for here; where there is no GPU, what the interpreter is told makes no difference."""
    return "hip" if torch.version.hip else "cuda"


def warps(count: int, backend: Backend) -> dict[str, int]:
    """Options of a launch of so many warps.

    As many registers as a thread can have, said so: by itself the assembler for CUDA spills a few to have room for one
    more block of threads beside the others.
    """
    return {"num_warps": count} | ({"maxnreg": min(MOST, SHARED // (THREADS * count))} if backend == "cuda" else {})
