"""Batch assembly: a step's plan becomes the model's input tensors, without a Python loop over tokens."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from selective_compile.runtime.device_stream import DeviceStream, stream_of
from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.step_layout import StepLayout, StepMemory, aligned
from selective_compile.step import GENERATED, LONG, StepInputs

# Tensors of length 0 or 1 are specialised by torch's tracer; two of everything keeps one graph for every
# step.
SMALLEST = 2
# The CPU's kernel for linear layers sums up to 18 rows in another order than more; the GPU's takes any number alike.
SMALLEST_INVARIANT = 32


@dataclass
class _Turn:
    """Memory for a step, and how the last one in it was laid out."""

    memory: StepMemory
    lengths: tuple[object, ...] = ()
    layout: StepLayout | None = None


class BatchAssembler:
    """Fills memory that is allocated once; on a CPU the step's tensors are views of it.

    What `assemble` returns holds until as many more calls as there are `turns`: the caller has waited for the step's
    results by then, hence for the copy to the device as well.

    A step whose shares are as long as those of the step before, as while all requests decode, has the views of that.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        max_requests: int,
        block_size: int,
        max_blocks: int,
        device: torch.device,
        num_tables: int = 1,
        marks_positions: bool = False,
        batch_invariant: bool = False,
        stream: DeviceStream | None = None,
        turns: int = 1,
    ) -> None:
        """
        Args:
            max_blocks: the most that a table of one request has entries for.
            num_tables: of each request.
            marks_positions: as in `StepProgram`.
            batch_invariant: every row is computed as if it were a request of its own, padding rows go with empty
                requests (N is T, which chooses one tile of the GPU's attention for all steps), and no step has few
                rows: what lies beside a row does not show in the order in which anything of it is summed.
            stream: of the device; None: that which is there.
            turns: steps whose inputs may be wanted at a time.
        """
        stream = stream if stream is not None else stream_of(device)
        self._block_size = block_size
        self._num_tables = num_tables
        self._marks_positions = marks_positions
        self._invariant = batch_invariant
        self._smallest = SMALLEST_INVARIANT if batch_invariant else SMALLEST
        tokens = max(token_budget, self._smallest)
        requests = tokens if batch_invariant else max(max_requests, SMALLEST)
        row_of_table = 4 * max(max_blocks, SMALLEST)
        sizes = [8 * tokens] * (2 + num_tables) + [8 * max(tokens, requests)]
        sizes += [4 * requests + 4, 4 * requests] + [requests * row_of_table] * num_tables
        total = sum(map(aligned, sizes))
        self._turns = deque(_Turn(StepMemory(total, device, stream)) for _ in range(turns))
        self._no_blocks = bytes(row_of_table)

    def assemble(self, plan: StepPlan) -> StepInputs:
        """The inputs of a plan with at least one share.

        T, N, R and max_blocks are at least 2: a padding row, an empty request, rows of logits that nobody
        asked for and unused table entries make up for what is missing. The rows of logits are those of the
        shares, in order, as many of each as its `num_rows`. Block tables are as wide as the step's longest.
        """
        states, starts, counts, _, _ = zip(*plan.shares, strict=True)
        width = max(SMALLEST, max([len(state.blocks) for state in states]))
        self._turns.rotate()
        layout = self._layout(self._turns[0], (counts, plan.rows, width))
        covered = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        positions = array("q", chain.from_iterable(covered))
        seen = positions if self._invariant else [share.stop - 1 for share in covered]
        return layout.fill(
            ids=token_ids(plan.shares),
            positions=marked_positions(states, covered) if self._marks_positions else positions,
            context_lens=array("i", [position + 1 for position in seen]),
            tables=[self._table(place, states, covered, 4 * width) for place in range(self._num_tables)],
            requests=() if self._invariant else states,
        )

    def _layout(self, turn: _Turn, lengths: tuple[Sequence[int], Sequence[int], int]) -> StepLayout:
        if turn.layout is None or turn.lengths != lengths:
            counts, rows, width = lengths
            turn.lengths = lengths
            turn.layout = StepLayout(
                turn.memory,
                counts,
                rows,
                width=width,
                num_tables=self._num_tables,
                smallest=self._smallest,
                invariant=self._invariant,
            )
        return turn.layout

    def _table(
        self, place: int, states: Iterable[RequestState], covered: Iterable[range], num_bytes: int
    ) -> tuple[bytes, array[int]]:
        """The blocks of each request that attends, followed by zeros, in so many bytes each; the slot of each row.

        Where each row stands for a request, it has the table of its own: a step writes the keys and values of all rows
        before any of them attends, so this changes no result.
        """
        size, none = self._block_size, self._no_blocks
        table: list[array[int] | bytes] = []
        slots = array("q")
        for state, positions in zip(states, covered, strict=True):
            blocks = state.tables[place].blocks
            own = (blocks, none[4 * len(blocks) : num_bytes])
            table += own * len(positions) if self._invariant else own
            for index in range(positions.start // size, positions[-1] // size + 1):
                offset = (blocks[index] - index) * size  # of a slot in this block from its position
                first, end = max(positions.start, index * size), min(positions.stop, (index + 1) * size)
                slots.extend(range(first + offset, end + offset))
        return b"".join(table), slots


def marked_positions(states: Iterable[RequestState], covered: Iterable[range]) -> array[int]:
    """Of each row of a step, greater by `LONG` where it is computed in the long form and by `GENERATED` behind the
    prompt."""
    found = array("q")
    for state, positions in zip(states, covered, strict=True):
        begins = sorted({positions.start, state.long_from, state.generated_from, positions.stop})
        for first, end in pairwise(begin for begin in begins if positions.start <= begin <= positions.stop):
            mark = LONG * (first >= state.long_from) + GENERATED * (first >= state.generated_from)
            found.extend(range(first + mark, end + mark))
    return found


def token_ids(shares: Sequence[Share]) -> bytes:
    """Of each row of a step, [T] int64."""
    found = []
    for state, start, num_tokens, _, drafted in shares:
        own = state.tokens[start : start + num_tokens - drafted]
        if drafted:
            own += state.draft[:drafted]
        found.append(state.taken(own, start) if state.id_offset else own)
    return b"".join(found)
