"""The command line: `selective-compile`, or `python -m selective_compile`."""

from __future__ import annotations

import io
import os
import signal
import sys

from selective_compile.interrupts import end_at_once


def main() -> None:
    """An interrupt is one word and a status from here to the end of the process; work is told by an exception."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end_at_once)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal has no character for is no reason to end
            stream.reconfigure(errors="replace")
    from selective_compile.cli import main as run

    try:
        try:
            run()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()  # an interrupt that comes now ends the process as it is
    except OSError as error:  # of what is printed: there is no room for it, or nobody reads it
        if not isinstance(error, BrokenPipeError):
            os.write(2, f"error: {error}\n".encode())
        os._exit(1)


if __name__ == "__main__":
    main()
