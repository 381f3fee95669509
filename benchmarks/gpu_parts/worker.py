"""A process for one job: `python -m benchmarks.gpu_parts.worker PARENT`, with the process that it ends with.

It imports what jobs need, says that it is ready, reads a `Job` from its input, and writes rows to its output, a line
each. What anything else prints goes to its error output.
"""

from __future__ import annotations

import os
import sys

from benchmarks.gpu_parts.isolated import READY, end_with
from benchmarks.gpu_parts.jobs import Job, perform
from benchmarks.gpu_parts.rows import Row


def main() -> None:
    end_with(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Now, while the job before this one runs: most of a process's start.
    import benchmarks.gpu_parts.steps
    import benchmarks.gpu_parts.trace  # noqa: F401

    print(READY, file=out, flush=True)
    if not (line := sys.stdin.readline()):
        return

    def tell(row: Row) -> None:
        print(row.to_json(), file=out, flush=True)

    perform(Job.from_json(line), tell)


if __name__ == "__main__":
    main()
