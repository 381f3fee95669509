"""What a call of `generate` with beams returns, put together from its searches as `model.generate` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateBeamDecoderOnlyOutput

from selective_compile.generate_fields import Fields
from selective_compile.generate_prompts import Prompts
from selective_compile.runtime.request_result import RequestResult


def check_beams(fields: Sequence[Fields], *, streamer: Any) -> None:
    """Refuse what beams do not go with.

    Raises:
        ValueError: a streamer with beams, or prompts of different numbers of beams where a dictionary is returned.
    """
    counts = sorted({each.num_beams for each in fields})
    if counts[-1] > 1 and streamer is not None:
        raise ValueError(f"streamer must be None with num_beams={counts[-1]}: no token is final before the last")
    if len(counts) > 1 and any(each["return_dict_in_generate"] for each in fields):
        raise ValueError(f"num_beams must be the same for all prompts with return_dict_in_generate, got {counts}")


def beam_rows(results: Sequence[RequestResult]) -> list[list[int]]:
    """The generated tokens of each row that is returned: one for a prompt without beams."""
    found: list[list[int]] = []
    for result in results:
        hypotheses = result.hypotheses
        found += [list(result.tokens)] if hypotheses is None else [list(one.tokens) for one in hypotheses]
    return found


def sequences_of_beams(
    prompts: Prompts, results: Sequence[RequestResult], fields: Sequence[Fields], device: torch.device
) -> Tensor | list[Tensor]:
    """As `generate_results.sequences`, with as many rows for each prompt as its search gave."""
    counts = [1 if result.hypotheses is None else len(result.hypotheses) for result in results]
    rows = beam_rows(results)
    if prompts.columns is None:
        starts = [row for row, count in zip(prompts.rows, counts, strict=True) for _ in range(count)]
        tensors = [torch.as_tensor(start, dtype=torch.int64, device=device) for start in starts]
        return [torch.cat([start, start.new_tensor(row)]) for start, row in zip(tensors, rows, strict=True)]
    filled = torch.tensor(padded(rows, filling(fields[0])), dtype=torch.int64, device=device)
    columns = prompts.columns.repeat_interleave(torch.tensor(counts, device=prompts.columns.device), dim=0)
    return torch.cat([columns, filled.to(columns.device)], dim=1)


def output_of_beams(
    found: Tensor | list[Tensor],
    results: Sequence[RequestResult],
    fields: Sequence[Fields],
    device: torch.device,
    states: Mapping[str, Any],
) -> GenerateBeamDecoderOnlyOutput:
    """With `states`, and `scores` and `logits` of each step [B * num_beams, V]; of a search that has ended, zeros."""
    beams = fields[0].num_beams
    every = [result.hypotheses or () for result in results]
    paths = [
        [place + number * beams for place in one.beam_indices] for number, each in enumerate(every) for one in each
    ]
    values = torch.tensor([one.score for each in every for one in each], dtype=torch.float32, device=device)
    kept = {
        name: _steps([getattr(result, name) for result in results])
        for name, wanted in (("scores", "output_scores"), ("logits", "output_logits"))
        if all(each.kept()[wanted] for each in fields)
    }
    return GenerateBeamDecoderOnlyOutput(
        sequences=found,
        sequences_scores=values if "scores" in kept else None,
        beam_indices=torch.tensor(padded(paths, -1), dtype=torch.int32, device=device),
        **kept,
        **states,
    )


def padded(rows: Sequence[list[int]], fill: int) -> list[list[int]]:
    longest = max(map(len, rows))
    return [[*row, *[fill] * (longest - len(row))] for row in rows]


def filling(fields: Fields) -> int:
    """As there: -1 where nothing can end a sequence; and an end-of-sequence id where the padding id is 0."""
    ends = fields.eos_token_ids
    return (fields.pad_token_id or ends[0]) if ends else -1


def _steps(rows: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    longest = max(len(each) for each in rows)
    none = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([each[step] if step < len(each) else none for each in rows]) for step in range(longest))
