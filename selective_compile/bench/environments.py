"""Virtual environments of other engines, which bring their own versions of everything: made once, kept in the cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selective_compile.kernels.native import cache_folder


class CommandError(RuntimeError):
    """A command of another engine's environment failed; the message has the end of what it said."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is to be installed, and which packages that come with it must not stay.

    Where torch is among it, at its exact version, and all at once: left to choose, pip takes builds of some GB each.
    """

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        wanted = repr((self.requirements, self.without, sys.version_info[:2]))
        return cache_folder() / "peers" / f"{self.name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"

    def python(self) -> Path:
        """Its interpreter; the environment is made if it is not there.

        Raises:
            CommandError: pip failed.
        """
        binary = self.folder / "bin" / "python"
        done = self.folder / "installed"
        if not done.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            venv.create(self.folder, with_pip=True)
            if self.requirements:
                self._pip(binary, "install", *self.requirements)
            if self.without:
                self._pip(binary, "uninstall", "-y", *self.without)
            done.touch()
        return binary

    def _pip(self, python: Path, *arguments: str) -> None:
        run([str(python), "-m", "pip", *arguments, "--quiet"], f"pip {' '.join(arguments)}")


def run(command: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Wait for a command to end well.

    Raises:
        CommandError: it did not.
    """
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, encoding="utf-8", errors="replace"
    )
    if ended.returncode:
        raise CommandError(f"{what} failed: {(ended.stdout + ended.stderr)[-2000:].strip()}")
