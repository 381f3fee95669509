"""Philox gives the words of the published test vectors, and numbers that look uniform."""

from __future__ import annotations

import numpy as np
import pytest

from selective_compile.runtime.philox import philox4x32, uniform

# counter, key, result: from `kat_vectors` of Random123, the authors' own implementation, philox4x32 with 10
# rounds.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    got = philox4x32(words(counter), words(key))  # type: ignore[arg-type]
    assert " ".join(f"{int(word[0]):08x}" for word in got) == result


def test_a_number_depends_on_its_seed_and_index_alone() -> None:
    seeds, indices = [3, 2**63 + 5, 3, 0], [0, 1, 2**40, 7]
    together = uniform(seeds, indices)
    alone = [uniform([seed], [index])[0] for seed, index in zip(seeds, indices, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("vary", ["seed", "index"])
def test_numbers_are_uniform(vary: str) -> None:
    count = 20_000
    moving, still = list(range(count)), [11] * count
    numbers = uniform(moving, still) if vary == "seed" else uniform(still, moving)
    assert 0.0 <= numbers.min() and numbers.max() < 1.0
    observed, _ = np.histogram(numbers, bins=50, range=(0.0, 1.0))
    chi_square = ((observed - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 100  # 49 degrees of freedom: exceeded with probability 2e-5
