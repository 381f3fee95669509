"""What is recognised of attention: its calls, what hides keys from queries, and what is kept of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A query, key or value before head repetition: ``node`` with the dimension that enumerates tokens.

    Of the node's heads, which are ``every`` times ``heads``, the operand has the first of each ``every``.
    """

    node: fx.Node
    order: tuple[int, ...]  # permutation that brings the operand to (tokens, heads ..., head size)
    heads: int
    head_size: int
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class MaskTerm:
    """One mask of an attention call: a boolean to keep or drop, or floats to add, ``factor`` times, to the scores.

    Or numbers that scores are multiplied with ("times"): they must be 1 for every pair that is not hidden.  ``fill`` is
    what a hidden score is replaced by, before anything nearer the softmax is added to it.  ``pair``: the dimensions of
    queries and keys, from the last, which is -1.
    """

    node: fx.Node
    kind: Literal["keep", "drop", "add", "times"]
    factor: float = 1.0
    fill: float = -math.inf
    pair: tuple[int, int] = (-2, -1)


@dataclass(frozen=True, kw_only=True)
class BiasLookup:
    """Numbers that are looked up for each pair of a query and a key, to be added to its score.

    ``node`` is ``source`` at ``index``, whose dimensions of queries and keys are ``pair``, from the last.  Of the
    source, ``order`` is the permutation to ([batch, tokens,] heads ..., rows): with tokens where it is ``per_query``.
    """

    node: fx.Node
    source: fx.Node
    index: fx.Node
    pair: tuple[int, int]
    order: tuple[int, ...]
    rows: int
    per_query: bool

    @property
    def counts_from_end(self) -> bool:
        """Whether an index of -1 is that of the last row."""
        return self.node.target is torch.ops.aten.index.Tensor


@dataclass(frozen=True, kw_only=True)
class MaskFamily:
    """What a mask was proved to be: causal, and what else is not 0 or empty.

    Attributes:
        window: keys of the last ``window`` positions.
        chunk: keys of the query's own chunk, where every ``chunk`` positions are one.
        prefix: keys of the first ``prefix`` positions are seen by queries in front of them too.
        slopes: for each query head, what is added to a score per position that the key is behind (ALiBi), negated.
        distances: for each distance, the row of a `BiasLookup` that is added to a score, or -1 for nothing; the last
            holds for all farther keys.
        padding: the [B, S] graph input whose zeros hide keys.
        narrowed: the window is not the model's, but was asked for.
    """

    window: int
    padding: fx.Node | None
    chunk: int = 0
    prefix: int = 0
    slopes: tuple[float, ...] = ()
    distances: tuple[int, ...] = ()
    narrowed: bool = False

    def __str__(self) -> str:
        named = [
            "causal",
            f"window {self.window}{' by max_attention_window' if self.narrowed else ''}" if self.window else "",
            f"chunks of {self.chunk}" if self.chunk else "",
            f"prefix {self.prefix}" if self.prefix else "",
            f"a linear bias for each of {len(self.slopes)} heads" if self.slopes else "",
            f"a bias for each of {len(self.distances)} distances" if self.distances else "",
            "keys hidden by the attention mask" if self.padding is not None else "",
        ]
        return ", ".join(filter(None, named))


@dataclass(frozen=True, kw_only=True)
class KeyMarks:
    """A (query, key) tensor that holds ``marked`` at the keys that were selected for the query, else ``unmarked``."""

    node: fx.Node
    marked: bool | int | float
    unmarked: bool | int | float


@dataclass(kw_only=True)
class KeySelection:
    """For each query, the ``count`` keys with the highest scores, or all if there are no more.

    The score is the sum over heads of ``weights * relu(scale * query . key)``; ``masks`` say which keys there are, and
    ``marks`` is what the selection is read by.  ``output`` is the node that selects.
    """

    name: str
    output: fx.Node
    query: Operand
    key: Operand
    weights: Operand  # with a head size of 1
    scale: float
    count: int
    masks: tuple[MaskTerm, ...]
    marks: tuple[KeyMarks, ...]
    source_line: str
    covers: frozenset[fx.Node]
    causal_flag: Literal[False] = False
    family: MaskFamily | None = None

    def __str__(self) -> str:
        return f"the best {self.count} keys by {self.query.heads} heads of {self.key.head_size}"


@dataclass(frozen=True, kw_only=True)
class PerHead:
    """Of a weight [N, r], a matrix for each head: row i of head h is row ``first + h * step + i``, for i < ``size``."""

    weight: fx.Node
    first: int
    step: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Of the numbers of each token, ``size`` many from ``first`` on; ``operand`` has them as heads of size 1."""

    operand: Operand
    first: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Latent:
    """What keys and values are made of: ``rows``, one head of r numbers for each token.

    The columns from ``at`` on of head h's key are ``key[h] @ rows``, the others, in order, are ``shared`` by all heads;
    its value is ``value[h] @ rows``.
    """

    rows: Operand
    key: PerHead
    at: int
    value: PerHead
    shared: tuple[Columns, ...]

    @property
    def size(self) -> int:
        return self.rows.head_size

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a token."""
        return self.size + sum(columns.size for columns in self.shared)


@dataclass(kw_only=True)
class AttentionCall:
    """One recognised attention: ``output`` is the node whose value the ragged op replaces."""

    name: str
    form: Literal["sdpa", "eager"]
    output: fx.Node
    output_order: tuple[int, ...]  # permutation of (tokens, heads ..., value size) into the output's dimensions
    query: Operand
    key: Operand
    value: Operand
    scale: float
    softcap: float
    causal_flag: bool
    masks: tuple[MaskTerm, ...]
    source_line: str
    covers: frozenset[fx.Node]
    sinks: fx.Node | Operand | None = None  # as many numbers as query heads, in their order; or as many for each token
    family: MaskFamily | None = None
    selection: KeySelection | None = None  # of the keys that the family allows, only these
    latent: Latent | None = None  # kept in place of keys and values
    lookup: BiasLookup | None = None  # what the family's distances are looked up in
    lookup_factor: float = 1.0  # of what is looked up
