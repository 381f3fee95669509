"""The requests of one call of `generate`: submitted, driven to their end, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from transformers.generation import BaseStreamer

from selective_compile.generate_arguments import Prompts
from selective_compile.generate_fields import Fields
from selective_compile.kept_engines import KeptEngines
from selective_compile.options import EngineConfig
from selective_compile.runtime.request import Request

# A function with the arguments of `model.generate` has no other place for what it compiled, since the model
# object stays as it is. Nothing in here outlives its model.
ENGINES: Final = KeptEngines()


# Inference mode would make the pools, which are kept, tensors that no call outside of it can write to.
@torch.inference_mode(False)
@torch.no_grad()
def new_tokens(
    model: nn.Module,
    config: EngineConfig,
    prompts: Prompts,
    fields: Sequence[Fields],
    seeds: Sequence[int],
    streamer: BaseStreamer | None,
) -> list[Sequence[int]]:
    """The new tokens of each prompt, from the engine that is kept for the model.

    Raises:
        ValueError: one of the prompts or its fields is wrong; none of them is served then.
        RuntimeError: a step failed.
    """
    max_positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    widths = [len(row) if prompts.columns is None else prompts.columns.shape[1] for row in prompts.rows]
    counts = [each.new_tokens(width, max_positions) for each, width in zip(fields, widths, strict=True)]
    lengths = [len(row) + count for row, count in zip(prompts.rows, counts, strict=True)]
    engine = ENGINES.engine_for(model, config, lengths)
    requests: list[Request] = []
    try:
        for row, each, count, chosen in zip(prompts.rows, fields, counts, seeds, strict=True):
            options = each.options() | {"max_new_tokens": count, "seed": chosen}
            requests.append(engine.submit(row, each.config, **options))
        if streamer is not None:
            _stream(requests[0], prompts, streamer)
        return [_tokens(request) for request in requests]
    finally:
        for request in requests:
            request.cancel()


def _stream(request: Request, prompts: Prompts, streamer: BaseStreamer) -> None:
    """As `model.generate` does: the prompt [1, S], every token [1], and the end."""
    columns = torch.tensor([request.prompt_ids]) if prompts.columns is None else prompts.columns.cpu()
    streamer.put(columns)
    for token in request:
        streamer.put(torch.tensor([token]))
    streamer.end()


def _tokens(request: Request) -> Sequence[int]:
    result = request.result()
    if result.finish_reason == "error":
        raise RuntimeError(result.error)
    return result.tokens


def sequences(
    prompts: Prompts, generated: Sequence[Sequence[int]], fields: Sequence[Fields], device: torch.device
) -> Tensor | list[Tensor]:
    """As `model.generate` returns them.

    Returns:
        [B, S + new] int64 for prompts that came as a tensor; a list of tensors [S + new] for those of a list.
    """
    if prompts.columns is None:
        rows = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in prompts.rows]
        return [torch.cat([row, row.new_tensor(new)]) for row, new in zip(rows, generated, strict=True)]
    longest = max(len(tokens) for tokens in generated)
    pad = fields[0].pad_token_id
    # Without an end-of-sequence id there is no padding id either, and no row ends before the others.
    assert pad is not None or all(len(tokens) == longest for tokens in generated)
    filled = [[*tokens, *[pad] * (longest - len(tokens))] for tokens in generated]
    return torch.cat([prompts.columns, prompts.columns.new_tensor(filled)], dim=1)
