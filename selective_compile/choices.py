"""What some options may be, for who asks before anything is loaded that computes."""

from __future__ import annotations

from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["model", "int8"]
KvDtype = Literal["auto", "int8", "fp8"]
# Far beyond the cores of any machine: OpenMP ends the process where the system gives it no more threads.
MOST_THREADS = 1024
