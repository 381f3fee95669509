"""The engine's compiled step: a paged flat graph with the model's live weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile import fp8_rows
from selective_compile.autocast import autocast_of, without_autocast
from selective_compile.captured import Captured
from selective_compile.cast_weights import CastWeights
from selective_compile.choices import KvDtype
from selective_compile.compiled_step import CompiledStep, native_kernels_run, runs_native
from selective_compile.compiling import compiled
from selective_compile.current_device import on
from selective_compile.first_steps import may_be_followed, run_first_steps
from selective_compile.fp8_scales import BLOCK, SLOTS, KvScales, measure_scales, spread_ids
from selective_compile.implementations import forced_implementation
from selective_compile.int8_rows import row_bytes
from selective_compile.int8_weights import Int8Weights
from selective_compile.joined_weights import JoinedWeights
from selective_compile.kernels.one_step import one_step
from selective_compile.live_weights import LiveWeights
from selective_compile.options import EngineConfig
from selective_compile.passes import Refusal, Rewrite
from selective_compile.passes.attention_calls import KeySelection
from selective_compile.passes.flat_graph import FlatGraph, reach_of
from selective_compile.passes.host_reads import host_read
from selective_compile.passes.position_limit import id_limit
from selective_compile.step import Reach, StepInputs, reaches


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """One attention call of the graph and the KV pool it needs; or a selection of keys, whose values have no size.

    Nor have those of a call that keeps latents: they are the first columns of its one key head.

    ``int8``: its rows are kept as `int8_rows` has them; ``fp8``: as `fp8_rows` has.
    """

    name: str
    num_query_heads: int
    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    window: int
    dtype: torch.dtype
    device: torch.device
    chunk: int = 0
    int8: bool = False
    fp8: bool = False

    @property
    def reach(self) -> Reach:
        return Reach(window=self.window, chunk=self.chunk)

    @property
    def pool_dtype(self) -> torch.dtype:
        if self.fp8:
            return fp8_rows.DTYPE
        return torch.int8 if self.int8 else self.dtype

    @property
    def pool_rows(self) -> tuple[int, int]:
        """Elements that the key and the value of a token and head take in the pools."""
        sizes = (self.key_head_size, self.value_head_size)
        return (row_bytes(sizes[0]), row_bytes(sizes[1]) if sizes[1] else 0) if self.int8 else sizes

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * sum(self.pool_rows) * self.pool_dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StateSite:
    """One recurrence of the graph and what it keeps of a request."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StepProgram:
    """Callable on `StepInputs` and pools; see `selective_compile.step` for the shapes.

    ``keeps_requests``: whether it keeps more of a request than its blocks, so that no other can go on from those;
    ``forks_requests``: whether a request can go on from all that is kept of another by `go_on_from`;
    ``cut_up_to``: prompts of requests of at most so many tokens may be computed in parts, None for all;
    ``prefix``: so many first positions of a request see one another: those of its prompt are computed in one step, and
    what is generated there token by token, without drafts; requests share blocks only if their prompts reach as far and
    begin with the same tokens up to there;
    ``pauses``: whether a request can be computed again, from its prompt and what it has generated;
    ``long_form``: beyond which length requests are computed otherwise, None: beyond none;
    ``marks_positions``: whether positions are to tell of each token how it is to be computed: `StepInputs.positions`;
    ``unlimited_steps``: whether generated tokens are computed otherwise than those of a prompt;
    ``num_ids``: ids of a prompt are less than this, as many as the model knows of the vocabulary, and those beside
    it that only a prompt can have;
    ``known_ids``: those of generated tokens that requests go on from are less than this;
    ``gives_every_row``: whether the logits of any token of a step can be asked for, or only of a request's last;
    ``config``: what it was compiled for;
    ``not_captured``: why its steps cannot be captured as CUDA graphs, None if nothing is known to prevent it.
    """

    keeps_requests = False
    forks_requests = True
    gives_every_row = True
    cut_up_to: int | None = None
    pauses = True
    isolated: Mapping[str, Refusal] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        rewritten: Rewrite,
        config: EngineConfig,
        *,
        max_positions: int | None,
        captured: Captured | None = None,
    ) -> None:
        flat = rewritten.flat
        assert flat is not None
        self.rewritten = rewritten
        kept = [call_site(call, config.kv_dtype) for call in flat.calls]
        self.call_sites = (*kept, *map(index_site, flat.selections))
        # Of keys and values in turn, for each call that keeps them as e4m3; latents are keys alone.
        heads = [site.num_kv_heads for site in kept if site.fp8 for size in site.pool_rows if size]
        self._scales = KvScales(heads, flat.device)
        self.state_sites = tuple(
            StateSite(name=call.name, shape=call.state_shape, dtype=call.state_dtype, device=flat.device)
            for call in flat.recurrences
        )
        self.device = flat.device
        self.vocab_size = int(rewritten.logits_shape[-1])
        known = id_limit(flat)
        self.known_ids = self.vocab_size if known is None else min(known, self.vocab_size)
        self.num_ids = self.known_ids
        self.max_positions = max_positions
        self.graphs = 1
        self.weights = LiveWeights(model, flat, captured)
        self.weights_version: Callable[[], object] = self.weights.version
        families = [call.family for call in flat.calls if call.family is not None]
        self.prefix = flat.prefix
        self.long_form = rewritten.long_form
        self.unlimited_steps = any(call.unlimited_steps for call in flat.recurrences)
        self.marks_positions = self.long_form is not None or self.unlimited_steps
        shifted = any(family.window or family.chunk or family.prefix for family in families)
        self.counts_padding = shifted or bool(self.state_sites)
        self.not_captured = why_not_captured(flat, config)
        self._flat = flat
        self.int8_weights = Int8Weights(flat.quantised)
        self.int8_weights.of(*self.weights.seen)  # at once: the memory for keys and values is what is left then
        self.cast_weights = CastWeights(flat.cast, in_place=self.device.type != "cpu")
        self.joined_weights = JoinedWeights(flat.joined)
        self.gather_weights()
        self.config = config
        self._row: tuple[Tensor | None, Tensor | None] = None, None  # ids [T] and the same [1, T]
        own = config.compile and runs_native(config.implementation, flat.device)
        # The reference stands in for attention over e4m3.
        native = (
            own
            and not self.kv_scales
            and not self.state_sites
            and may_be_followed(flat.module.graph)
            and native_kernels_run()
        )
        run = compiled(flat, inductor=config.compile, inputs_are_checked=True, layers_once=True)
        self._run = CompiledStep(run, flat.example_inputs, native=native)
        if native:
            shapes = [(site.num_kv_heads, site.pool_rows, site.pool_dtype) for site in self.call_sites]
            run_first_steps(self, shapes, num_tables=len(reaches(site.reach for site in self.call_sites)))

    @property
    def rewinds(self) -> bool:
        """Whether a request can go on from fewer tokens than were computed of it: blocks are just written over."""
        return not self.state_sites and not self.keeps_requests

    def serves(self, model: nn.Module) -> bool:
        """Whether it was compiled of this very object, or what stands for it."""
        return self.weights.are_of(model)

    def is_of(self, model: nn.Module) -> bool:
        """Whether all but its weights is as it was when it was compiled; those tell of themselves."""
        return not self.weights.change(closely=True)

    def look_closely(self) -> None:
        """In the next step, whether the graph is still that of the model: nothing may have looked for a while."""
        self.weights.look_closely()

    def forget_weights(self) -> None:
        """Make anew what is kept of the weights' values: in the next step int8 numbers, and scales of e4m3; with the
        next `gather_weights` what they are cast to."""
        self.int8_weights.drop()
        self.cast_weights.drop()
        self._scales.drop()

    @property
    def kept_tensors(self) -> tuple[Any, ...]:
        """What steps read of the weights that is where it was in the step before."""
        return (*self.weights.seen[0], *self.cast_weights.operands)

    def gather_weights(self) -> bool:
        """Join the weights that one product is to read where they lie apart, and cast those that have changed; for when
        no step is on its way.

        Returns whether any were moved: their version is another then, their values are the same.
        """
        moved = False
        if self._flat.joined:
            version = self.weights.version()
            self.joined_weights.gather(*self.weights.seen)
            moved = self.weights.version() is not version
            if moved:  # or each step would look at where they lie
                self.joined_weights.gather(*self.weights.seen)
        self.cast_weights.gather(*self.weights.seen)  # of that version, or each step would cast them
        return moved

    @property
    def kv_scales(self) -> tuple[Tensor, ...]:
        """[K] float32 of each pool that is kept as e4m3."""
        return self._scales.current

    def knows_kv_scales(self, version: object) -> bool:
        """Whether they are of weights of that `weights_version`."""
        return self._scales.are_of(version)

    def measure_kv_scales(self, version: object) -> None:
        """Find the scales of keys and values that are kept as e4m3, before any is kept of weights of that
        `weights_version`; see `fp8_scales`."""
        with on(self.device):
            self._scales.measure(version, self._measured)

    def _measured(self, scales: Sequence[Tensor]) -> None:
        kinds = [(site.num_kv_heads, site.pool_rows, site.pool_dtype) for site in self.call_sites]
        pools = [
            (zeros_of(heads, rows[0], dtype, self.device), zeros_of(heads, rows[1], dtype, self.device))
            for heads, rows, dtype in kinds
        ]
        states = [torch.zeros((2, *site.shape), dtype=site.dtype, device=site.device) for site in self.state_sites]
        measure_scales(
            lambda inputs, pools: self._logits(inputs, pools, states, scales),
            pools,
            scales,
            spread_ids(self.num_ids, self.max_positions, self.device),
            num_tables=len(reaches(site.reach for site in self.call_sites)),
        )

    def take_failed(self) -> dict[Hashable, Exception]:
        """None: what one request's rows raise, the step raises."""
        return {}

    def forget(self, request: Hashable) -> None:
        """Nothing is kept of a request but its blocks."""

    def go_on_from(self, requests: Sequence[Hashable], parents: Sequence[Hashable]) -> None:
        """Nothing is kept of a request but its blocks and states."""

    def __call__(
        self, inputs: StepInputs, pools: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor] = ()
    ) -> Tensor:
        """Logits ``[R, V]``, one row per ``inputs.logit_rows``.

        Writes this step's keys and values into ``pools``, and into ``states``, one ``[num_slots, ...]`` for each of
        `state_sites`, what the requests' recurrences have come to.
        """
        if autocast_of(self.device) is not None:
            with without_autocast(self.device):
                return self._logits(inputs, pools, states, self.kv_scales)
        return self._logits(inputs, pools, states, self.kv_scales)

    def _logits(
        self,
        inputs: StepInputs,
        pools: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
    ) -> Tensor:
        ids, row = self._row
        if ids is not inputs.input_ids:  # as it is from one step to the next, while nobody comes or goes
            row = inputs.input_ids[None]
            self._row = inputs.input_ids, row
        tensors, seen = self.weights.seen
        arguments = list(tensors)
        arguments += [row for _ in self._flat.tokens]  # one: the mask is ones, made in the graph
        if self._flat.uses_positions:
            arguments.append(inputs.positions)
        arguments += [inputs.cu_seqlens_q, inputs.context_lens, inputs.block_table, inputs.slot_mapping]
        arguments += [tensor for pair in inputs.other_tables for tensor in pair]
        if self.state_sites:
            arguments.append(inputs.state_slots)
        arguments += [tensor for pair in pools for tensor in pair if tensor.shape[-1]]  # a selection has no values
        arguments += states
        arguments.append(inputs.logit_rows)
        if self._flat.quantised:
            arguments += self.int8_weights.of(tensors, seen)
        arguments += scales
        if self._flat.cast:
            arguments += self.cast_weights.of(tensors, seen)
        if self._flat.joined:
            arguments += self.joined_weights.of(tensors, seen)
        recording = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # with a `no_grad` around it, a step of a small model takes 10 microseconds more
        try:
            config = self.config
            with one_step(), forced_implementation(config.implementation, batch_invariant=config.batch_invariant):
                logits = self._run(arguments, len(tensors), seen)
        finally:
            torch.set_grad_enabled(recording)
        return logits.view(-1, self.vocab_size)


