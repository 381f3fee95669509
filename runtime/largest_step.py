"""The step that takes most memory beside weights and pools: to find out how much, before the pools take the rest."""

from __future__ import annotations

import torch

from selective_compile.options import EngineConfig
from selective_compile.step import StepInputs


def largest_step(config: EngineConfig, *, max_requests: int, num_tables: int, device: torch.device) -> StepInputs:
    """As many tokens as the budget has, and a row of logits for as many requests as there can be; of no request, so
    that it reads and writes no block."""
    tokens, requests = max(2, config.token_budget), max(2, max_requests)

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    table = zeros(requests, 2, dtype=torch.int32)
    nowhere = zeros(tokens, dtype=torch.int64) - 1
    return StepInputs(
        input_ids=zeros(tokens, dtype=torch.int64),
        positions=zeros(tokens, dtype=torch.int64),
        cu_seqlens_q=zeros(requests + 1, dtype=torch.int32),
        context_lens=zeros(requests, dtype=torch.int32),
        block_table=table,
        slot_mapping=nowhere,
        other_tables=((table, nowhere),) * (num_tables - 1),
        logit_rows=zeros(requests, dtype=torch.int64),
        state_slots=zeros(requests, dtype=torch.int64),
    )
