"""A step program without a model: its logits are a hash of what it reads from the pools through the block
table.

A wrong slot, block table, position, chunk or stale block gives other tokens than `expected_tokens`, which
knows no engine.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from selective_compile.backend import CallSite
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine, GenerationParams, StepObserver
from selective_compile.runtime.device_stream import DeviceStream
from selective_compile.runtime.sampler import sample
from selective_compile.step import GENERATED, LONG, LongForm, StepInputs

VOCAB_SIZE = 61
CPU = torch.device("cpu")


def logits_of(tokens: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """[VOCAB_SIZE] float32 from a context: three tensors [context length] float64."""
    content = torch.stack([tokens, positions, weights]).to(torch.int64).numpy().tobytes()
    generator = np.random.Generator(np.random.Philox(key=zlib.crc32(content)))
    return torch.from_numpy(generator.standard_normal(VOCAB_SIZE, dtype=np.float32)) * 4


class SimulatedProgram:
    """Keeps token ids in its key pool, positions and the weights' number in its value pool; hashes them."""

    vocab_size = num_ids = known_ids = VOCAB_SIZE
    device = CPU
    graphs = 1
    rewinds = True
    gives_every_row = True
    cut_up_to: int | None = None
    prefix = 0
    pauses = True
    not_captured: str | None = None

    def __init__(
        self,
        max_positions: int | None = None,
        *,
        captured: bool = False,
        long_form: LongForm | None = None,
        unlimited_steps: bool = False,
    ) -> None:
        """`captured`: its steps may be those of a graph, which have a size of their own."""
        self.captured, self.long_form, self.unlimited_steps = captured, long_form, unlimited_steps
        self.marks_positions = long_form is not None or unlimited_steps
        self.max_positions = max_positions
        self.keeps_requests = False
        self.forks_requests = True
        self.state_sites = ()
        self.call_sites = (
            CallSite(
                name="call 0",
                num_query_heads=1,
                num_kv_heads=1,
                key_head_size=1,
                value_head_size=2,
                window=0,
                dtype=torch.float64,
                device=CPU,
            ),
        )
        self.weights = 0
        self.before_run: Callable[[], None] = lambda: None

    def look_closely(self) -> None:
        """There is no model."""

    def forget_weights(self) -> None:
        """Keeps nothing of their values."""

    def forget(self, request: Any) -> None:
        """Keeps nothing of a request but what is in the pools."""

    def take_failed(self) -> dict[Any, Exception]:
        return {}

    def go_on_from(self, requests: Any, parents: Any) -> None:
        """Keeps nothing of a request but what is in the pools."""

    def weights_version(self) -> tuple[Any, ...]:
        return (self.weights,)

    def __call__(
        self, inputs: StepInputs, pools: Sequence[tuple[Tensor, Tensor]], states: Sequence[Tensor] = ()
    ) -> Tensor:
        self.before_run()
        check_inputs(inputs, captured=self.captured)
        ((keys, values),) = pools
        written = inputs.slot_mapping >= 0
        blocks, offsets = (
            inputs.slot_mapping[written] // keys.shape[2],
            inputs.slot_mapping[written] % keys.shape[2],
        )
        keys[blocks, 0, offsets, 0] = inputs.input_ids[written].double()
        positions = inputs.positions if self.unlimited_steps else inputs.positions & ~GENERATED
        values[blocks, 0, offsets, 0] = positions[written].double()
        values[blocks, 0, offsets, 1] = float(self.weights)
        return torch.stack([self._logits(inputs, keys, values, row) for row in inputs.logit_rows.tolist()])

    def _logits(self, inputs: StepInputs, keys: Tensor, values: Tensor, row: int) -> Tensor:
        request = int(torch.searchsorted(inputs.cu_seqlens_q, row, right=True)) - 1
        if request == len(inputs.context_lens):  # a row of nobody
            return torch.zeros(VOCAB_SIZE)
        after = int(inputs.cu_seqlens_q[request + 1]) - row
        positions = torch.arange(int(inputs.context_lens[request]) - after + 1)
        blocks = inputs.block_table[request][positions // keys.shape[2]].long()
        offsets = positions % keys.shape[2]
        stored = values[blocks, 0, offsets]
        return logits_of(keys[blocks, 0, offsets, 0], stored[:, 0], stored[:, 1])


def check_inputs(inputs: StepInputs, *, captured: bool = False) -> None:
    """What every step must keep to, whatever the plan; one that is captured may have any number of rows of nobody."""
    ids, table, tokens = inputs.input_ids, inputs.block_table, int(inputs.cu_seqlens_q[-1])
    assert ids.dtype == inputs.positions.dtype == inputs.slot_mapping.dtype == inputs.logit_rows.dtype == torch.int64
    assert inputs.cu_seqlens_q.dtype == inputs.context_lens.dtype == table.dtype == torch.int32
    assert ids.shape == inputs.positions.shape == inputs.slot_mapping.shape
    assert len(ids) >= max(2, tokens) if captured else len(ids) == max(2, tokens)
    assert inputs.cu_seqlens_q.shape == (table.shape[0] + 1,) and inputs.context_lens.shape == table.shape[:1]
    assert min(*table.shape, len(inputs.logit_rows)) >= 2
    assert all(tensor.is_contiguous() for tensor in vars(inputs).values() if isinstance(tensor, Tensor))
    assert (inputs.slot_mapping[:tokens] >= 0).all() and (inputs.slot_mapping[tokens:] == -1).all()
    assert inputs.slot_mapping[:tokens].unique().numel() == tokens
    assert (inputs.logit_rows < max(tokens, 1)).all()


class SimulatedModel(nn.Module):
    """Has what the engine looks at: a generation_config, and a parameter of the pools' dtype."""

    def __init__(self, **generation: Any) -> None:
        super().__init__()
        self.generation_config = GenerationConfig(**generation)
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def simulated_engine(
    program: SimulatedProgram | None = None,
    *,
    model: SimulatedModel | None = None,
    observers: Sequence[StepObserver] = (),
    clock: Callable[[], float] = time.perf_counter,
    stream: DeviceStream | None = None,
    **config: Any,
) -> Engine:
    """An engine on the simulated program; 4,096 KV slots unless the configuration says otherwise."""
    simulated: Any = program or SimulatedProgram()
    chosen = EngineConfig(**{"max_kv_tokens": 4096, **config})
    return Engine(model or SimulatedModel(), chosen, program=simulated, observers=observers, clock=clock, stream=stream)


def places(length: int, prompt_length: int, form: LongForm | None) -> Tensor:
    """[length] int64: the positions of a request's tokens, of which `LongForm` tells how they are computed."""
    positions = torch.arange(length)
    if form is None:
        return positions
    if prompt_length > form.beyond or (form.anew and length > form.beyond):
        return positions + LONG
    return positions + LONG * (positions >= form.beyond)


def marked_places(length: int, prompt_length: int, program: SimulatedProgram) -> Tensor:
    """[length] float64: the positions as the ``program`` reads them."""
    found = places(length, prompt_length, program.long_form)
    if program.unlimited_steps:
        found += GENERATED * (torch.arange(length) >= prompt_length)
    return found.double()


def expected_tokens(
    prompt: Sequence[int], params: GenerationParams, weights: int = 0, program: SimulatedProgram | None = None
) -> list[int]:
    """What a request generates, computed without engine, scheduler, batch or pools; of ``program`` the marks alone."""
    context, program = list(prompt), program or SimulatedProgram()
    while True:
        tokens = torch.tensor(context, dtype=torch.float64)
        positions = marked_places(len(context), len(prompt), program)
        logits = logits_of(tokens, positions, torch.full_like(tokens, weights))
        generated = len(context) - len(prompt)
        sampled = sample(logits[None], [params], [generated], [array("q", context)])
        context += sampled.tokens
        stopped = sampled.records[0] is not None and sampled.records[0].stop is not None
        if context[-1] in params.eos_token_ids or stopped or generated + 1 == params.max_new_tokens:
            return context[len(prompt) :]
