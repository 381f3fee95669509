"""The cores that this process may use, and how many threads are to use them.

OpenMP threads that wait for one another at the end of each operation spin, for a millisecond or so: where there are
more of them than cores, those that wait keep the cores from those that work.  OpenMP looks at the process's affinity
alone; the quota of a container, a share of the machine's time, it does not know.  Nor does it know of other processes:
see `shared_cores`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from selective_compile.shared_cores import SharedCores

logger = logging.getLogger(__name__)
OWN_GROUPS = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def available_cores(own_groups: Path = OWN_GROUPS, mounted: Path = MOUNTED) -> int:
    """How many cores this process can keep busy, by its affinity and the quotas of its cgroups; at least 1.

    Args:
        own_groups: the file that names the process's groups, as Linux has it.
        mounted: where their files are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Threads that wait for one another stop together when a quota is used up: a thread for a part of a core stops all.
    return max(1, min([cores, *map(int, _quotas(own_groups, mounted))]))


def _quotas(own_groups: Path, mounted: Path) -> Iterator[float]:
    """In cores, of the process's groups and of those around them."""
    with suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
                top = mounted / controllers
                # Within a container the path may be that outside of it; the top is its own then.
                for group in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
                    yield from _quota(group)
                    if group == top:
                        break


def _quota(group: Path) -> Iterator[float]:
    for read in (_second_version, _first_version):
        with suppress(OSError, ValueError):  # no such file, or "max" in it
            yield read(group)


def _second_version(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
    return int(quota) / int(period)


def _first_version(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
    if quota <= 0:
        raise ValueError("no quota")
    return quota / int((group / "cpu.cfs_period_us").read_text(encoding="utf-8"))


class IntraOpThreads:
    """Within, torch's operations and ours use so many threads where this thread calls them; behind it, as before.

    One at a time: it keeps what it found.
    """

    def __init__(self, wanted: int | None, *, available: int | None = None) -> None:
        """
        Args:
            wanted: None: as torch says, but no more than there are cores.
            available: how many there are; None: `available_cores`.
        """
        self._wanted = wanted
        self._available = available_cores() if available is None else available
        self._before: int | None = None
        self._shared = SharedCores()

    @property
    def number(self) -> int:
        """How many they are, if entered in this thread."""
        return self._wanted or min(torch.get_num_threads(), self._available)

    def warn(self) -> None:
        """Log what a user may not expect."""
        if self._wanted is not None and self._wanted > self._available:
            logger.warning(
                "threads=%d on %d cores: those that wait keep them from others", self._wanted, self._available
            )
        elif self._wanted is None and self.number < torch.get_num_threads():
            logger.warning(
                "steps run on %d threads, as many as this process has cores, and not on torch's %d; "
                "EngineConfig(threads=...) says otherwise",
                *(self.number, torch.get_num_threads()),
            )

    def __enter__(self) -> None:
        before, number = torch.get_num_threads(), self.number
        if number > 1:  # one waits for nobody
            self._shared.look()
        if number != before:
            torch.set_num_threads(number)
            self._before = before

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
