"""Batch assembly: a step's plan becomes the model's input tensors, without a Python loop over tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.plan import StepPlan
from selective_compile.step import StepInputs

# Tensors of length 0 or 1 are specialised by torch's tracer; two of everything keeps one graph for every
# step.
SMALLEST = 2
# The CPU's kernel for linear layers sums up to 16 rows in another order than more; the GPU's takes any number alike.
SMALLEST_INVARIANT = 32


class BatchAssembler:
    """Fills buffers that are allocated once; on a CPU the step's tensors are views of them.

    What `assemble` returns holds until the next call: the caller has waited for the step's results by then,
    hence for the copies to the device as well.
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
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            max_blocks: the most that a table of one request has entries for.
            num_tables: of each request.
            batch_invariant: every row is computed as if it were a request of its own, padding rows go with empty
                requests (N is T, which chooses one tile of the GPU's attention for all steps), and no step has few
                rows: what lies beside a row does not show in the order in which anything of it is summed.
        """
        self._block_size = block_size
        self._device = device
        self._invariant = batch_invariant
        self._smallest = SMALLEST_INVARIANT if batch_invariant else SMALLEST
        tokens = max(token_budget, self._smallest)
        requests = tokens if batch_invariant else max(max_requests, SMALLEST)
        self._input_ids = self._buffer(tokens, torch.int64)
        self._positions = self._buffer(tokens, torch.int64)
        self._cu_seqlens_q = self._buffer(requests + 1, torch.int32)
        self._context_lens = self._buffer(requests, torch.int32)
        self._logit_rows = self._buffer(max(tokens, requests), torch.int64)
        self._tables = [
            (self._buffer(requests * max(max_blocks, SMALLEST), torch.int32), self._buffer(tokens, torch.int64))
            for _ in range(num_tables)
        ]

    def assemble(self, plan: StepPlan) -> StepInputs:
        """The inputs of a plan with at least one share.

        T, N, R and max_blocks are at least 2: a padding row, an empty request, rows of logits that nobody
        asked for and unused table entries make up for what is missing. The rows of logits are those of the
        shares, in order, as many of each as its `num_rows`.
        """
        counts = np.array([share.num_tokens for share in plan.shares], dtype=np.int32)
        starts = np.array([share.start for share in plan.shares], dtype=np.int32)
        cu_seqlens, context_lens = self._lengths(counts, starts)
        owners = np.repeat(np.arange(len(counts)), counts)  # [T], the request of each row
        positions = self._rows(plan, owners, starts - cu_seqlens[: len(counts)])
        (block_table, slot_mapping), *others = self._places(plan, owners, positions)
        requests = tuple(share.state for share in plan.shares)
        ends = cu_seqlens[1 : len(counts) + 1].copy()
        if self._invariant:
            cu_seqlens, context_lens = self._lengths(np.ones_like(positions, dtype=np.int32), positions)
            requests = ()
        rows = np.array([share.num_rows for share in plan.shares], dtype=np.int32)
        return StepInputs(
            input_ids=self._take(self._input_ids, len(owners)),
            positions=self._take(self._positions, len(owners)),
            cu_seqlens_q=self._moved(self._cu_seqlens_q, len(cu_seqlens)),
            context_lens=self._moved(self._context_lens, len(context_lens)),
            block_table=block_table,
            slot_mapping=slot_mapping,
            other_tables=tuple(others),
            logit_rows=self._logits_of(ends, rows),
            requests=requests,
        )

    def _lengths(
        self, counts: NDArray[np.int32], starts: NDArray[np.int32] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """cu_seqlens_q [N + 1] and context_lens [N]."""
        requests = len(counts)
        padded = max(requests, self._smallest)
        cu_seqlens = self._cu_seqlens_q.numpy()[: padded + 1]
        cu_seqlens[0] = 0
        counts.cumsum(out=cu_seqlens[1 : requests + 1])
        cu_seqlens[requests + 1 :] = cu_seqlens[requests]
        context_lens = self._context_lens.numpy()[:padded]
        np.add(starts, counts, out=context_lens[:requests], casting="same_kind")
        context_lens[requests:] = 0
        return cu_seqlens, context_lens

    def _rows(self, plan: StepPlan, owners: NDArray[np.int64], offsets: NDArray[np.int32]) -> NDArray[np.int64]:
        """Token id and position of each row, [T]; `offsets` [N] is what to add to a row for its position."""
        tokens = len(owners)
        pieces: list[NDArray[np.int64]] = []
        for state, start, num_tokens, _, drafted in plan.shares:
            first = len(pieces)
            pieces.append(np.frombuffer(state.tokens, np.int64)[start : start + num_tokens - drafted])
            if drafted:
                pieces.append(np.frombuffer(state.draft, np.int64)[:drafted])
            if state.id_offset:
                own = np.concatenate(pieces[first:])
                own[max(0, state.prompt_length - start) :] += state.id_offset
                pieces[first:] = [own]
        np.concatenate(pieces, out=self._input_ids.numpy()[:tokens])
        positions = np.add(np.arange(tokens), offsets[owners], out=self._positions.numpy()[:tokens])
        self._input_ids.numpy()[tokens : self._smallest] = 0
        self._positions.numpy()[tokens : self._smallest] = 0
        return positions

    def _places(
        self, plan: StepPlan, owners: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> list[tuple[Tensor, Tensor]]:
        """A block table [N, max_blocks], as wide as this step's largest request, and the slot of each row, [T].

        Where each row stands for a request, it has the table of its own: a step writes the keys and values of all rows
        before any of them attends, so this changes no result.
        """
        tokens, found = len(owners), []
        blocks, inside = np.divmod(positions, self._block_size)
        width = max(SMALLEST, max(len(share.state.blocks) for share in plan.shares))
        height = max(SMALLEST, len(plan.shares))
        for place, (table_buffer, slot_buffer) in enumerate(self._tables):
            table = table_buffer.numpy()[: height * width].reshape(height, width)
            table.fill(0)
            for row, share in zip(table, plan.shares, strict=False):
                held = share.state.tables[place].blocks
                row[: len(held)] = held
            slots = slot_buffer.numpy()
            np.add(table[owners, blocks].astype(np.int64) * self._block_size, inside, out=slots[:tokens])
            slots[tokens : self._smallest] = -1
            if self._invariant:
                own = table[owners]
                table = table_buffer.numpy()[: max(self._smallest, tokens) * width].reshape(-1, width)
                table[:tokens], table[tokens:] = own, 0
            found.append((self._moved(table_buffer, table.size).view(table.shape), self._take(slot_buffer, tokens)))
        return found

    def _logits_of(self, ends: NDArray[np.int32], counts: NDArray[np.int32]) -> Tensor:
        """The last `counts` rows of each share [N], whose rows end at `ends` [N]."""
        # The rows of a share count up to its end, from wherever the shares before it have got to.
        rows = np.repeat(ends - counts.cumsum(), counts) + np.arange(counts.sum())
        logit_rows = self._logit_rows.numpy()
        logit_rows[: len(rows)] = rows
        logit_rows[len(rows) : self._smallest] = 0
        return self._take(self._logit_rows, len(rows))

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        # Only from pinned memory does a copy to the device run beside the host's work.
        return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _take(self, buffer: Tensor, size: int) -> Tensor:
        """Of rows, of which no step has too few."""
        return self._moved(buffer, max(size, self._smallest))

    def _moved(self, buffer: Tensor, size: int) -> Tensor:
        return buffer[:size].to(self._device, non_blocking=True)
