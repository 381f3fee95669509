"""What the benchmark runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from selective_compile.bench.sizes import LOADS, QUICK_LOADS, SHAPES, DecoderShape, ModelName, TraceName

DtypeName = Literal["float32", "bfloat16", "float16"]
Mode = Literal["saturated", "arriving"]
PeerName = Literal["engine", "generate", "generate_static", "generate_batch", "openvino", "vllm", "vllm_zentorch"]

DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "bfloat16")
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
MODELS: Final[tuple[ModelName, ...]] = get_args(ModelName)
TRACES: Final[tuple[TraceName, ...]] = get_args(TraceName)
PEERS: Final[tuple[PeerName, ...]] = get_args(PeerName)
# Those that need nothing but transformers; the others take minutes to prepare.
QUICK_PEERS: Final[tuple[PeerName, ...]] = ("engine", "generate", "generate_batch")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Everything that a result depends on besides machine and versions; `chosen` makes them by name.

    Attributes:
        model, trace: the names that results go by; `shape` and the numbers of tokens are what counts.
        prefix_tokens: that all prompts begin with, besides their own; then blocks are reused, where a peer can.
        prompt_tokens, output_tokens: both lengths are drawn log-uniformly from these, ends included.
        rounds: timed ones; one more goes before them to warm up.
        arrival_rate: requests per second in mode "arriving"; None: as many as the engine finished per second,
            all requests at once, so that arrivals last about as long as the engine needs for the work.
        token_budget: tokens per step of the engine, and of `generate_batch`.
        threads: of every peer.
        read_bytes: size of what is read to measure the bandwidth; far beyond any cache.
        pause: seconds of rest between runs: threads of an OpenMP that has no more work look for some for a while,
            those of Intel's for 0.2 s, at the cost of whoever runs next.
        quick: the sizes are not those that the names stand for.

    Raises:
        ValueError: a value outside of what it must be.
    """

    model: ModelName = "125m"
    trace: TraceName = "skewed"
    shape: DecoderShape = field(default_factory=DecoderShape)
    requests: int = 32
    prefix_tokens: int = 0
    prompt_tokens: tuple[int, int] = (8, 512)
    output_tokens: tuple[int, int] = (8, 256)
    seed: int = 0
    rounds: int = 3
    dtypes: tuple[DtypeName, ...] = DTYPES
    modes: tuple[Mode, ...] = ("saturated",)
    peers: tuple[PeerName, ...] = QUICK_PEERS
    arrival_rate: float | None = None
    token_budget: int = 512
    threads: int = field(default_factory=lambda: all_cores())
    compile: bool = True
    device: str = "cpu"
    read_bytes: int = 2**30
    pause: float = 0.3
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("requests", "rounds", "token_budget", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefix_tokens", "pause"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        _require_names(self.model, self.trace)
        for name, known in (("dtypes", get_args(DtypeName)), ("modes", MODES), ("peers", PEERS)):
            _require_some_of(name, getattr(self, name), known)
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be two numbers from 1 on, the smaller first, got {low}, {high}")
        if self.longest > self.shape.positions:
            raise ValueError(
                f"prefix_tokens, prompt_tokens and output_tokens must together be at most {self.shape.positions}, "
                f"got {self.prefix_tokens}, {self.prompt_tokens[1]} and {self.output_tokens[1]}"
            )
        if self.arrival_rate is not None and self.arrival_rate <= 0:
            raise ValueError(f"arrival_rate must be above 0, got {self.arrival_rate}")

    @property
    def longest(self) -> int:
        """Tokens that a request can have in the end."""
        return self.prefix_tokens + self.prompt_tokens[1] + self.output_tokens[1]


def _require_names(model: str, trace: str) -> None:
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {model!r}")
    if trace not in TRACES:
        raise ValueError(f"trace must be one of {', '.join(TRACES)}, got {trace!r}")


def _require_some_of(name: str, chosen: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
        listed = ", ".join(chosen) or "none"
        raise ValueError(f"{name} must be one or more of {', '.join(known)}, each once, got {listed}")


def all_cores() -> int:
    return len(os.sched_getaffinity(0))


def listed(names: str, known: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Of `a,b`, or `known` of `all`; whether there are such names is for `BenchSettings` to say."""
    if names == "all" and known:
        return known
    return tuple(name.strip() for name in names.split(",") if name.strip())


def chosen(
    *,
    quick: bool,
    model: ModelName = "125m",
    trace: TraceName = "skewed",
    requests: int | None = None,
    **values: Any,
) -> BenchSettings:
    """Settings of a model and a trace by their names; `quick` cuts all down to what shows in seconds that it runs.

    Args:
        requests: in place of as many as the trace has, of a quick run at most.
    """
    _require_names(model, trace)
    load = (QUICK_LOADS if quick else LOADS)[trace]
    if requests is None:
        requests = load.requests
    sizes: dict[str, Any] = {
        "model": model,
        "trace": trace,
        "requests": min(requests, load.requests) if quick else requests,
        "prefix_tokens": load.prefix_tokens,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
    }
    longest = load.prefix_tokens + load.prompt_tokens[1] + load.output_tokens[1]
    shape = SHAPES[model]
    if not quick:
        return BenchSettings(shape=replace(shape, positions=max(shape.positions, longest)), **sizes, **values)
    shape = replace(shape, experts=min(shape.experts, 4), chosen=min(shape.chosen, 2))
    settings = BenchSettings(
        shape=replace(
            shape, hidden=128, layers=2, heads=4, kv_heads=2, head_size=32, mlp=256, vocabulary=256, positions=256
        ),
        **sizes,
        **values,
    )
    return replace(
        settings,
        rounds=1,
        token_budget=min(settings.token_budget, 32),
        read_bytes=2**24,
        pause=0.0,
        quick=True,
    )
