"""Steps for the tests of the kernels that select keys, and of attention to selected keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selective_compile import reference
from tests.kernels.ragged_cases import CHUNK, DECODE, MIXED, Case, Inputs, make_inputs


@dataclass(frozen=True, kw_only=True)
class Selecting:
    """A step of the attention's tests, whose queries and keys are an indexer's here, and how many keys it selects."""

    case: Case
    count: int

    def __str__(self) -> str:
        return f"{self.case}, {self.count} keys"


STEPS = (
    Selecting(case=Case(name="mixed", requests=MIXED, padding_rows=3), count=7),
    Selecting(case=Case(name="decode", requests=DECODE, query_heads=5, kv_heads=1), count=16),
    Selecting(case=Case(name="one key", requests=CHUNK, block_size=5), count=1),
    Selecting(case=Case(name="more than there are", requests=MIXED, query_heads=3, kv_heads=3), count=500),
    Selecting(case=Case(name="odd sizes", requests=CHUNK, key_size=20, value_size=35, strided=True), count=9),
    Selecting(case=Case(name="many heads", requests=DECODE, query_heads=14, kv_heads=2, key_size=24), count=33),
    Selecting(case=Case(name="sinks and softcap", requests=MIXED, sinks=0.5, softcap=3.0, slopes=True), count=5),
    Selecting(case=Case(name="only padding", requests=((0, 0), (0, 9)), padding_rows=2), count=4),
    Selecting(case=Case(name="no request", requests=(), padding_rows=2), count=4),
)

# For an interpreter.
FEWER = (
    Selecting(case=Case(name="mixed", requests=((1, 30), (3, 9), (0, 12), (5, 0)), padding_rows=3), count=7),
    Selecting(case=Case(name="features", requests=((2, 5), (4, 0)), sinks=0.5, softcap=3.0, slopes=True), count=3),
    Selecting(case=Case(name="odd sizes", requests=((3, 40),), key_size=20, value_size=35, query_heads=14), count=33),
    Selecting(case=Case(name="only padding", requests=((0, 0), (0, 9)), padding_rows=2), count=4),
    Selecting(case=Case(name="no request", requests=(), padding_rows=2), count=4),
)


def weights_of(inputs: Inputs) -> Tensor:
    """[T, H] float32, of both signs."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(inputs.query.shape[:2], generator=generator)


def paged(inputs: Inputs, weights: Tensor, count: int) -> tuple:
    """Arguments of ``ragged_top_keys``; the pool is a copy."""
    metadata = (inputs.cu_seqlens_q, inputs.context_lens, inputs.block_table, inputs.slot_mapping)
    return (inputs.query, inputs.key, weights, inputs.key_pool.clone(), *metadata, inputs.scale, count)


def unpaged(inputs: Inputs, weights: Tensor, count: int) -> tuple:
    """Arguments of ``varlen_top_keys``."""
    return (inputs.query, inputs.key, weights, inputs.cu_seqlens_q, inputs.scale, count)


def drawn(step: Selecting, dtype: torch.dtype) -> tuple[Inputs, Tensor]:
    inputs = make_inputs(step.case, dtype)
    return inputs, weights_of(inputs)


def selected(inputs: Inputs, count: int, *, pool: bool) -> Tensor:
    """A selection of the reference, for attention."""
    weights = weights_of(inputs)
    if pool:
        return reference.ragged_top_keys(*paged(inputs, weights, count))
    return reference.varlen_top_keys(*unpaged(inputs, weights, count))


def with_equal_scores(inputs: Inputs) -> Inputs:
    """Every key of a step the same, and of whole numbers, so that all scores of a row are equal however summed."""
    ones = {"key": torch.ones_like(inputs.key), "key_pool": torch.ones_like(inputs.key_pool)}
    return replace(inputs, query=inputs.query.round(), scale=0.5, **ones)
