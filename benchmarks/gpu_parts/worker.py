"""A process for one job: `python -m benchmarks.gpu_parts.worker PARENT`, with the process that it ends with.

It imports what jobs need, says that it is ready, reads a `Job` from its input, and writes rows to its output, a line
each. What anything else prints goes to its error output, where it also says where it hangs if it does.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # before anything is imported that may print
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("selective_compile").setLevel(logging.INFO)  # which steps are not captured, say
    from benchmarks.gpu_parts.failures import DeviceLost
    from benchmarks.gpu_parts.isolated import GRACE, LOST, READY, end_with
    from benchmarks.gpu_parts.jobs import Job, perform
    from benchmarks.gpu_parts.rows import Row

    end_with(int(sys.argv[1]))
    # Now, while the job before this one runs: most of a process's start.
    import benchmarks.gpu_parts.steps
    import benchmarks.gpu_parts.trace  # noqa: F401

    print(f"\n{READY}", file=out, flush=True)
    if not (line := sys.stdin.readline()):
        return

    def tell(row: Row) -> None:
        print(row.to_json(), file=out, flush=True)

    job = Job.from_json(line)
    faulthandler.dump_traceback_later(job.seconds + GRACE / 2)
    try:
        perform(job, tell)
    except DeviceLost:
        sys.stderr.flush()
        os._exit(LOST)  # what is freed on the way out would fail


if __name__ == "__main__":
    main()
