"""Models of somebody's own with biases by distance and sinks of each token: exact in an engine, and when they learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import selective_compile as sc
from tests.decoders import VOCABULARY as WORDS
from tests.decoders import Decoder, Residual
from tests.exactness import TOLERANCE, engine_error, padded_error, step_program

VOCABULARY, HEADS, SIZE = 31, 4, 8
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """Its ``bias`` gives [B or 1, H, S, S], of hidden values [B, S, h] and how far back keys are [S, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relative = nn.Embedding(12, HEADS)
        self.profiles = nn.Linear(WIDTH, HEADS * 6)
        self.sinks = nn.Linear(WIDTH, HEADS)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.tanh()
        query, key, value = self.qkv(hidden).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        places = torch.arange(hidden.shape[1])
        distance = places[:, None] - places[None, :]
        scores = query @ key.mT * SIZE**-0.5 + self.bias(hidden, distance)
        mixed = self.mixed(scores.masked_fill(distance < 0, -math.inf), value, hidden)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def mixed(self, scores: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        return scores.softmax(-1) @ value

    def bias(self, hidden: Tensor, distance: Tensor) -> Tensor:
        raise NotImplementedError


class LikeT5(Attention):
    def bias(self, hidden: Tensor, distance: Tensor) -> Tensor:
        far = 6 + (distance.float().clamp(min=1) / 6).log2().long()
        bucket = torch.where(distance < 6, distance.clamp(min=0), far.clamp(max=11))
        return self.relative(bucket).permute(2, 0, 1)[None]


class LikeInkling(Attention):
    def bias(self, hidden: Tensor, distance: Tensor) -> Tensor:
        numbers = self.profiles(hidden).unflatten(-1, (HEADS, 6)).transpose(1, 2)
        found = numbers.gather(-1, distance.clamp(0, 5).expand(*numbers.shape[:2], -1, -1))
        far = (1 + torch.arange(hidden.shape[1]).float()).log()[:, None].to(hidden.dtype)
        return found.masked_fill((distance < 0) | (distance > 5), 0.0) * far


class WithSinks(LikeInkling):
    def mixed(self, scores: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        sinks = self.sinks(hidden).transpose(1, 2)[..., None]
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value


def model_of(kind: type[Attention]) -> Residual:
    return Residual(kind, VOCABULARY, WIDTH).eval()


@pytest.mark.parametrize("kind", [LikeT5, LikeInkling, WithSinks])
def test_they_are_ragged_and_exact(kind: type[Attention]) -> None:
    model = model_of(kind)
    assert engine_error(model, vocabulary=VOCABULARY) < TOLERANCE
    error, report = padded_error(model, vocabulary=VOCABULARY, masked=False)
    assert report.ok and error < TOLERANCE


@pytest.mark.parametrize("kind", [LikeT5, WithSinks])
def test_their_weights_are_read_at_each_step(kind: type[Attention]) -> None:
    model = model_of(kind)
    program = step_program(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    assert engine_error(model, vocabulary=VOCABULARY, program=program) < TOLERANCE


@pytest.mark.parametrize("kind", [LikeT5, WithSinks])
def test_a_compiled_step_with_8_bit_keys_gives_the_tokens_of_one_that_is_not_compiled(kind: type[Attention]) -> None:
    model = model_of(kind)
    found = []
    for compiles in (False, True):
        engine = sc.Engine(model, sc.EngineConfig(max_kv_tokens=512, kv_dtype="int8", compile=compiles))
        with engine.running():
            requests = [engine.submit(list(range(1, n)), max_new_tokens=8) for n in (3, 9, 21)]
            found.append([request.result().tokens for request in requests])
    assert found[0] == found[1] and all(len(tokens) == 8 for tokens in found[0])


def of_the_query(query: Tensor, key: Tensor, value: Tensor, distance: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key)
    near = query.transpose(1, 2).gather(-1, distance.clamp(0, 3).expand(*scores.shape))
    weights = (scores + near).masked_fill(distance < 0, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


class Tabled(Decoder):
    """Reads how far tokens are from one another in an attribute."""

    def __init__(self) -> None:
        super().__init__(attend=of_the_query, mask=self.read, layers=1)
        places = torch.arange(64)
        self.table = places[:, None] - places[None, :]

    def read(self, ids: Tensor, attention_mask: object) -> Tensor:
        return self.table[: ids.shape[1], : ids.shape[1]]


def test_distances_may_be_read_in_a_table_which_bounds_requests() -> None:
    model = Tabled().eval()
    program = step_program(model)
    assert program.max_positions == 64
    assert engine_error(model, vocabulary=WORDS, program=program) < TOLERANCE
