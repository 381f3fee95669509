"""What a call of `generate` returns, put together from the results of its requests as `model.generate` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from selective_compile.generate_beams import output_of_beams, sequences_of_beams
from selective_compile.generate_fields import Fields
from selective_compile.generate_prompts import Prompts
from selective_compile.runtime.request_result import RequestResult


def returned(
    prompts: Prompts,
    results: Sequence[RequestResult],
    fields: Sequence[Fields],
    device: torch.device,
    states: Mapping[str, Any],
) -> Any:
    """The sequences; in a GenerateDecoderOnlyOutput where one of the prompts asks for it.

    Its `scores` and `logits` are, for each step, [B, V] float32 on `device`. Rows that have ended, for which
    `model.generate` goes on computing with padding, have 0 for the padding id and -inf for all others there.

    Args:
        states: what else it holds.
    """
    if any(result.hypotheses is not None for result in results):
        of_beams = sequences_of_beams(prompts, results, fields, device)
        wanted = any(each["return_dict_in_generate"] for each in fields)
        return output_of_beams(of_beams, results, fields, device, states) if wanted else of_beams
    found = sequences(prompts, results, fields, device)
    if not any(each["return_dict_in_generate"] for each in fields):
        return found
    kept = {
        name: steps([getattr(result, name) for result in results], fields[0].pad_token_id)
        for name, wanted in (("scores", "output_scores"), ("logits", "output_logits"))
        if all(each.kept()[wanted] for each in fields)
    }
    return GenerateDecoderOnlyOutput(sequences=found, **kept, **states)


def sequences(
    prompts: Prompts, results: Sequence[RequestResult], fields: Sequence[Fields], device: torch.device
) -> Tensor | list[Tensor]:
    """[B, S + new] int64 for prompts that came as a tensor; a list of tensors [S + new] for those of a list."""
    if prompts.columns is None:
        rows = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in prompts.rows]
        return [torch.cat([row, row.new_tensor(result.tokens)]) for row, result in zip(rows, results, strict=True)]
    longest = max(len(result.tokens) for result in results)
    pad = fields[0].pad_token_id
    # Without a padding id all rows go on to the same length: `refuse_ends_without_padding` saw to it.
    assert pad is not None or all(len(result.tokens) == longest for result in results)
    filled = [[*result.tokens, *[pad] * (longest - len(result.tokens))] for result in results]
    return torch.cat([prompts.columns, prompts.columns.new_tensor(filled)], dim=1)


def steps(rows: Sequence[Sequence[Tensor]], pad: int | None) -> tuple[Tensor, ...]:
    """For each step [B, V], from the rows [V] of each request."""
    longest = max(len(each) for each in rows)
    ended = torch.full_like(rows[0][0], -torch.inf)
    if pad is not None and pad < len(ended):
        ended[pad] = 0.0
    return tuple(torch.stack([each[step] if step < len(each) else ended for each in rows]) for step in range(longest))


def refuse_ends_without_padding(fields: Sequence[Fields], *, criteria: Sequence[Any], rows: int) -> None:
    """Refuse several rows that may end at different lengths with nothing to fill them up with.

    `model.generate` fills them with tokens generated after the end, which no request here computes; with padding only
    where there is an end-of-sequence id.

    Args:
        criteria: those of the call.

    Raises:
        ValueError: naming what ends them.
    """
    if not isinstance(criteria, (list, tuple)):
        raise ValueError(f"stopping_criteria must be a list, got {type(criteria).__name__}")
    pads = any(hasattr(each, "eos_token_id") for each in criteria)  # as there
    for each in fields:
        missing = "pad_token_id" if each.pad_token_id is None else "eos_token_id"
        if rows > 1 and each.num_beams == 1 and (each.pad_token_id is None or not (pads or each.eos_token_ids)):
            for name, asked in (
                ("stopping_criteria", criteria),
                ("stop_strings", each["stop_strings"]),
                ("max_time", each["max_time"]),
            ):
                if asked:
                    raise ValueError(f"{missing} must be set for more than one row with {name}, got None")
