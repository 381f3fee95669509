"""The model runner: the compiled model, its KV pools, and whether its weights have changed since."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selective_compile.backend import Program, StepProgram, compile_step_program
from selective_compile.options import EngineConfig
from selective_compile.runtime.batch import SMALLEST_INVARIANT
from selective_compile.runtime.block_copies import BlockCopies, sent
from selective_compile.runtime.device_chooser import DeviceChooser
from selective_compile.runtime.device_draw import FIELDS
from selective_compile.runtime.device_rows import DeviceRows
from selective_compile.runtime.device_stream import DeviceStream, Work, stream_of
from selective_compile.runtime.empty_steps import empty_step, largest_step
from selective_compile.runtime.graph_sizes import decode_sizes, graph_sizes, mixed_sizes, worth_capturing
from selective_compile.runtime.host_tier import BlockCopy, Copy
from selective_compile.runtime.invariance import check_invariance
from selective_compile.runtime.kv_cache import (
    allocate_pools,
    bytes_per_block,
    free_dropped_pools,
    num_blocks,
    reaches_of,
)
from selective_compile.runtime.model_checks import check_compiled_for, check_dtype, check_head
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduled_step import Launched, ScheduledStep
from selective_compile.runtime.state_slots import StateSlots, allocate_states, num_slots
from selective_compile.runtime.step_graphs import CapturedInputs, StepGraphs
from selective_compile.runtime.token_marks import needs_marks
from selective_compile.step import StepInputs
from selective_compile.tensor_state import read_by_graphs

logger = logging.getLogger(__name__)
# Of two requests: as in decoding, and more than a few for each.
WARM_TOKENS = (2, 33)


class ModelRunner:
    """Runs one step of the model on the device, and owns the device memory of the engine."""

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        program: Program | None = None,
        *,
        stream: DeviceStream | None = None,
    ) -> None:
        """Compile the model, unless its program is given, and allocate the pools.

        Args:
            stream: of the program's device; None: that which is there.

        Raises:
            ValueError: the model has another dtype than `config.dtype`, or the pools find no memory.
        """
        check_head(model)
        check_dtype(model, config)
        if program is not None:
            check_compiled_for(program, config, model)
        self.program = compile_step_program(model, config) if program is None else program
        if config.batch_invariant:
            check_invariance(self.program)
        sites, states, device = self.program.call_sites, self.program.state_sites, self.program.device
        # A program that runs one request after another computes nothing else with it.
        self.invariant = config.batch_invariant and bool(sites)
        self.stream = stream if stream is not None else stream_of(device)
        self._graphs: StepGraphs | None = None
        self._launched: CapturedInputs | None = None  # the last step, if it was a captured one
        self._states: tuple[Tensor, ...] = ()
        free_dropped_pools()
        with self.stream.alone():  # two that were made at once would share out the same memory
            self.max_requests = num_slots(states, config, device=device)
            taken = self.max_requests * sum(site.num_bytes for site in states)
            rows = decode_sizes(self.max_requests, invariant=self.invariant)[-1]
            self._chooser = DeviceChooser(
                self.stream,
                device,
                token_budget=config.token_budget,
                rows=rows,
                slots=self.max_requests,
                vocab_size=self.program.vocab_size,
                known_ids=self.program.known_ids,
            )
            if config.max_kv_tokens is None and not self.program.keeps_requests:
                # What graphs compute in is theirs alone.
                taken += self._peak_bytes(config) * (1 + self.captures(config))
            positions = self.program.max_positions
            blocks = num_blocks(sites, config, max_positions=positions, device=device, reserved=taken)
            self._pools = allocate_pools(sites, blocks, config.block_size)
            self._states = allocate_states(states, self.max_requests)
        self.num_blocks = dict(zip(reaches_of(sites), blocks, strict=True))
        self.kv_bytes = sum(pool.nbytes for pair in self._pools for pool in pair)
        self.kv_bytes_per_token = bytes_per_block(sites, 1)
        self._slots = StateSlots(self.max_requests)
        size = bytes_per_block(sites, config.block_size)
        self.host_slots = _host_slots(self.program, config, size)
        slots = [self.host_slots] * len(blocks)
        host_pools = allocate_pools(sites, slots, config.block_size, torch.device("cpu"))
        self._copies = BlockCopies(self.stream, device, sites, self._pools, host_pools)
        self._weights_version = self.program.weights_version()

    def captures(self, config: EngineConfig) -> bool:
        """Whether steps can be captured, and are to be."""
        return self.stream.captures and config.cuda_graphs and self.program.not_captured is None

    def _peak_bytes(self, config: EngineConfig) -> int:
        """What the largest step takes on a device with memory of its own, which the pools are to leave free."""
        sites, states = self.program.call_sites, self.program.state_sites
        num_tables, device = len(reaches_of(sites)), self.program.device
        inputs = largest_step(
            config,
            max_requests=self.max_requests,
            max_positions=self.program.max_positions,
            num_tables=num_tables,
            device=device,
        )

        def step() -> None:
            self._pools = allocate_pools(sites, [1] * num_tables, config.block_size)
            self._states = allocate_states(states, 1)
            count = len(inputs.context_lens)
            nobody = torch.full((count,), self._chooser.marks.nobody, device=device)
            # Tokens that are drawn, some with a penalty: the choice that takes most.
            self._choose(inputs, None, torch.ones(FIELDS, count, dtype=torch.float64, device=device), count, nobody)

        return self.stream.peak_bytes(step)

    def weights_changed(self) -> bool:
        """Whether the weights are others than at the last call: then what the pools hold is of no use."""
        version = self.program.weights_version()
        changed = version != self._weights_version
        self._weights_version = version
        return changed

    def look_closely(self) -> None:
        """At the model, in the next step: it may have changed while there was nothing to do."""
        self.program.look_closely()

    def forget_weights(self) -> None:
        """Make anew what the program keeps of the weights' values; for when nothing is on its way."""
        self.program.forget_weights()
        self.check_graphs()

    def forget(self, request: RequestState) -> None:
        """Let go of what the program keeps of a request that has left."""
        self._slots.forget(request)
        self.program.forget(request)

    def go_on_from(self, requests: Sequence[RequestState], parents: Sequence[RequestState]) -> None:
        """Each request goes on from what its parent has computed, as far as it is kept beside the blocks."""
        self.stream.call(partial(self._go_on_from, requests, parents))

    @torch.no_grad()
    def _go_on_from(self, requests: Sequence[RequestState], parents: Sequence[RequestState]) -> None:
        if self._states:
            sources, targets = sent(self.stream, self.program.device, self._slots.of(parents), self._slots.of(requests))
            for pool in self._states:
                pool[targets] = pool[sources]  # read before any is written: a parent may go on from another
        self.program.go_on_from(requests, parents)

    def copy(self, copies: Sequence[Copy | BlockCopy]) -> None:
        """Move blocks within the pools, and between them and the host's, in this order."""
        self.stream.call(partial(self._copies.make, copies))

    def with_slots(self, inputs: StepInputs) -> StepInputs:
        """The inputs with a slot for each request whose states are kept.

        For when the step is planned, and none of its requests can leave: one that leaves before the step runs gives
        its slot back, and would have a new one from `run` that nobody gives back.
        """
        if not self._states:
            return inputs
        slots = self._slots.of([request for request in inputs.requests if isinstance(request, RequestState)])
        slots += [0] * (len(inputs.context_lens) - len(slots))  # of requests without rows
        return replace(inputs, state_slots=self.stream.send(torch.tensor(slots, device="cpu"), self.program.device))

    def run(self, step: ScheduledStep) -> Callable[[], Tensor]:
        """Compute the step's tokens, writing their keys and values into the pools; gives logits [R, V], once the device
        is through.

        For where the device chooses no tokens.
        """
        assert isinstance(step.inputs, StepInputs), "captured steps are launched"
        self._measure_kv_scales()
        self._chooser.next_turn()
        self._launched = None
        sources = self._chooser.stage_sources(step.sources)
        found: list[Tensor] = []
        compute = partial(self._compute, step.inputs, sources)
        self.stream.enqueue(lambda: found.append(compute()))
        return lambda: found[0]

    def capture_steps(self, config: EngineConfig, *, max_blocks: int) -> None:
        """From now on `captured` has inputs, for steps of as few tokens as the device would wait for the host with."""
        mixed = worth_capturing(mixed_sizes(config.token_budget, invariant=self.invariant), self._seconds_of)
        program, pools, states = self.program, self._pools, self._states
        self._graphs = StepGraphs(
            lambda inputs: program(inputs, pools, states),  # without the runner, which is to be freed with its pools
            self._chooser,
            self._slots,
            graph_sizes(self.max_requests, mixed, invariant=self.invariant),
            stream=self.stream,
            device=self.program.device,
            max_requests=self.max_requests,
            max_blocks=max_blocks,
            block_size=config.block_size,
            num_tables=len(self.num_blocks),
            has_states=bool(self._states),
            marks_positions=self.program.marks_positions,
        )

    def to_warm_up(self) -> list[Work]:
        """What compiles, and captures, all that steps can need, of nobody's tokens; nothing else is on the device then.

        Kernels are compiled for few and for many tokens a request. What computes one request after another is left to
        those who come.
        """
        steps = [self._empty_step(tokens, 2) for tokens in (() if self.program.keeps_requests else WARM_TOKENS)]
        runs = [partial(self._choose, step, None, None, 0) for step in steps]
        if steps and self.stream.separate:  # or the host chooses
            rows = torch.zeros(FIELDS, 2, dtype=torch.float64, device=self.program.device)
            nobody = torch.full((2,), self._chooser.marks.nobody, device=self.program.device)
            choices = ((None, None), (rows, None), (rows, nobody))  # as `step_graphs.CHOICES`
            runs += [partial(self._choose, steps[0], None, fields, 2, slots) for fields, slots in choices]
        works: list[Work] = [partial(self.stream.enqueue, run) for run in runs]
        return works + ([] if self._graphs is None else self._graphs.missing())

    def _seconds_of(self, tokens: int) -> tuple[float, float]:
        """Of a step that is launched kernel by kernel: until the host, and until the device is through."""
        inputs = self._empty_step(tokens, self.max_requests)
        return self.stream.seconds(partial(self._choose, inputs, None, None, self.max_requests))

    def _empty_step(self, tokens: int, requests: int) -> StepInputs:
        if self.invariant:  # each row is a request
            tokens = requests = max(SMALLEST_INVARIANT, tokens)
        num_tables, device, rows = len(self.num_blocks), self.program.device, self.max_requests
        return empty_step(tokens, requests, rows=rows, num_tables=num_tables, device=device)

    @property
    def captured_graphs(self) -> tuple[int, int]:
        """How many steps have been captured, and how many can be."""
        return (0, 0) if self._graphs is None else (self._graphs.captured, len(self._graphs.kinds))

    @property
    def captured_step(self) -> Work | None:
        """See `Engine.captured_step`."""
        graphs, launched = self._graphs, self._launched
        return None if graphs is None or launched is None else graphs.graph(launched)

    def marked(self, chosen_for: Sequence[tuple[Request, int]]) -> list[int] | None:
        """For each of these requests where tokens are marked for it, which is brought up to date; None: nobody has a
        repetition penalty or a ban. For when the step is planned, and before it is expected."""
        if not any(needs_marks(request.params) for request, _ in chosen_for):
            return None
        marks, found = self._chooser.marks, []
        slots = self._slots.of([request.state for request, _ in chosen_for])
        for (request, _), slot in zip(chosen_for, slots, strict=True):
            if needs_marks(request.params):
                marks.catch_up(request.state, request.params, slot)
                found.append(slot)
            else:
                found.append(marks.nobody)
        return found

    def captured(
        self,
        plan: StepPlan,
        rows: DeviceRows,
        sources: array[int] | None,
        marked: Sequence[int] | None,
    ) -> CapturedInputs | None:
        """The inputs of a step that is a captured graph, if it can be one; for when it is planned, as `with_slots`."""
        return None if self._graphs is None else self._graphs.fill(plan, rows, sources, marked)

    def give_up(self) -> None:
        """A step has failed; what the device has of it still reads and writes blocks and the host's memory."""
        with suppress(RuntimeError, MemoryError):  # of the step that failed
            self.stream.mark()()
        self._chooser.marks.forget()
        if self._graphs is not None:
            self._graphs.give_up()

    def take_failed(self) -> Mapping[Any, Exception]:
        """States of requests that the program could not run, each by itself, since this was called last, and why."""
        return self.program.take_failed()

    def check_graphs(self) -> None:
        """Nothing is on its way, and the weights may lie elsewhere: then they are joined, and steps captured, anew.

        Raises:
            ValueError: see `JoinedWeights.gather`. No step is captured from then on.
        """
        addresses: list[int] = []
        try:
            if isinstance(self.program, StepProgram):
                if self.program.gather_weights():
                    self._weights_version = self.program.weights_version()  # of the same values
                addresses = read_by_graphs(self.program.kept_tensors, self.program.device)
        finally:  # where weights could not be joined, some may have left what captured steps read
            if self._graphs is not None:
                self._graphs.check(addresses)

    def launch(self, step: ScheduledStep) -> Launched:
        """As `run`, for a step of whose tokens the device chooses some or all. The one before the last must have been
        waited for."""
        rows = step.rows
        assert rows is not None
        self._measure_kv_scales()
        self._chooser.next_turn()
        self._launched = step.inputs if isinstance(step.inputs, CapturedInputs) else None
        arriving = self._chooser.arriving
        if self._graphs is not None and isinstance(step.inputs, CapturedInputs):
            logits, places = self._graphs.launch(step.inputs, arriving), rows.rows
        else:
            assert isinstance(step.inputs, StepInputs), step
            logits, places = self._launch_eagerly(step.inputs, step, rows), tuple(range(len(rows.rows)))
        return Launched(
            logits=None if rows.every else logits,
            tokens=arriving,
            places=places,
            wait=self.stream.mark(),
            aside=self.stream.aside,
        )

    def _measure_kv_scales(self) -> None:
        """Where the weights have changed: then nothing is on the device, and the pools hold nothing of use."""
        program, version = self.program, self._weights_version
        if isinstance(program, StepProgram) and not program.knows_kv_scales(version):
            self.stream.call(partial(program.measure_kv_scales, version))

    def _launch_eagerly(self, inputs: StepInputs, step: ScheduledStep, rows: DeviceRows) -> Callable[[], Tensor]:
        """What gives the logits, unless the device chooses from all of them."""
        sources = self._chooser.stage_sources(step.sources)
        params = [request.params for request, _ in rows.chosen_for]
        choices = self._chooser.stage_choices(params, [generated for _, generated in rows.chosen_for])
        ours = None if rows.leading else self._chooser.stage_rows(rows.rows)
        slots = None if step.marked is None else self._chooser.stage_slots(step.marked)
        found: list[Tensor] = []

        def work() -> None:
            logits = self._choose(inputs, sources, choices, len(params), slots, ours)
            if not rows.every:
                found.append(logits)

        self.stream.enqueue(work)
        self.stream.copy(self._chooser.arriving[: len(params)], self._chooser.last[: len(params)])
        return found.pop

    def _compute(self, inputs: StepInputs, sources: Tensor | None) -> Tensor:
        ids = self._chooser.input_ids(inputs.input_ids, sources)
        return self.program(inputs if sources is None else replace(inputs, input_ids=ids), self._pools, self._states)

    @torch.no_grad()
    def _choose(
        self,
        inputs: StepInputs,
        sources: Tensor | None,
        choices: Tensor | None,
        count: int,
        slots: Tensor | None = None,
        ours: Tensor | None = None,
    ) -> Tensor:
        """Logits [R, V], from which so many tokens are chosen: from the first rows, or from `ours` [count]."""
        logits = self._compute(inputs, sources)
        if count:
            self._chooser.choose(logits[:count] if ours is None else logits[ours], choices, slots)
        return logits


def _host_slots(program: Program, config: EngineConfig, size: int) -> int:
    """Blocks of so many bytes that the host tier has room for.

    Raises:
        ValueError: it has room for none.
    """
    if config.host_kv_bytes and (not size or program.state_sites or program.keeps_requests):
        logger.warning("host_kv_bytes is not used: no request of this model can go on from blocks alone")
        return 0
    if 0 < config.host_kv_bytes < size:
        raise ValueError(f"host_kv_bytes must be 0 or hold a block of {size} bytes, got {config.host_kv_bytes}")
    return config.host_kv_bytes // size if size else 0
