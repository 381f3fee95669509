"""What native kernels refuse, by the status that they return: 0 is none."""

from __future__ import annotations

BAD_ENDS = 6
REFUSALS = {
    1: "cu_seqlens_q must start at 0, never fall, and end at or below the number of rows",
    2: "context_lens must be at least the request's rows and at most max_blocks * block_size",
    3: "block_table must name blocks of the pool",
    4: "slot_mapping must name slots of the pool, or be negative",
    BAD_ENDS: "ends must be in order and among the rows",
    7: "groups must not be negative",
    8: "the index must be among the rows",
}
