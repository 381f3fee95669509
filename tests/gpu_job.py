"""A job as tests of the GPU benchmark give it."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_parts.jobs import Job


def a_job(**values: Any) -> Job:
    return Job(**{"part": "ceilings", "name": "ceilings", "seconds": 60.0, "ceilings": None, "tiny": True, **values})
