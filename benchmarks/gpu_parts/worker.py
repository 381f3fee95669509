"""A process for one job: `python -m benchmarks.gpu_parts.worker PARENT`, with the process that it ends with.

It imports what jobs need, says that it is ready, reads a `Job` from its input, and writes rows to its output, a line
each. What anything else prints goes to its error output, where it also says where it hangs if it does.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback

from benchmarks.gpu_parts.watching import end_with, say_where_after


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # before anything is imported that may print
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("selective_compile").setLevel(logging.INFO)  # which steps are not captured, say
    from benchmarks.gpu_parts.failures import FAILURES, DeviceLost
    from benchmarks.gpu_parts.isolated import GRACE, LOST, READY
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
    say_where_after(job.seconds + GRACE / 2)
    try:
        perform(job, tell)
    except DeviceLost:
        _end(LOST)
    except FAILURES:
        traceback.print_exc()
        _end(1)
    _end(0)


def _end(status: int) -> None:
    """At once, with the processes that it started: torch waits at exit for those that compile, for minutes it may be,
    and where the device is lost what is freed on the way out would fail. What is kept on disk is written by then, by
    whoever compiles and captures, before the first call returns."""
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(status)


if __name__ == "__main__":
    main()
