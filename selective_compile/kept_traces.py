"""What the passes have traced to ATen, on disk: a second start of a model need not trace it again.

A trace is found by what was traced (`passes.packed_trace`), and by all beside it that tracing depends on.
"""

from __future__ import annotations

import hashlib
import pickle

import transformers

from selective_compile.kept_captures import of_process
from selective_compile.kept_files import attempt, data_of, own_folder, was_of_use, write
from selective_compile.passes.packed_trace import PackedTrace

ENDING = ".trace"


class KeptTraces:
    """`Traces` of this user."""

    def get(self, key: str) -> PackedTrace | None:
        with attempt("take a kept trace"):
            file = own_folder() / named(key)
            if file.exists():
                found: PackedTrace = pickle.loads(data_of(file))
                was_of_use(file)
                return found
        return None

    def keep(self, key: str, trace: PackedTrace) -> None:
        with attempt("keep a trace"):
            write(own_folder() / named(key), pickle.dumps(trace))


def named(key: str) -> str:
    """Raises ValueError where what tracing depends on cannot be told."""
    told = [key, transformers.__version__, *of_process()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32] + ENDING
