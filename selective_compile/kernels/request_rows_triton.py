"""Which request a row of the batch belongs to, and which rows a program of a launch has, in Triton.

A launch has as many programs as there can be tiles, whatever the lengths: a request of n rows has at most
n // BLOCK_Q + 1 tiles, and its first is number cu_seqlens_q[i] // BLOCK_Q + i of all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of(cu_seqlens_q, num_requests, row, BLOCK_Q: tl.constexpr):
    """The last request that begins at or before the row, or, with BLOCK_Q above 0, whose first tile of so many rows is
    at or before tile `row`; behind all of them it is num_requests."""
    low = num_requests * 0
    high = num_requests
    while low < high:
        middle = (low + high + 1) // 2
        start = tl.load(cu_seqlens_q + middle)
        if BLOCK_Q > 0:
            start = start // BLOCK_Q + middle
        starts_later = start > row
        high = tl.where(starts_later, middle - 1, high)
        low = tl.where(starts_later, low, middle)
    return low


@triton.jit
def tile_rows(cu_seqlens_q, num_requests, num_rows, tile, BLOCK_Q: tl.constexpr):
    """The tile's request, the rows of that [begin, end), and the first row of the tile, which may be past the end.

    Rows behind those of all requests are those of one more.
    """
    request = request_of(cu_seqlens_q, num_requests, tile, BLOCK_Q)
    begin = tl.load(cu_seqlens_q + request)
    end = tl.load(cu_seqlens_q + request + 1, mask=request < num_requests, other=num_rows)
    return request, begin, end, begin + (tile - begin // BLOCK_Q - request) * BLOCK_Q
