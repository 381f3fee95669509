"""What the benchmark runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

DtypeName = Literal["float32", "bfloat16", "float16"]
Mode = Literal["saturated", "arriving"]
PeerName = Literal["engine", "generate", "generate_static", "generate_batch", "openvino", "vllm"]

DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "bfloat16")
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
PEERS: Final[tuple[PeerName, ...]] = get_args(PeerName)
# Those that need nothing but transformers; the others take minutes to prepare.
QUICK_PEERS: Final[tuple[PeerName, ...]] = ("engine", "generate", "generate_batch")


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of the Llama with random weights; the default is one of 125 million parameters."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    mlp: int = 2048
    vocabulary: int = 32_000
    positions: int = 2048


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Everything that a result depends on besides machine and versions.

    Attributes:
        prompt_tokens, output_tokens: both lengths are drawn log-uniformly from these, ends included.
        rounds: timed ones; one more goes before them to warm up.
        arrival_rate: requests per second in mode "arriving"; None: as many as the engine finished per second,
            all requests at once, so that arrivals last about as long as the engine needs for the work.
        token_budget: tokens per step of the engine, and of `generate_batch`.
        threads: of every peer.
        read_bytes: size of what is read to measure the bandwidth; far beyond any cache.

    Raises:
        ValueError: a value outside of what it must be.
    """

    shape: LlamaShape = field(default_factory=LlamaShape)
    requests: int = 32
    prompt_tokens: tuple[int, int] = (8, 512)
    output_tokens: tuple[int, int] = (8, 256)
    seed: int = 0
    rounds: int = 3
    dtypes: tuple[DtypeName, ...] = DTYPES
    modes: tuple[Mode, ...] = MODES
    peers: tuple[PeerName, ...] = QUICK_PEERS
    arrival_rate: float | None = None
    token_budget: int = 512
    threads: int = field(default_factory=lambda: all_cores())
    compile: bool = True
    device: str = "cpu"
    read_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("requests", "rounds", "token_budget", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, known in (("dtypes", get_args(DtypeName)), ("modes", MODES), ("peers", PEERS)):
            _require_some_of(name, getattr(self, name), known)
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be two numbers from 1 on, the smaller first, got {low}, {high}")
        if self.prompt_tokens[1] + self.output_tokens[1] > self.shape.positions:
            raise ValueError(
                f"prompt_tokens and output_tokens must together be at most {self.shape.positions}, "
                f"got {self.prompt_tokens[1]} and {self.output_tokens[1]}"
            )
        if self.arrival_rate is not None and self.arrival_rate <= 0:
            raise ValueError(f"arrival_rate must be above 0, got {self.arrival_rate}")


def _require_some_of(name: str, chosen: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
        listed = ", ".join(chosen) or "none"
        raise ValueError(f"{name} must be one or more of {', '.join(known)}, each once, got {listed}")


def all_cores() -> int:
    return len(os.sched_getaffinity(0))


def listed(names: str) -> tuple[Any, ...]:
    """Of `a,b`; whether there are such names is for `BenchSettings` to say."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def chosen(*, quick: bool, **values: Any) -> BenchSettings:
    """Settings with these values; `quick` cuts everything down to what shows in seconds that it runs."""
    settings = BenchSettings(**values)
    if not quick:
        return settings
    return replace(
        settings,
        shape=LlamaShape(hidden=128, layers=2, heads=4, kv_heads=2, mlp=256, vocabulary=256, positions=256),
        requests=min(settings.requests, 6),
        prompt_tokens=(4, 24),
        output_tokens=(2, 12),
        rounds=1,
        token_budget=min(settings.token_budget, 32),
        read_bytes=2**24,
    )
