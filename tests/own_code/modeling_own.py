"""Decoders written by hand in five forms, none of them that of a library.  It lies beside a checkpoint in the tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig  # noqa: TID252  (as code beside a checkpoint is written)

FORMS = ("parallel", "post_norm", "shared_keys", "windows", "running_mean")


def split(x: Tensor, heads: int) -> Tensor:
    """[B, S, width] -> [B, heads, S, width / heads]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def turned(x: Tensor, places: Tensor) -> Tensor:
    """Pairs of neighbours rotated, as complex numbers would be."""
    half = x.shape[-1] // 2
    angle = places[:, None].float() * torch.exp(-torch.arange(half, device=x.device) * (4.0 / half))
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(pairs, dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config: OwnConfig, number: int) -> None:
        super().__init__()
        self.form, self.heads, self.number = config.form, config.heads, number
        size = config.width // config.heads
        self.kept = size if config.form == "post_norm" else config.width  # there, one head of keys for all
        self.ask = nn.Linear(config.width, config.width)
        self.tell = nn.Linear(config.width, 2 * self.kept, bias=False)
        self.out = nn.Linear(config.width, config.width)
        self.gain = nn.Parameter(torch.randn(size) * 0.1 + 1)

    def forward(self, x: Tensor, known: Any) -> tuple[Tensor, Any]:
        length = x.shape[1]
        places = torch.arange(length, device=x.device)
        behind = places[:, None] - places[None, :]
        query = split(self.ask(x), self.heads)
        if self.form == "post_norm":
            key, value = self.tell(x).chunk(2, dim=-1)
            scores = torch.einsum("bhsd,btd->bhst", query, key) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(behind < 0, -torch.inf).softmax(-1)
            return self.out(torch.einsum("bhst,btd->bshd", weights, value).flatten(2)), None
        if known is None or self.form != "shared_keys":
            key, value = (split(part, self.heads) for part in self.tell(x).chunk(2, dim=-1))
            if self.form == "shared_keys":
                key = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + 1e-5) * self.gain
                key = turned(key, places)
            known = key, value
        key, value = known
        if self.form == "shared_keys":
            query = turned(query, places)
        scores = (query @ key.mT) / math.sqrt(query.shape[-1])
        if self.form == "parallel":
            slopes = 0.5 ** torch.arange(1, self.heads + 1, device=x.device)
            scores = scores - slopes[:, None, None] * behind
        hidden = behind < 0
        if self.form == "windows":
            hidden = hidden | (behind >= 3 + 4 * self.number)
        weights = torch.where(hidden, torch.finfo(scores.dtype).min, scores).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2)), known


class RunningMean(nn.Module):
    """Mixes tokens, and is no attention."""

    def __init__(self, config: OwnConfig, number: int) -> None:
        super().__init__()
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, known: Any) -> tuple[Tensor, Any]:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.out(x.cumsum(1) / counts[:, None]), known


class Gated(nn.Module):
    """Every expert on every token, weighed by a softmax."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, 3)
        self.up = nn.Parameter(torch.randn(3, config.width, 40) / config.width**0.5)
        self.down = nn.Parameter(torch.randn(3, 40, config.width) / 40**0.5)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bsec,ecw->bsew", torch.einsum("bsw,ewc->bsec", x, self.up).relu(), self.down)
        return (each * self.gate(x).softmax(-1)[..., None]).sum(2)


class Layer(nn.Module):
    def __init__(self, config: OwnConfig, number: int) -> None:
        super().__init__()
        self.form = config.form
        self.mix = (RunningMean if config.form == "running_mean" else Attention)(config, number)
        wide = nn.Sequential(nn.Linear(config.width, 48), nn.GELU(), nn.Linear(48, config.width))
        self.feed = Gated(config) if config.form == "windows" else wide
        self.first, self.second = nn.LayerNorm(config.width), nn.LayerNorm(config.width)

    def forward(self, x: Tensor, known: Any) -> tuple[Tensor, Any]:
        if self.form == "parallel":
            calm = self.first(x)
            mixed, known = self.mix(calm, known)
            return x + mixed + self.feed(calm), known
        if self.form == "post_norm":
            mixed, known = self.mix(x, known)
            x = self.first(x + mixed)
            return self.second(x + self.feed(x)), known
        mixed, known = self.mix(self.first(x), known)
        x = x + mixed
        return x + self.feed(self.second(x)), known


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.symbols = nn.Embedding(config.symbols, config.width)
        self.places = nn.Embedding(config.reach, config.width) if config.form == "post_norm" else None
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.depth))
        self.head = nn.Linear(config.width, config.symbols, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutput:
        x = self.symbols(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(input_ids.shape[1], device=x.device))
        known = None
        for layer in self.layers:
            x, known = layer(x, known)
        return CausalLMOutput(logits=self.head(x))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}  # it has no cache
