"""How the keys of a step's tiles are shared out between programs of a launch; `ragged_attention_kernel_triton` has the
legend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selective_compile.kernels.ragged_attention_merge_triton import merge, new_parts
from selective_compile.kernels.ragged_attention_tiles import SplitConfig
from selective_compile.kernels.split_plan_triton import SplitPlan, plan

NOT_SPLIT = (None, None, None, None)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The pieces of a step.

    Attributes:
        num_pieces: how many there are at most.
        split: what each has; None: all keys of a tile.
        partial: memory for the sums, maxima and totals of splits, where there are any.
    """

    num_pieces: int
    split: SplitPlan | None = None
    partial: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        query: Tensor,
        lengths: tuple[Tensor, Tensor],
        splits: SplitConfig,
        *,
        value_size: int,
        rows_and_keys: tuple[int, int],
        window: int,
        chunk: int = 0,
        prefix: int = 0,
    ) -> Cut:
        """Of a query [T, H, D].

        lengths: cu_seqlens_q [N + 1] and context_lens [N]; splits: without slots, tiles are not split;
        rows_and_keys: those of a tile.
        """
        num_rows, rows = query.shape[0], rows_and_keys[0]
        if not splits.slots:
            return cls(num_pieces=num_rows // rows + lengths[0].shape[0])
        split = plan(
            *lengths,
            splits,
            num_rows=num_rows,
            rows_and_keys=rows_and_keys,
            window=window,
            chunk=chunk,
            prefix=prefix,
        )
        partial = new_parts(query, value_size, places=split.places, rows=rows)
        return cls(num_pieces=split.pieces.shape[1], split=split, partial=partial)

    @property
    def given(self) -> tuple[Tensor | None, ...]:
        """What a kernel that attends is given of it: pieces, sums, maxima and totals."""
        return NOT_SPLIT if self.split is None or self.partial is None else (self.split.pieces, *self.partial)

    def merge(self, output: Tensor, *, num_requests: int) -> None:
        """Write the rows of the output [T, H, Dv] whose tiles were split."""
        if self.split is not None and self.partial is not None:
            merge(output, self.partial, self.split, num_requests=num_requests)
