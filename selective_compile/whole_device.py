"""What concerns all that a process does on its devices is done by one thread at a time.

While a step is captured, what other threads ask of CUDA may end the capture, and what they allocate may be refused; the
memory that the device has left is that of all; and weights that are moved are read by others where they lie.  Whoever
does one of these holds `ALONE`, so that several engines may be made, and warmed up, in threads of their own.  Of what
other libraries do, and of steps of other engines, it knows nothing: a capture that has failed is tried once more.
"""

from threading import RLock

ALONE = RLock()  # which who has it may take again, as an engine that is made within the work of another
