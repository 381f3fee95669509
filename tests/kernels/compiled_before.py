"""What kernels took that were compiled ahead of time before, which need not be compiled again: the same source, for the
same GPU, by the same compiler, is the same machine code.

`compiled_before.json` has those that passed all that `ahead_of_time.assert_ships` asks, by test file, under what they
were made of (`Ahead.key`) and the text of what was asked of them: whatever changes of either makes another key, and
what has none is compiled, as every kernel is with another release of Triton. `pytest --record-compiled` writes anew
what belongs to the test files that it runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

Took = str  # for a reader
HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class CompiledBefore:
    """The kernels of a file, and those that this process was asked for."""

    path: Path
    asks: str  # the text of the checks
    seen: dict[str, dict[str, Took]] = field(default_factory=dict)

    @cached_property
    def known(self) -> dict[str, dict[str, Took]]:
        """By test file and key."""
        return self._read()

    def what_shipped(self, made_of: str, compiled: Callable[[], Took]) -> Took:
        """What a kernel took when it was compiled, now if it never was; it is an error if that does not ship."""
        key = hashlib.sha256(f"{made_of} {self.asks}".encode()).hexdigest()
        before = next((kernels[key] for kernels in self.known.values() if key in kernels), None)
        took = compiled() if before is None else before
        test_file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        self.seen.setdefault(test_file, {})[key] = took
        return took

    def record(self, seen: Mapping[str, dict[str, Took]]) -> None:
        """Write anew what belongs to these test files."""
        whole = self._read() | seen
        self.path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, dict[str, Took]]:
        found: dict[str, dict[str, Took]] = json.loads(self.path.read_text(encoding="utf-8"))
        return found


COMPILED_BEFORE = CompiledBefore(
    path=HERE / "compiled_before.json", asks=(HERE / "ahead_of_time.py").read_text(encoding="utf-8")
)


class Recorder:
    """Of a run with `--record-compiled`: gathers what its processes have seen, and writes it at the end."""

    def __init__(self, before: CompiledBefore) -> None:
        self.before = before
        self.seen: dict[str, dict[str, Took]] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.gather(getattr(node, "workeroutput", {}).get("compiled", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["compiled"] = self.before.seen
            return
        self.gather(self.before.seen)
        self.before.record(self.seen)

    def gather(self, seen: Mapping[str, dict[str, Took]]) -> None:
        for test_file, kernels in seen.items():
            self.seen.setdefault(test_file, {}).update(kernels)
