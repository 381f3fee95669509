"""What a user can choose: `EngineConfig` for the engine, `BackendOptions` for `torch.compile`."""

from __future__ import annotations

import dataclasses
import operator
import os
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch

from selective_compile.choices import MOST_THREADS, KvDtype, Weights
from selective_compile.implementations import Implementation

Fallback = Literal["sequential", "isolated", "refuse"]
SchedulerPolicy = Literal["max_utilization", "guaranteed_no_evict"]
WaitingOrder = Literal["first_come", "priority", "deadline", "fair"]
Latents = Literal["compressed", "expanded"]
Batching = Literal["static", "inflight", "inflight_fused"]


class _NamedOptions:
    """Refuses, with a ValueError, options that do not exist or have no name, before the dataclass below sees them."""

    def __new__(cls, *unnamed: Any, **options: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if unnamed:
            raise ValueError(
                f"options of {cls.__name__} must be given by keyword, as in {cls.__name__}({known[0]}=...), got "
                f"{unnamed[0]!r} without a name"
            )
        for name in options:
            if name not in known:
                raise ValueError(f"option of {cls.__name__} must be one of {', '.join(known)}, got {name!r}")
        return super().__new__(cls)


# Far beyond any memory: tensors and counters end in errors that name no option.
MOST_TOKENS = 2**31 - 1
MOST_BYTES = 2**63 - 1
# What a step is put together in is allocated for as many: 2 GiB.
MOST_OF_A_STEP, MOST_REQUESTS = 2**24, 2**20


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_NamedOptions):
    """How the engine schedules and what memory it takes.

    Attributes:
        token_budget: most tokens computed in one step, prefill and decode together.
        max_requests: most requests in one step; more wait.
        block_size: slots in a block, the unit in which KV memory is given out and shared: the leading tokens that
            requests have in common are computed once in whole blocks. By default 32, and 128 where torch has a GPU, so
            that the keys of an iteration of the attention kernels lie in one block.
        max_kv_tokens: slots of KV memory, rounded down to whole blocks; None: from the memory that is free, on a CPU at
            most 4 GiB.
        kv_memory_fraction: the share of the free memory that the KV pools may take when max_kv_tokens is
            None; on a GPU, of what is free beside a step of the largest budget, which is run once to find out.
        host_kv_bytes: host memory for keys and values that the KV memory has no room for: of requests that were
            preempted, and of prefixes that nobody holds. They are copied back where that takes less time than to
            compute them again, by the times measured so far; needs `block_reuse`.
        max_attention_window: most positions that a token attends to, its own included, as in a sliding window over the
            last ones; a layer that sees fewer stays as it is. Keys and values outside are given up, so that a request
            holds that much however long it gets. Longer requests get other tokens than by `generate`: it is exact for
            the model with that window, not for the model as it is. None: as far as the model sees.
        kv_dtype: what keys and values of attention are kept in: "auto", the model's dtype, or "int8", with a float32
            scale for each token and head: little more than a quarter of the bytes of float32 and half of those of
            bfloat16, so that as much memory holds more tokens and a step reads less of it. It changes results:
            `selective_compile.runtime.logit_error` measures by how much. What is no attention's key or value is kept as
            it is, as recurrent states and the keys of a sparse indexer. On a CPU, without Triton; refused for models in
            which not every attention is ragged. "fp8": e4m3, a byte for each number, with a scale for each head that
            is measured in first steps, before any request, and again when weights have changed. For GPUs of compute
            capability 8.9 and for ROCm; a CPU computes it in the slow reference, to measure the error.
        latents: of a model whose keys and values are linear maps of a few numbers for each token, as DeepSeek-V3's:
            "compressed" keeps those numbers alone, and multiplies queries and results by the maps instead; "expanded"
            keeps keys and values, many times as much to hold and to read. A query and a key are then less to multiply,
            which pays for long prompts with short outputs. Always so on a GPU with `batch_invariant`.
        block_reuse: a request starts from the blocks of its leading tokens that another one left computed.
        scheduler_policy: "max_utilization" admits what fits now and preempts when blocks run short;
            "guaranteed_no_evict" admits only what can run to its end whatever the others generate.
        waiting_order: who is admitted next: "first_come", the highest "priority", the earliest "deadline", or
            "fair": a request of the user who was served least.
        batching: "inflight_fused" mixes prefill and decode in one step, "inflight" has them in steps of their
            own, "static" admits nobody until all that were admitted together have ended.
        prefill_slowdown: with "inflight_fused", how many times as long as one without prompts a step may take, as far
            as the steps so far tell: chunks of prompts are cut to that, at least to a token. None: no limit.
        overlap: requests get the tokens of a step while the next one computes, so that their readers do not hold up its
            planning, and a batch manager calls its server during steps. Tokens and batches are the same.
        async_scheduling: the next step is scheduled and given to the device before the tokens of this one are known, as
            long as the device can choose them. A request is then computed once more after the token that ends it, and
            what comes of that is dropped; tokens come one call of `Engine.step` later, and are the same. None: on a
            GPU, but not with `record`, whose log tells of one step after another.
        cuda_graphs: on a GPU, with `async_scheduling`, steps in which every request computes one token, and others of
            so few tokens that the device would wait for the host, which is measured when the engine is made, are
            captured when they first come, or by `Engine.warm_up`, for so many requests or tokens and up, and replayed
            from then on. False: each is launched kernel by kernel.
        keep_captures: what Dynamo captures, and what passes trace of it, is kept on disk, and a later process that has
            the same model, code and versions takes it from there instead of tracing, where all that Dynamo guards is as
            it was, and a run on a few tokens gives the live model's logits. False: every start traces.
        dtype: the dtype that the model must have; None: whatever it has. The engine never converts weights.
        weights: "model": as the model has them. "int8", on a CPU: linear layers read int8 numbers with a scale for each
            row, kept beside the model's weights and made anew when these change, a fourth or half of the bytes that a
            step reads. Tokens are then not those of `generate`; the log says how far the weights are off. What is no
            linear layer, as embeddings, stays as it is, and so do linear layers of modules that run by themselves: a
            warning names what does. Refused for a model that runs whole.
        join_weights: on a GPU, linear layers that read the same rows, as query, key and value, are one product. Their
            weights are moved for it, when the engine is made, to lie one behind the other; parameters stay the objects
            that they are, with their names, values, shapes and strides, and nothing is held twice. A weight whose
            memory something else in this process holds, as a view, stays where it is, and so does its layer; but what
            has hold of it otherwise, as another process or a graph that was captured of the model, is left with memory
            that the model does not use. A weight that is given other memory later (`p.data = ...`) is copied from
            there. False: all stay where they are.
        implementation: of the custom operators; "auto" takes the best there is for the device.
        threads: how many threads of a CPU each operation of a step uses, whatever the thread that calls it has set for
            itself; the graph is compiled for as many. None: as torch says, but no more than this process has cores by
            its affinity and by the quota of its container.
        seed: default seed for requests without one; mixed with the request's id, so that the same id draws the same
            tokens.
        batch_invariant: the logits of a request are the same bits whatever else is in the batch, however its prompt is
            chunked and whatever blocks it finds; slower, as each row attends by itself. With `compile`; for float32
            on a CPU, and for float32, bfloat16 and float16 on a GPU.
        compile: False runs the rewritten graph without Inductor.
        record: a file to write the event log to, which `selective-compile replay` reads: all that the engine's
            decisions depend on, and what they were. It holds the prompts and the tokens. None: it is not written.
        fallback: of a model in which something cannot be proved. "isolated" runs the modules concerned for one request
            after another, and all else for all requests at once; "sequential" does so too where it can, and where not,
            it runs the whole Hugging Face model for one request after another, as `generate` does. Both are tried
            against the model, slow, and logged. "refuse" raises.

    Raises:
        ValueError: an unknown option, or a value outside of what it must be.
    """

    token_budget: int = 512
    max_requests: int = 64
    block_size: int = field(default_factory=lambda: 128 if torch.cuda.is_available() else 32)
    max_kv_tokens: int | None = None
    kv_memory_fraction: float = 0.9
    max_attention_window: int | None = None
    kv_dtype: KvDtype = "auto"
    latents: Latents = "compressed"
    host_kv_bytes: int = 0
    block_reuse: bool = True
    scheduler_policy: SchedulerPolicy = "max_utilization"
    waiting_order: WaitingOrder = "first_come"
    batching: Batching = "inflight_fused"
    prefill_slowdown: float | None = None
    overlap: bool = False
    async_scheduling: bool | None = None
    cuda_graphs: bool = True
    keep_captures: bool = True
    dtype: torch.dtype | None = None
    weights: Weights = "model"
    join_weights: bool = True
    implementation: Implementation = "auto"
    threads: int | None = None
    seed: int = 0
    batch_invariant: bool = False
    compile: bool = True
    record: str | os.PathLike[str] | None = None
    fallback: Fallback = "sequential"

    def __post_init__(self) -> None:
        most = {"token_budget": MOST_OF_A_STEP, "max_requests": MOST_REQUESTS, "block_size": MOST_TOKENS}
        for name, at_most in most.items():
            self._keep_integer(name, at_least=1, at_most=at_most)
        if self.max_kv_tokens is not None:
            self._keep_integer("max_kv_tokens", at_least=self.block_size, at_most=MOST_TOKENS)
        object.__setattr__(self, "max_attention_window", attention_window(self.max_attention_window))
        if self.threads is not None:
            self._keep_integer("threads", at_least=1, at_most=MOST_THREADS)
        fraction = self.kv_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ValueError(f"kv_memory_fraction must be a number above 0 and at most 1, got {fraction!r}")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {self.dtype!r}")
        _require_implementation(self.implementation)
        self._keep_integer("seed", at_least=0)
        _require_bool("compile", self.compile)
        _require_bool("overlap", self.overlap)
        _require_bool("cuda_graphs", self.cuda_graphs)
        _require_bool("keep_captures", self.keep_captures)
        if self.async_scheduling is not None:
            _require_bool("async_scheduling", self.async_scheduling)
        if self.async_scheduling and self.record is not None:
            raise ValueError("async_scheduling must be None or False with record, got True")
        _require_bool("join_weights", self.join_weights)
        _require_bool("block_reuse", self.block_reuse)
        self._keep_integer("host_kv_bytes", at_least=0, at_most=MOST_BYTES)
        if self.host_kv_bytes and not self.block_reuse:
            raise ValueError(f"host_kv_bytes must be 0 without block_reuse, got {self.host_kv_bytes}")
        if self.record is not None and not isinstance(self.record, (str, os.PathLike)):
            raise ValueError(f"record must be a path or None, got {self.record!r}")
        _require_bool("batch_invariant", self.batch_invariant)
        _require_one_of("scheduler_policy", self.scheduler_policy, get_args(SchedulerPolicy))
        _require_one_of("waiting_order", self.waiting_order, get_args(WaitingOrder))
        _require_one_of("kv_dtype", self.kv_dtype, get_args(KvDtype))
        _require_one_of("latents", self.latents, get_args(Latents))
        if (self.kv_dtype, self.implementation) in (("int8", "triton"), ("fp8", "cpu")):
            raise ValueError(
                f"kv_dtype must be 'auto' with implementation {self.implementation!r}, got {self.kv_dtype!r}, "
                "which it cannot read"
            )
        _require_one_of("batching", self.batching, get_args(Batching))
        slowdown = self.prefill_slowdown
        number = isinstance(slowdown, (int, float)) and not isinstance(slowdown, bool)
        if slowdown is not None and not (number and slowdown > 1):
            raise ValueError(f"prefill_slowdown must be a number above 1 or None, got {slowdown!r}")
        _require_one_of("weights", self.weights, get_args(Weights))
        _require_one_of("fallback", self.fallback, get_args(Fallback))

    def _keep_integer(self, name: str, *, at_least: int, at_most: int | None = None) -> None:
        checked = _required_integer(name, getattr(self, name), at_least=at_least, at_most=at_most)
        object.__setattr__(self, name, checked)


