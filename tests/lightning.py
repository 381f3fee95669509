"""A decoder of linear attention with a decay, which cuts a request into blocks with a state between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.decoders import Residual

VOCABULARY, WIDTH, HEADS, BLOCK = 31, 16, 2, 16
SLOPES = (0.02, 0.3)
Decay = Callable[[Tensor], Tensor]  # of distances [S, S], 0 where a token is behind: to factors [H, S, S]


def geometric(distance: Tensor) -> Tensor:
    return torch.exp(-torch.tensor(SLOPES)[:, None, None] * distance)


class Mixer(nn.Module):
    """``kept``: of a state, what is left for each block behind; 1 is what the decay leaves by itself."""

    def __init__(self, decay: Decay, kept: float, block: int | None) -> None:
        super().__init__()
        self.qkv, self.kept, self.block = nn.Linear(WIDTH, 3 * WIDTH), kept, block
        self.decay, self.heads = decay, (HEADS, HEADS, HEADS)
        self.slopes = nn.Buffer(torch.tensor(SLOPES)[:, None, None])
        self.table = nn.Buffer(self.factors(block)) if block else None

    def factors(self, tokens: int) -> Tensor:
        places = torch.arange(tokens)
        distance = places[:, None] - places
        return torch.where(distance >= 0, self.decay(distance), 0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        _, tokens, _ = hidden.shape
        rows = self.qkv(hidden).view(1, tokens, HEADS, -1).transpose(1, 2)
        query, key, value = (rows[:, :n] for rows, n in zip(rows.split(WIDTH // HEADS, dim=3), self.heads))  # noqa: B905
        if self.block is None:
            mixed = (query @ key.transpose(-1, -2) * self.factors(tokens)) @ value
        else:
            mixed = self.by_blocks(query, key, value, tokens)
        return F.rms_norm(mixed.transpose(1, 2).reshape(1, tokens, WIDTH), (WIDTH,))

    def by_blocks(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> Tensor:
        state, found = torch.zeros(1, HEADS, WIDTH // HEADS, WIDTH // HEADS), []
        for block in range((tokens + self.block - 1) // self.block):
            begin, end = block * self.block, min((block + 1) * self.block, tokens)
            q, k, v = (rows[:, :, begin:end] for rows in (query, key, value))
            places = torch.arange(1, end - begin + 1)[:, None]
            within = (q @ k.transpose(-1, -2) * self.table[:, : end - begin, : end - begin]) @ v
            found.append(within + (q * torch.exp(-self.slopes * places)) @ state)
            left = torch.exp(-self.slopes * (end - begin - places))
            state = self.kept * torch.exp(-self.slopes * (end - begin)) * state + (k * left).transpose(-1, -2) @ v
        return torch.cat(found, dim=2)


class Lightning(Residual):
    def __init__(self, decay: Decay = geometric, kept: float = 1.0, block: int | None = BLOCK) -> None:
        super().__init__(lambda: Mixer(decay, kept, block), VOCABULARY, WIDTH)