def why_not_captured(flat: FlatGraph, config: EngineConfig) -> str | None:
    """What of the step has the host read what the device computes."""
    if config.implementation == "reference" and flat.device.type != "cpu":
        return "implementation='reference' reads the lengths of requests on the host"
    return host_read(flat)


def zeros_of(heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool of the few blocks in which scales are measured."""
    return torch.zeros((SLOTS // BLOCK, heads, BLOCK, size), dtype=dtype, device=device)


def call_site(call: Any, kv_dtype: KvDtype = "auto") -> CallSite:
    value, latent = call.value.node.meta["val"], call.latent
    return CallSite(
        name=call.name,
        num_query_heads=call.query.heads,
        num_kv_heads=call.key.heads if latent is None else 1,
        key_head_size=call.key.head_size if latent is None else latent.row_size,
        value_head_size=call.value.head_size if latent is None else 0,
        window=reach_of(call).window,
        chunk=reach_of(call).chunk,
        int8=kv_dtype == "int8",
        fp8=kv_dtype == "fp8",
        dtype=value.dtype,
        device=value.device,
    )


def index_site(call: KeySelection) -> CallSite:
    value = call.key.node.meta["val"]
    return CallSite(
        name=call.name,
        num_query_heads=call.query.heads,
        num_kv_heads=call.key.heads,
        key_head_size=call.key.head_size,
        value_head_size=0,
        window=reach_of(call).window,
        chunk=reach_of(call).chunk,
        dtype=value.dtype,
        device=value.device,
    )
