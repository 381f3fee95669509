"""A hand-written decoder that is in no library; each part can be swapped for another spelling, or a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, MAX_POSITIONS = 97, 32, 4, 256
HEAD_SIZE = WIDTH // HEADS

# q [B, S, H, D], k and v [B, S, K, D], mask -> [B, S, H * D]
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
# ids [B, S], attention mask [B, S] or None -> what Attend takes
MakeMask = Callable[[Tensor, Any], Any]
Mix = Callable[[Tensor], Tensor]  # [B, S, h] -> [B, S, h]
Number = Callable[[Tensor], Tensor]  # ids [B, S] -> positions [S] or [B, S]


class Residual(nn.Module):
    """Two layers ``[B, S, h] -> [B, S, h]`` between an embedding and a head, each added to what it is given."""

    def __init__(self, layer: Callable[[], nn.Module], vocabulary: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def tril_mask(ids: Tensor, attention_mask: Any) -> Tensor:
    """[B or 1, 1, S, S] booleans, True to keep."""
    length = ids.shape[1]
    kept = torch.tril(torch.ones(length, length, dtype=torch.bool, device=ids.device))[None, None]
    return kept if attention_mask is None else kept & attention_mask[:, None, None, :].bool()


def compared_mask(ids: Tensor, attention_mask: Any) -> Tensor:
    places = torch.arange(ids.shape[1], device=ids.device)
    kept = (places[None, :] <= places[:, None])[None, None]
    return kept if attention_mask is None else kept & (attention_mask != 0)[:, None, None, :]


def additive_mask(ids: Tensor, attention_mask: Any) -> Tensor:
    """[B or 1, 1, S, S] floats, -inf to hide; a finite value where padding hides, as whole rows may be hidden."""
    hidden = ~compared_mask(ids, attention_mask)
    return torch.zeros(hidden.shape, device=ids.device).masked_fill(hidden, torch.finfo(torch.float32).min)


def window_mask(size: int) -> MakeMask:
    def make(ids: Tensor, attention_mask: Any) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return tril_mask(ids, attention_mask) & (places[:, None] - places[None, :] < size)

    return make


def no_mask(ids: Tensor, attention_mask: Any) -> None:
    return None


def repeated(heads: Tensor) -> Tensor:
    """[B, S, K, D] -> [B, S, H, D]"""
    return heads.repeat_interleave(HEADS // heads.shape[2], dim=2)


def expanded(heads: Tensor) -> Tensor:
    batch, length, count, size = heads.shape
    wide = heads[:, :, :, None].expand(batch, length, count, HEADS // count, size)
    return wide.reshape(batch, length, HEADS, size)


def by_einsum(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query / math.sqrt(HEAD_SIZE), repeated(key))
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)


def by_matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """``mask`` is added to the scores."""
    q, k, v = (x.transpose(1, 2) for x in (query, expanded(key), expanded(value)))
    weights = F.softmax(q @ k.transpose(-1, -2) * HEAD_SIZE**-0.5 + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).transpose(1, 2).flatten(2)


def by_bmm(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Batch and heads merged; ``mask`` [1, 1, S, S] keeps."""
    batch, length = query.shape[:2]
    q, k, v = (x.transpose(1, 2).reshape(batch * HEADS, length, -1) for x in (query, repeated(key), repeated(value)))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(HEAD_SIZE)
    weights = torch.where(mask[0], scores, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.bmm(weights, v).view(batch, HEADS, length, -1).transpose(1, 2).reshape(batch, length, -1)


def by_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As "Dive into Deep Learning" has it: batch, heads and queries merged, each told how many keys it sees."""
    batch, length = query.shape[:2]
    q, k, v = (x.transpose(1, 2).reshape(batch * HEADS, length, -1) for x in (query, repeated(key), repeated(value)))
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(HEAD_SIZE)
    places = torch.arange(length)
    seen = torch.repeat_interleave((places + 1).repeat(batch, 1), repeats=HEADS, dim=0)  # [B * H, S]
    rows = scores.reshape(-1, length)
    rows[~(places[None, :] < seen.reshape(-1)[:, None])] = -1e6
    weights = rows.reshape(scores.shape).softmax(-1)
    return torch.bmm(weights, v).view(batch, HEADS, length, -1).transpose(1, 2).reshape(batch, length, -1)


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def by_softcapped_einsum(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query, repeated(key)) * HEAD_SIZE**-0.5
    capped = torch.tanh(scores / 3.0) * 3.0
    weights = capped.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, repeated(value)).flatten(2)


def counted(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)


def unchanged(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    def __init__(self, attend: Attend, mix: Mix, kv_heads: int) -> None:
        super().__init__()
        self.attend, self.mix, self.kv_heads = attend, mix, kv_heads
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * HEAD_SIZE)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """[B, S, h] -> [B, S, h]"""
        fused = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS + 2 * self.kv_heads, HEAD_SIZE))
        query, key, value = fused.split([HEADS, self.kv_heads, self.kv_heads], dim=2)
        x = x + self.out(self.attend(query, key, value, mask))
        return self.mix(x + self.down(F.gelu(self.up(self.norms[1](x)))))


class Decoder(nn.Module):
    """Token ids [B, S] and, optionally, an attention mask [B, S] to logits [B, S, V]; positions are learned."""

    def __init__(
        self,
        *,
        attend: Attend = by_einsum,
        mask: MakeMask = tril_mask,
        mix: Mix = unchanged,
        positions: Number = counted,
        kv_heads: int = HEADS,
        layers: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mask, self.positions = mask, positions
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MAX_POSITIONS, WIDTH)
        self.blocks = nn.ModuleList([Block(attend, mix, kv_heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.dim() == 2:
                    weight.normal_(std=0.3)
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(self.positions(input_ids))
        mask = self.mask(input_ids, attention_mask)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Small(nn.Module):
    """The parts of a model of one product, with a tensor of its own that is no weight; others give it a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.held = torch.full((8,), 3.0)
