"""A trace through an engine at the times of its arrivals, and what its requests had to wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig, LlamaConfig, PreTrainedModel

from selective_compile.bench.peers import greedy_without_end
from selective_compile.bench.sizes import DecoderShape
from selective_compile.bench.trace import Clock, Trace
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request

# What Granite-3.1-1B-A400M multiplies by.
GRANITE = {
    "attention_multiplier": 1 / 64,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """One request, in seconds from its arrival, whether the engine had time to look or not."""

    new_tokens: int
    first_token: float
    total: float


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """A trace served; `seconds` from its first arrival to its last token."""

    served: tuple[Served, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(one.new_tokens for one in self.served) / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.served) / self.seconds

    def quantile(self, name: str, share: float, *, per_token: bool = False) -> float:
        """Of `first_token` or `total`, over the requests; `per_token`: each divided by its tokens."""
        return quantile([getattr(one, name) / (one.new_tokens if per_token else 1) for one in self.served], share)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so large a share is not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def serve(engine: Engine, trace: Trace) -> TraceRun:
    """Submit each request when it arrives, and run the engine until all have ended; no token ends a request."""
    clock = Clock(trace)
    handles: list[tuple[float, Request]] = []
    while clock.more_to_come or engine.stats().running or engine.stats().waiting:
        for _, asked in clock.arrived():
            late = clock.now() - asked.arrival
            handles.append((late, engine.submit(asked.prompt_ids, greedy_without_end(asked.new_tokens))))
        if not engine.step():
            clock.wait_for_next()
    seconds = clock.now()
    served = []
    for late, handle in handles:
        timing = handle.timing
        assert timing.first_token is not None and timing.total is not None, handle
        served.append(
            Served(new_tokens=len(handle.tokens), first_token=late + timing.first_token, total=late + timing.total)
        )
    return TraceRun(served=tuple(served), seconds=seconds)


def random_decoder(shape: DecoderShape, seed: int = 0) -> PreTrainedModel:
    """A model of this shape with random weights, in float32; no token ends a sequence."""
    sizes = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if shape.experts:
            experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen}
            return AutoModelForCausalLM.from_config(GraniteMoeConfig(**sizes, **experts, **GRANITE)).eval()
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, head_dim=shape.size_of_head)).eval()
