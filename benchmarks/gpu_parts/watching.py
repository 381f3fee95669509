"""What a process looks at beside its work, in threads of its own: whether its parent is there, and where it hangs.

It imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

LOOK = 0.5  # seconds between two looks at whether the parent is there


def end_with(parent: int) -> None:
    """Kill this process, and those that it started, when its parent has ended, which then can do it no more: what it
    measures nobody reads, and it would hold its device.

    Of a process with a session of its own. A call that never gives up the interpreter's lock is not ended.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def say_where_after(seconds: float) -> None:
    """Write to the error output where the main thread is by then, if this process has not ended: once, since whoever
    asks for a thread's frames while Dynamo traces there may break it.

    By the interpreter itself: `faulthandler.dump_traceback_later` looks at threads while they run, and has crashed
    Python 3.12 by that.
    """

    def say() -> None:
        time.sleep(seconds)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere\n"
        sys.stderr.write(f"after {seconds:.1f} s it is here, the innermost call last:\n{where}")
        sys.stderr.flush()

    threading.Thread(target=say, daemon=True).start()
