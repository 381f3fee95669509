"""What one step gives the compiled model besides its weights and its KV pools."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor

# What the position of a token is greater by that is computed in the long form, and of one that was generated.
LONG, GENERATED = 2**40, 2**39


@dataclass(frozen=True, kw_only=True)
class LongForm:
    """Of a model that computes requests of more than `beyond` tokens in another way, as longrope does.

    `anew`: a request that grows beyond is computed again from its first token, as `generate` does for Phi-3; else it
    goes on from what was computed of it.  Not `grows`: none does, for `generate` would lose what it has of it.
    """

    beyond: int
    anew: bool
    grows: bool = True

    def has(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens is computed in it, all of which are known when it begins."""
        return num_tokens > self.beyond

    def bound(self, num_tokens: int) -> int | None:
        """How long a request of so many tokens may come to be; None if as long as the model lets it."""
        return None if self.grows or self.has(num_tokens) else self.beyond


@dataclass(frozen=True)
class Reach:
    """How far back an attention call sees: `window` and `chunk` as in `selective_compile.ops`; 0: all there is."""

    window: int = 0
    chunk: int = 0

    @property
    def limited(self) -> bool:
        return self.window > 0 or self.chunk > 0

    @property
    def span(self) -> int:
        """The most positions that one row sees, where it is limited."""
        assert self.limited, self
        return min(size for size in (self.window, self.chunk) if size > 0)

    def first_seen(self, position: int) -> int:
        """The first position that a row at `position` sees; it does not fall as positions grow."""
        in_window = position - self.window + 1 if self.window > 0 else 0
        in_chunk = position // self.chunk * self.chunk if self.chunk > 0 else 0
        return max(0, in_window, in_chunk)


def reaches(calls: Iterable[Reach]) -> tuple[Reach, ...]:
    """The different ones, the farthest first: calls of one reach share a block table."""
    return tuple(
        sorted(set(calls), key=lambda reach: (reach.limited, -reach.span if reach.limited else 0, reach.chunk))
    )


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The metadata of one step, every tensor on the model's device and contiguous.

    T tokens of N requests lie end to end; R rows want logits. T is at least 2: a step of one token gets a
    padding row (id 0, position 0, slot -1), because a tensor of length 1 would be specialised to a second
    graph. Padding rows come after the last request's rows. T, N, R and max_blocks may change from step to
    step, dtypes never do.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, the absolute position of each token in its request, and more by `LONG` in
            its long form and by `GENERATED` behind its prompt, where `StepProgram.marks_positions` says so.
        cu_seqlens_q: [N + 1] int32, request n has rows cu_seqlens_q[n] : cu_seqlens_q[n + 1]; may be none.
        context_lens: [N] int32, tokens of the request in the pools once this step's are written.
        block_table: [N, max_blocks] int32, block i of request n holds its tokens from i * block_size; the
            entries past the context, and those of blocks wholly in front of what any row sees, are 0 and never read.
        slot_mapping: [T] int64, block * block_size + offset of each row's key and value; -1 for padding.
        other_tables: the same two for the second and further `reaches` of the model's attention calls.
        state_slots: [N] int64, where each request's recurrent states are in their pools; None if the model has none.
        logit_rows: [R] int64, the rows whose logits are computed, in the order they are returned.
        requests: N objects that tell the requests apart, also from other engines'; fewer where empty ones fill N up.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    other_tables: tuple[tuple[Tensor, Tensor], ...] = ()
    requests: tuple[Hashable, ...] = ()
    state_slots: Tensor | None = None
