"""How hard a model is tried: the requests, the engine's memory, and the padded batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from selective_compile.options import EngineConfig

BLOCK = 4
RESERVED = 10  # ids at the end of the vocabulary that may stand for images and the like


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Requests of 1 to ``longest`` prompt tokens, in a pool that holds one of the longest, a few tokens a step.

    Attributes:
        requests: how many.
        longest: the longest prompt; several times the tiny models' windows and chunks.
        new_tokens: most tokens that a request generates.
        pauses: most steps between two arrivals.
    """

    requests: int = 16
    longest: int = 22
    new_tokens: int = 12
    pauses: int = 2
    seed: int = 0

    @property
    def engine_config(self) -> EngineConfig:
        """A budget below the longest prompt, and blocks for the longest request alone."""
        blocks = -(-(self.longest + self.new_tokens) // BLOCK)
        return EngineConfig(
            token_budget=self.longest // 2, block_size=BLOCK, max_kv_tokens=blocks * BLOCK, compile=False
        )

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draw = random.Random(self.seed)
        lengths = [1, 2, self.longest, *(draw.randint(1, self.longest) for _ in range(self.requests - 3))]
        return [[draw.randrange(3, vocabulary - RESERVED) for _ in range(n)] for n in lengths[: self.requests]]

    def counts(self) -> list[int]:
        """How many tokens each request generates."""
        draw = random.Random(self.seed + 1)
        return [draw.randint(self.new_tokens // 2, self.new_tokens) for _ in range(self.requests)]

    def arrivals(self) -> list[int]:
        """Steps to run after each request has come."""
        draw = random.Random(self.seed + 2)
        return [draw.randint(0, self.pauses) for _ in range(self.requests)]


FULL = Trial()
QUICK = Trial(requests=8)


def padded_batches(vocabulary: int, *, batch: int = 3, length: int = 13) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, ids and mask ``[batch, length]``: rows padded on the left, on the right, and one of each."""
    generator = torch.Generator().manual_seed(7)
    for name, bounds in (
        ("left", ((6, length), (2, length), (0, length))),
        ("right", ((0, 4), (0, length - 2), (0, length))),
        ("mixed", ((0, 5), (7, length), (3, length - 4))),
    ):
        ids = torch.randint(3, vocabulary - RESERVED, (batch, length), generator=generator, device="cpu")
        mask = torch.zeros_like(ids)
        for row, (start, stop) in enumerate(bounds):
            mask[row, start:stop] = 1
        yield name, ids, mask
