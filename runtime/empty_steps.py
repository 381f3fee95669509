"""Steps of no request, which read and write no block: to find out what steps take, before there are any."""

from __future__ import annotations

import torch

from selective_compile.options import EngineConfig
from selective_compile.runtime.kv_cache import UNBOUNDED
from selective_compile.step import StepInputs


def largest_step(
    config: EngineConfig, *, max_requests: int, max_positions: int | None, num_tables: int, device: torch.device
) -> StepInputs:
    """The step that takes most memory beside weights and pools: as many tokens as the budget has, a row of logits for
    each, as where log probabilities of prompts are asked for, or for as many requests as there can be, and block tables
    of the longest one: a sparse indexer ranks all their slots."""
    width, rows = -(-(max_positions or UNBOUNDED) // config.block_size), max(config.token_budget, max_requests)
    return empty_step(config.token_budget, max_requests, rows=rows, width=width, num_tables=num_tables, device=device)


def empty_step(
    tokens: int, requests: int, *, rows: int, width: int = 2, num_tables: int, device: torch.device
) -> StepInputs:
    """Of so many tokens, requests and rows of logits, at least two of each.

    Args:
        width: blocks that a block table has room for.
        num_tables: block tables of a request.
    """
    tokens, requests, rows, width = (max(2, number) for number in (tokens, requests, rows, width))

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    table = zeros(requests, width, dtype=torch.int32)
    nowhere = zeros(tokens, dtype=torch.int64) - 1
    return StepInputs(
        input_ids=zeros(tokens, dtype=torch.int64),
        positions=zeros(tokens, dtype=torch.int64),
        cu_seqlens_q=zeros(requests + 1, dtype=torch.int32),
        context_lens=zeros(requests, dtype=torch.int32),
        block_table=table,
        slot_mapping=nowhere,
        other_tables=((table, nowhere),) * (num_tables - 1),
        logit_rows=zeros(rows, dtype=torch.int64),
        state_slots=zeros(requests, dtype=torch.int64),
    )
