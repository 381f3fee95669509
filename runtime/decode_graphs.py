"""Steps in which every request computes one token, as graphs that the device replays without the host's help.

One graph for each number of requests in `sizes`, which a step fills up with empty requests, others where tokens are
drawn, and others where there is a repetition penalty. A graph holds the whole step: the changes of the block tables,
the ids that the last step has chosen, the model, and the choice. Nothing of it depends on a number that the host knows:
lengths, tables and ids are read from memory that stays where it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selective_compile.runtime.decode_inputs import DecodeMemory, Views
from selective_compile.runtime.device_chooser import TURNS, DeviceChooser
from selective_compile.runtime.device_draw import choices
from selective_compile.runtime.device_stream import DeviceStream, Work
from selective_compile.runtime.device_tables import DeviceTables
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.state_slots import StateSlots
from selective_compile.step import StepInputs

Compute = Callable[[StepInputs], Tensor]
# Between one and the next of them at most so many empty requests are computed. A tensor of length 1 would be
# specialised to a graph of its own.
FIRST_SIZES, STEP_OF_SIZES = (2, 4, 8), 16


def sizes_up_to(max_requests: int) -> tuple[int, ...]:
    """Numbers of requests that have a graph; the last is at least `max_requests`."""
    every = (*FIRST_SIZES, *range(STEP_OF_SIZES, max_requests + STEP_OF_SIZES, STEP_OF_SIZES))
    return every[: next(place for place, size in enumerate(every) if size >= max_requests) + 1]


@dataclass(frozen=True, kw_only=True)
class CapturedInputs:
    """A step whose inputs lie where its graph reads them: of `size` requests, the first `count` of which are real."""

    size: int
    count: int
    drawn: bool
    penalised: bool

    @property
    def graph(self) -> tuple[int, bool, bool]:
        """What tells its graph from others."""
        return self.size, self.drawn, self.penalised


class DecodeGraphs:
    """Captures a graph when a step first needs it, and replays it from then on."""

    def __init__(
        self,
        compute: Compute,
        chooser: DeviceChooser,
        slots: StateSlots,
        *,
        stream: DeviceStream,
        device: torch.device,
        max_requests: int,
        max_blocks: int,
        block_size: int,
        num_tables: int,
        has_states: bool,
    ) -> None:
        """
        Args:
            compute: logits [R, V] of a step.
            slots: of requests, where their block tables are kept, and their states if there are any.
            max_blocks: the most that a table of one request has entries for.
        """
        self._compute, self._chooser, self._slots, self._stream = compute, chooser, slots, stream
        self._block_size, self._has_states, self._nobody = block_size, has_states, max_requests
        self._sizes = sizes_up_to(max_requests)
        self._memory = DecodeMemory(stream, self._sizes, num_tables, device, TURNS)
        width = max(2, max_blocks)
        self._tables = [
            DeviceTables(table, slots=max_requests, max_blocks=width, device=device) for table in range(num_tables)
        ]
        self._logit_rows = torch.arange(self._sizes[-1], device=device)
        self._graphs: dict[tuple[int, bool, bool], Work] = {}

    @property
    def captured(self) -> int:
        """How many graphs there are so far."""
        return len(self._graphs)

    def forget(self) -> None:
        """Capture anew: the weights lie elsewhere."""
        self._graphs.clear()

    def give_up(self) -> None:
        """A step was not given to the device, or failed there: what of the block tables is there is not known."""
        for table in self._tables:
            table.forget()

    def fill(
        self,
        plan: StepPlan,
        chosen_for: Sequence[tuple[Request, int]] | None,
        sources: array[int] | None,
        penalised: Sequence[int] | None,
    ) -> CapturedInputs | None:
        """Write the inputs of a step, for `launch`, which is to follow; None: it is none of those that have a graph.

        For when the step is planned, and none of its requests can leave. The step before the last has ended.
        """
        count = len(plan.shares)
        if chosen_for is None or len(chosen_for) != count or plan.num_tokens != count:
            return None
        size = next(size for size in self._sizes if size >= count)
        views = self._memory.next(size)
        states = [share.state for share in plan.shares]
        starts = np.array([share.start for share in plan.shares], dtype=np.int64)
        slots = self._slots.of(states)
        host: Any = views.host
        host["input_ids"][:count] = [
            state.tokens[share.start] for state, share in zip(states, plan.shares, strict=True)
        ]
        host["sources"][:count] = -1 if sources is None else sources
        host["positions"][:count] = starts
        host["slots"][:count] = slots
        host["context_lens"][:count] = starts + 1
        host["cu_seqlens_q"][: count + 1] = np.arange(count + 1)
        drawn = choices([request.params for request, _ in chosen_for], [index for _, index in chosen_for])
        if drawn is not None:
            host["choices"][:, :count] = drawn
        host["penalised"][:count] = self._nobody if penalised is None else penalised
        self._fill_up(host, count)
        for place in range(len(self._tables)):
            self._fill_table(place, views, states, slots, starts)
        return CapturedInputs(size=size, count=count, drawn=drawn is not None, penalised=penalised is not None)

    def launch(self, inputs: CapturedInputs, to: Tensor) -> None:
        """Give the step to the device; its tokens come to the host's memory `to` [>= count]."""
        key = inputs.graph
        if key not in self._graphs:
            self._graphs[key] = self._captured(inputs)
        self._memory.send(inputs.size)
        self._stream.enqueue(self._graphs[key])
        self._stream.copy(to[: inputs.count], self._chooser.last[: inputs.count])

    def _fill_up(self, host: Any, count: int) -> None:
        """Rows of no request, and requests without rows."""
        for name in ("input_ids", "positions", "context_lens"):
            host[name][count:] = 0
        host["sources"][count:] = -1
        host["slots"][count:] = host["penalised"][count:] = self._nobody
        host["cu_seqlens_q"][count + 1 :] = count
        host["choices"][:, count:] = 0.0  # of a token of the largest logit

    def _fill_table(
        self, place: int, views: Views, states: Sequence[RequestState], slots: Sequence[int], starts: Any
    ) -> None:
        table, host, count, size = self._tables[place], views.host, len(states), self._block_size
        blocks = np.array(
            [state.tables[place].blocks[start // size] for state, start in zip(states, starts.tolist(), strict=True)]
        )
        mapping = host[f"slot_mapping_{place}"]
        mapping[:count] = blocks * size + starts % size
        mapping[count:] = -1
        places, values = table.changes(states, slots)
        to, of = host[f"places_{place}"], host[f"values_{place}"]
        most = len(to)
        # Requests that are new here bring whole tables, of which the graph has no room for all.
        for first in range(0, len(places) - most, most):
            self._send_changes(table, places[first : first + most], values[first : first + most])
        sent = max(0, -(-(len(places) - most) // most)) * most
        rest = len(places) - sent
        to[:rest], of[:rest] = places[sent:], values[sent:]
        to[rest:], of[rest:] = table.nobody, 0

    def _send_changes(self, table: DeviceTables, places: Any, values: Any) -> None:
        device = table.entries.device
        on_host = [torch.from_numpy(each) for each in (places, values)]
        self._stream.enqueue(lambda: table.change(*(each.to(device) for each in on_host)))

    def _captured(self, inputs: CapturedInputs) -> Work:
        """The graph of a step; only that of nobody has been computed then."""
        views = self._memory.on_device(inputs.size)
        self._stream.enqueue(lambda: self._clear(views))
        return self._stream.capture(lambda: self._step(inputs, views), keep=[self._chooser.last])

    def _clear(self, views: Any) -> None:
        """Of no request."""
        for name, view in views.items():
            view.fill_(-1 if name == "sources" or name.startswith("slot_mapping") else 0)
        for name in ("slots", "penalised"):
            views[name].fill_(self._nobody)
        for place, table in enumerate(self._tables):
            views[f"places_{place}"].fill_(table.nobody)

    def _step(self, kind: CapturedInputs, views: Any) -> None:
        tables = []
        for place, table in enumerate(self._tables):
            table.change(views[f"places_{place}"], views[f"values_{place}"])
            tables.append((table.entries[views["slots"]], views[f"slot_mapping_{place}"]))
        (block_table, slot_mapping), *others = tables
        inputs = StepInputs(
            input_ids=self._chooser.input_ids(views["input_ids"], views["sources"]),
            positions=views["positions"],
            cu_seqlens_q=views["cu_seqlens_q"],
            context_lens=views["context_lens"],
            block_table=block_table,
            slot_mapping=slot_mapping,
            other_tables=tuple(others),
            logit_rows=self._logit_rows[: kind.size],
            state_slots=views["slots"] % self._nobody if self._has_states else None,
        )
        choices = views["choices"] if kind.drawn else None
        self._chooser.choose(self._compute(inputs), choices, views["penalised"] if kind.penalised else None)