@dataclass(frozen=True, kw_only=True)
class BackendOptions(_NamedOptions):
    """`options=` of `torch.compile(model, backend="selective")`.

    Attributes:
        inductor: False runs the rewritten graph as it is, without compiling it.
        implementation: of the custom operators; "auto" takes the best there is for the device.
        keep_traces: what passes trace of a graph is kept on disk, and a later process that has the same graph takes it
            from there; Dynamo traces in each.

    Raises:
        ValueError: an unknown option, or a value outside of what it must be.
    """

    inductor: bool = True
    implementation: Implementation = "auto"
    keep_traces: bool = True

    def __post_init__(self) -> None:
        _require_bool("inductor", self.inductor)
        _require_bool("keep_traces", self.keep_traces)
        _require_implementation(self.implementation)


def integer_of(value: Any) -> int | None:
    """Also of numpy, or in a tensor of no dimension; None: it is none, as True and False are none."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter of a tensor that holds no values
        return None


def attention_window(value: Any) -> int | None:
    """Raises ValueError for what `max_attention_window` cannot be."""
    return None if value is None else _required_integer("max_attention_window", value, at_least=1, at_most=MOST_TOKENS)


def _required_integer(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> int:
    found = integer_of(value)
    if found is None or found < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    if at_most is not None and found > at_most:
        raise ValueError(f"{name} must be an integer of at most {at_most}, got {value!r}")
    return found


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _require_implementation(value: object) -> None:
    _require_one_of("implementation", value, get_args(Implementation))


def _require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:  # an array is equal to them element by element
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
