"""What figures are of: the checkout, the machine, and the state its devices were in. Nothing here starts CUDA, which
would hold memory and a context on the device for the whole run."""

from __future__ import annotations

import os
import platform
import subprocess

from benchmarks.gpu_parts.jobs import ROOT
from selective_compile.bench.machine import processor
from selective_compile.kept_captures import own_code

SECONDS = 5.0  # for a command, which takes one where nobody keeps the driver loaded
ABOUT = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "pstate",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
    "ecc.mode.current",
    "mig.mode.current",
)
# Why clocks are lower than they could be; older drivers have the second name.
THROTTLED = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def checkout() -> dict[str, object]:
    """The commit, where there is git and a repository, and in any case a digest of the package's code."""
    found: dict[str, object] = {"code": own_code()}
    if commit := _said("git", "-C", str(ROOT), "rev-parse", "HEAD"):
        found["commit"] = commit
        found["is_modified"] = bool(_said("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"))
    return found


def host() -> dict[str, object]:
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def devices() -> list[dict[str, str]]:
    """What nvidia-smi says of each; none where it is not there, or says nothing of them."""
    for fields in ((*ABOUT, THROTTLED[0]), (*ABOUT, THROTTLED[1]), ABOUT[:3]):
        said = _said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        if said:
            return [dict(zip(fields, line.split(", "), strict=False)) for line in said.splitlines()]
    return []


def _said(*command: str) -> str:
    """What it printed; nothing if it is not there, or failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, errors="replace", encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
