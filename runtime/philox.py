"""Random numbers that are a function of (seed, index): Philox 4x32-10, vectorised over rows.

From "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., SC 2011). A generator with a state per
request would have to be advanced, and restored after a preemption; this one is asked for the number it would
have come to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox4x32(counter: Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Words:
    """Four random 32-bit words a row, from four of counter and two of key, all held in uint64 [S]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & LOW, (first >> HALF) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """[S] numbers in [0, 1) with 53 random bits, one for each (64-bit seed, index)."""
    seed = np.array(seeds, dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    zero = np.zeros_like(index)
    high, low, _, _ = philox4x32((index & LOW, index >> HALF, zero, zero), (seed & LOW, seed >> HALF))
    return ((high << HALF | low) >> np.uint64(11)).astype(np.float64) * 2.0**-53
