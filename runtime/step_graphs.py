"""Steps as graphs that the device replays without the host's help.

One graph for each of `graph_sizes`, which a step fills up with tokens and requests that are nobody's, another where
tokens are drawn, and another where there is a repetition penalty or a ban. A graph holds the whole step: the changes of
the block tables, the ids that the last step has chosen, the model, and the choice. Nothing of it depends on a number
that the host knows: lengths, tables and ids are read from memory that stays where it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.background import weakly
from selective_compile.runtime.batch import token_ids
from selective_compile.runtime.captured_inputs import CapturedMemory
from selective_compile.runtime.device_chooser import TURNS, DeviceChooser
from selective_compile.runtime.device_draw import choices
from selective_compile.runtime.device_rows import DeviceRows
from selective_compile.runtime.device_stream import DeviceStream, Work
from selective_compile.runtime.device_tables import DeviceTables
from selective_compile.runtime.graph_sizes import GraphSizes, Size
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.state_slots import StateSlots
from selective_compile.step import GENERATED, LONG, StepInputs

logger = logging.getLogger(__name__)

Compute = Callable[[StepInputs], Tensor]
Ints = NDArray[np.int64]


# Whether tokens are drawn, and whether there is a repetition penalty or a ban, for which they go the way of those
# drawn.
CHOICES = ((False, False), (True, False), (True, True))


class Kind(NamedTuple):
    """What tells a graph from others."""

    size: Size
    drawn: bool
    marked: bool


@dataclass(frozen=True, kw_only=True)
class CapturedInputs:
    """A step whose inputs lie where its graph reads them; it has `count` rows of logits."""

    kind: Kind
    count: int


class StepGraphs:
    """Captures a graph when a step first needs it, or before, and replays it from then on.

    Attributes:
        kinds: of all graphs that there can be.
    """

    def __init__(
        self,
        compute: Compute,
        chooser: DeviceChooser,
        slots: StateSlots,
        sizes: GraphSizes,
        *,
        stream: DeviceStream,
        device: torch.device,
        max_requests: int,
        max_blocks: int,
        block_size: int,
        num_tables: int,
        has_states: bool,
        marks_positions: bool,
    ) -> None:
        """
        Args:
            compute: logits [R, V] of a step; it must not hold what these graphs belong to.
            slots: of requests, where their block tables are kept, and their states if there are any.
            max_blocks: the most that a table of one request has entries for.
            marks_positions: as in `StepProgram`.
        """
        self._compute, self._chooser, self._slots, self._stream = compute, chooser, slots, stream
        self._block_size, self._has_states, self._nobody = block_size, has_states, max_requests
        self._sizes, self._marks_positions = sizes, marks_positions
        every = list(dict.fromkeys((*sizes.decode, *sizes.mixed)))
        self._memory = CapturedMemory(stream, every, num_tables=num_tables, device=device, turns=TURNS)
        width = max(2, max_blocks)
        self._tables = [
            DeviceTables(table, slots=max_requests, max_blocks=width, device=device) for table in range(num_tables)
        ]
        self.kinds = [Kind(size, *choice) for size in every for choice in CHOICES]
        self._graphs: dict[Kind, Work] = {}
        self._logits: dict[Kind, Callable[[], Tensor]] = {}
        self._addresses: Sequence[int] = ()
        self._failed = False  # a capture; others would, too

    @property
    def captured(self) -> int:
        """How many graphs there are so far, but for steps that could not be captured."""
        return sum(not isinstance(work, partial) for work in self._graphs.values())

    def missing(self) -> list[Work]:
        """What captures the graphs that no step has needed yet; nothing else is on the device then.

        The largest first: graphs share what they compute in, and one that is larger than those before takes more.
        """
        return [partial(self._capture, kind) for kind in sorted(self.kinds, reverse=True) if kind not in self._graphs]

    def graph(self, inputs: CapturedInputs) -> Work | None:
        """What replays the graph of a step; None: it is not captured, or could not be."""
        work = self._graphs.get(inputs.kind)
        return None if isinstance(work, partial) else work  # a step that is launched one by one

    def check(self, addresses: Sequence[int]) -> None:
        """Capture anew where these, of the weights, are others than at the last call."""
        if self._addresses != addresses:
            self._graphs.clear()
            self._logits.clear()
            self._failed = False
        self._addresses = addresses

    def give_up(self) -> None:
        """A step was not given to the device, or failed there: what of the block tables is there is not known."""
        for table in self._tables:
            table.forget()

    def fill(
        self,
        plan: StepPlan,
        device_rows: DeviceRows,
        sources: array[int] | None,
        marked: Sequence[int] | None,
    ) -> CapturedInputs | None:
        """Write the inputs of a step, for `launch`, which is to follow; None: it is none of those that have a graph.

        For when the step is planned, and none of its requests can leave. The step before the last has ended.
        """
        size = self._sizes.fitting(plan.num_tokens, len(plan.shares)) if device_rows.one_each else None
        if size is None:
            return None
        host: Any = self._memory.next(size).host
        states = [share.state for share in plan.shares]
        slots = self._slots.of(states)
        rows = _Rows(plan)
        given: dict[str, Any] = {
            "input_ids": np.frombuffer(token_ids(plan.shares), dtype=np.int64).clip(min=0),
            "sources": () if sources is None else sources,
            "positions": rows.marked() if self._marks_positions else rows.positions,
            "logit_rows": rows.sampled,
            **(rows.each_a_request(slots) if self._sizes.invariant else rows.of_requests(slots)),
        }
        # What is nobody's: rows of no request, requests without rows.
        nobodys = {"sources": -1, "slots": self._nobody, "cu_seqlens_q": rows.ends[-1]}
        for place, table in enumerate(self._tables):
            given[f"slot_mapping_{place}"] = rows.slot_mapping(place, self._block_size)
            nobodys[f"slot_mapping_{place}"], nobodys[f"places_{place}"] = -1, table.nobody
            given[f"places_{place}"], given[f"values_{place}"] = self._changes(table, states, slots, size.tokens)
        for name, values in given.items():
            host[name][: len(values)] = values
            host[name][len(values) :] = nobodys.get(name, 0)
        chosen_for, ours = device_rows.chosen_for, list(device_rows.rows)
        drawn = choices([request.params for request, _ in chosen_for], [index for _, index in chosen_for])
        host["choices"][:] = 0.0  # of a token of the largest logit, as for rows that the host chooses from
        host["marked"][:] = self._nobody
        if drawn is not None:
            host["choices"][:, ours] = drawn
        if marked is not None:
            host["marked"][ours] = marked
        kind = Kind(size, drawn is not None, marked is not None)
        return CapturedInputs(kind=kind, count=len(rows.sampled))

    def launch(self, inputs: CapturedInputs, to: Tensor) -> Callable[[], Tensor]:
        """Give the step to the device; its tokens come to the host's memory `to` [>= count].

        Returns:
            What gives the logits [count, V], a copy, when the step is done and until the next one is launched.
        """
        if inputs.kind not in self._graphs:
            self._capture(inputs.kind)
        self._memory.send(inputs.kind.size)
        self._stream.enqueue(self._graphs[inputs.kind])
        self._stream.copy(to[: inputs.count], self._chooser.last[: inputs.count])
        # A copy: whoever keeps a row of it, as a beam does until the others are as far, would see the next step's.
        return lambda: self._logits[inputs.kind]()[: inputs.count].clone()

    def _changes(
        self, table: DeviceTables, states: Sequence[RequestState], slots: Sequence[int], most: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """At most so many; what is more is sent at once."""
        places, values = table.changes(states, slots)
        # Requests that are new here bring whole tables, of which the graph has no room for all.
        if len(places) > most:
            more = [torch.from_numpy(each[:-most]) for each in (places, values)]
            device = table.entries.device
            self._stream.enqueue(lambda: table.change(*(self._stream.send(each, device) for each in more)))
        return places[-most:], values[-most:]

    def _capture(self, kind: Kind) -> None:
        """The graph of a step; only that of nobody has been computed then."""
        views = self._memory.on_device(kind.size)
        self._stream.enqueue(lambda: self._clear(views))
        step = partial(weakly(self._step), kind, views)
        self._graphs[kind] = step if self._failed else self._captured(step, kind.size.tokens)

    def _captured(self, step: partial[None], tokens: int) -> Work:
        for again in (True, False):
            try:
                return self._stream.capture(step, keep=[self._chooser.last])
            except RuntimeError as error:  # of what may be in a model, and of whose kernels, there is no end
                said = str(error)  # logged in place of it, since it would keep what is freed with the graphs
                if again:  # it may have been another thread's
                    logger.info("the capture of a step of %d tokens is tried again: %s", tokens, said)
                    continue
                told = "steps of %d tokens are not captured, nor others from now on, but launched kernel by kernel: %s"
                logger.warning(told, tokens, said)
        self._failed = True
        return step

    def _clear(self, views: Any) -> None:
        """Of no request."""
        for name, view in views.items():
            view.fill_(-1 if name == "sources" or name.startswith("slot_mapping") else 0)
        for name in ("slots", "marked"):
            views[name].fill_(self._nobody)
        for place, table in enumerate(self._tables):
            views[f"places_{place}"].fill_(table.nobody)

    def _step(self, kind: Kind, views: Any) -> None:
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
            logit_rows=views["logit_rows"],
            state_slots=views["slots"] % self._nobody if self._has_states else None,
        )
        choices = views["choices"] if kind.drawn else None
        logits = self._compute(inputs)
        self._logits[kind] = self._stream.lend(logits)
        self._chooser.choose(logits, choices, views["marked"] if kind.marked else None)


class _Rows:
    """Of a plan, in arrays: its shares' first positions and tokens [N], and the position of each row [T]."""

    def __init__(self, plan: StepPlan) -> None:
        self._states = [share.state for share in plan.shares]
        self.starts: Ints = np.array([share.start for share in plan.shares], dtype=np.int64)
        self.counts: Ints = np.array([share.num_tokens for share in plan.shares], dtype=np.int64)
        self.ends: Ints = np.cumsum(self.counts)
        self.sampled: Ints = self.ends[[share.samples for share in plan.shares]] - 1
        self.positions: Ints = np.arange(self.ends[-1]) + self._of_rows(self.starts - self.ends + self.counts)

    def of_requests(self, slots: Sequence[int]) -> dict[str, Any]:
        """What attention is to know of the requests in these slots."""
        ends = np.concatenate([[0], self.ends])
        return {"slots": slots, "cu_seqlens_q": ends, "context_lens": self.starts + self.counts}

    def each_a_request(self, slots: Sequence[int]) -> dict[str, Any]:
        """The same where each row is a request of its own, as `BatchAssembler` has it for batch invariance."""
        ends, tables = np.arange(self.ends[-1] + 1), np.array(slots, dtype=np.int64)
        return {"slots": self._of_rows(tables), "cu_seqlens_q": ends, "context_lens": self.positions + 1}

    def marked(self) -> Ints:
        """[T], the positions as `marked_positions` has them."""
        begins = [[state.long_from, state.generated_from] for state in self._states]
        long_from, generated_from = np.array(begins, dtype=np.int64).T
        found = self.positions + LONG * (self.positions >= self._of_rows(long_from))
        return found + GENERATED * (self.positions >= self._of_rows(generated_from))

    def slot_mapping(self, place: int, block_size: int) -> Ints:
        """[T], of the requests' tables at that place."""
        first, last = self.starts // block_size, (self.starts + self.counts - 1) // block_size
        pairs = zip(self._states, first.tolist(), last.tolist(), strict=True)
        touched = [state.tables[place].blocks[begin : end + 1] for state, begin, end in pairs]
        blocks: Ints = np.fromiter(chain.from_iterable(touched), dtype=np.int64)
        counted = np.cumsum(last - first + 1) - (last - first + 1)
        of_row = self._of_rows(counted - first) + self.positions // block_size
        return blocks[of_row] * block_size + self.positions % block_size

    def _of_rows(self, of_shares: Ints) -> Ints:
        return np.repeat(of_shares, self.counts)
