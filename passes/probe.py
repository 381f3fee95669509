"""What the masks of an attention were seen to be on some requests: what `mask_probes` makes and proofs read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Masks of G requests: entry ``[g, ..., i, j]`` is for the query at ``positions[g, i]``, the key at
    ``positions[g, j]``.

    Attributes:
        positions: [G, L], ascending.
        allowed: [G, L, L] booleans.
        bias: [G, heads, L, L] float64, what is added to the scores of allowed pairs; 1 for heads if it is the same for
            all of them, 0 if nothing is added.
        hidden_keys, real_queries: [G, L] booleans, by the padding input.
        looked_up: [G, L, L], the rows of a `BiasLookup` that pairs look up; None without one.
        table: [L or 1, heads, rows], what they were looked up in; None without one.
    """

    positions: torch.Tensor
    allowed: torch.Tensor
    bias: torch.Tensor
    hidden_keys: torch.Tensor
    real_queries: torch.Tensor
    looked_up: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @cached_property
    def distance(self) -> torch.Tensor:
        """[G, L, L]: how far back the key is."""
        return self.positions[:, :, None] - self.positions[:, None, :]

    @cached_property
    def overflows(self) -> torch.Tensor:
        """[G, L]: real queries that a bias is added for which is infinite, or no number."""
        return (~self.bias.isfinite()).any(3).any(1) & self.real_queries

    @cached_property
    def counted(self) -> torch.Tensor:
        """[G, L, L]: pairs whose scores matter, of queries whose biases are numbers."""
        return self.allowed & (self.real_queries & ~self.overflows)[:, :, None]

    @property
    def heads(self) -> int:
        return self.bias.shape[1]
