"""The prompts of a call of `generate`, with the padding that they came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from selective_compile.generate_fields import Fields, described
from selective_compile.token_types import UNIT


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a call.

    Attributes:
        rows: the token ids of each.
        columns: [B, S] int64, the tensor that they came in, padding included; None: they came as a list.
        mask: [B, S] bool, False for padding; None with `columns`.
        holes: a row has padding between its tokens.
        embeds: [B, S, hidden], the prompts as embeddings, and `rows` are those of each [n, hidden]; `columns` [B, S] or
            [B, 0] are then only what stands for them where others than the model look at the prompt.
        types: [B, S] int64, the types of the tokens.
        numbers: of which prompt each row is, where some have several; None: each of its own.
    """

    rows: Sequence[Any]
    columns: Tensor | None
    mask: Tensor | None = None
    holes: bool = False
    embeds: Tensor | None = None
    types: Tensor | None = None
    numbers: Sequence[int] | None = None

    def width_of(self, number: int, *, counted: bool = True) -> int:
        """S, or the length of a row of a list; of embeddings without ids 0, unless those are `counted`."""
        if self.columns is None or self.mask is None:
            return len(self.rows[number])
        return self.mask.shape[1] if counted else self.columns.shape[1]

    def seen(self, number: int) -> Any:
        """The ids of a row that processors, criteria and beams see: its own, or those for what the model gets."""
        if (self.embeds is None and self.types is None) or self.columns is None or self.mask is None:
            return self.rows[number]
        return self.columns[number][self.mask[number]] if self.columns.shape[1] else self.columns[number]

    def types_of(self, number: int, num_types: int) -> Tensor:
        """The types [n] of a row's tokens.

        Raises:
            ValueError: one is none of so many.
        """
        assert self.types is not None and self.mask is not None
        found = self.types[number][self.mask[number]]
        wrong = found[(found < 0) | (found >= num_types)].tolist()
        if wrong:
            raise ValueError(f"token_type_ids must be at least 0 and less than {num_types}, got {wrong[0]}")
        return found

    def id_offset(self, number: int) -> int:
        """What tells the type of a row's last token, which its new ones have too."""
        if self.types is None or self.mask is None:
            return 0
        return int(self.types[number][self.mask[number]][-1]) * UNIT


def prompts_of(inputs: Any, attention_mask: Any, fields: Sequence[Fields], device: torch.device) -> Prompts:
    """Read the prompts: a tensor [B, S], whose real tokens make the prompt of each row, or a list of prompts.

    Raises:
        ValueError: it is neither; or `attention_mask` does not go with it.
    """
    if inputs is None:
        inputs = _begin_of_sequence(fields[0], device)
    if isinstance(inputs, Tensor):
        return _prompts_of_tensor(inputs, attention_mask, fields[0])
    if not isinstance(inputs, (list, tuple)) or not all(_is_prompt(row) for row in inputs):
        raise ValueError(f"input_ids must be a tensor [B, S] or a list of prompts, got {described(inputs)}")
    if not inputs:
        raise ValueError("input_ids must hold at least one prompt, got none")
    if attention_mask is not None:
        raise ValueError("attention_mask must be None for a list of prompts, which has no padding, got one")
    return Prompts(rows=inputs, columns=None)


def prompts_of_embeddings(embeds: Any, inputs: Any, attention_mask: Any, fields: Fields) -> Prompts:
    """Read prompts of embeddings [B, S, hidden], with the ids [B, S] that stand for them in what is returned, or none.

    Raises:
        ValueError: they are no such tensor; or the ids or `attention_mask` do not go with them.
    """
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.shape[0] or not embeds.is_floating_point():
        raise ValueError(f"inputs_embeds must be a floating tensor [B, S, hidden], got {described(embeds)}")
    batch, width, _ = embeds.shape
    given = inputs is not None and not (isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.shape[1])
    if given and (not isinstance(inputs, Tensor) or inputs.shape != embeds.shape[:2]):
        raise ValueError(
            f"input_ids must be a tensor {[batch, width]} with inputs_embeds, or None, got {described(inputs)}"
        )
    if not given:
        stand_ins = torch.zeros(batch, width, dtype=torch.int64, device=embeds.device)
        attention_mask = torch.ones_like(stand_ins) if attention_mask is None else attention_mask
        read = _prompts_of_tensor(stand_ins, attention_mask, fields)
    else:
        read = _prompts_of_tensor(inputs, attention_mask, fields)
    assert read.columns is not None and read.mask is not None
    return Prompts(
        rows=[rows[real] for rows, real in zip(embeds, read.mask.to(embeds.device), strict=True)],
        columns=read.columns if given else read.columns[:, :0],
        mask=read.mask,
        holes=read.holes,
        embeds=embeds,
    )


def with_types(prompts: Prompts, given: Any) -> Prompts:
    """The prompts with the types of their tokens, [B, S], or [1, S] for all rows.

    Raises:
        ValueError: they are no such tensor, or the prompts came as a list.
    """
    if prompts.mask is None:
        raise ValueError(f"token_type_ids must be None for a list of prompts, got {described(given)}")
    shape = list(prompts.mask.shape)
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_type_ids must be an integer tensor {shape}, got {described(given)}")
    if given.dim() != 2 or given.shape[1] != shape[1] or len(given) not in (1, shape[0]):
        raise ValueError(f"token_type_ids must have shape {shape}, got {described(given)}")
    return replace(prompts, types=given.to(prompts.mask.device).long().expand(shape))


def expanded(prompts: Prompts, fields: Sequence[Fields]) -> tuple[Prompts, list[Fields]]:
    """Each prompt, with its fields, as many times as it has sequences to return.

    Raises:
        ValueError: a number of sequences that is none, or several of greedy decoding.
    """
    counts = [each.samples for each in fields]
    if all(count == 1 for count in counts):
        return prompts, list(fields)
    columns, mask, embeds, types = (
        None if each is None else each.repeat_interleave(torch.tensor(counts, device=each.device), dim=0)
        for each in (prompts.columns, prompts.mask, prompts.embeds, prompts.types)
    )
    numbers = [number for number, count in enumerate(counts) for _ in range(count)]
    rows = [prompts.rows[number] for number in numbers]
    several = replace(prompts, rows=rows, columns=columns, mask=mask, embeds=embeds, types=types, numbers=numbers)
    return several, [fields[number] for number in numbers]


def _is_prompt(row: Any) -> bool:
    return isinstance(row, (list, tuple)) or getattr(row, "ndim", None) == 1


def _begin_of_sequence(fields: Fields, device: torch.device) -> Tensor:
    if fields["bos_token_id"] is None:
        raise ValueError("input_ids must be given where there is no bos_token_id, got None")
    return torch.tensor([[int(fields["bos_token_id"])]], device=device)


def _prompts_of_tensor(columns: Tensor, attention_mask: Any, fields: Fields) -> Prompts:
    if columns.dim() != 2 or not len(columns):
        raise ValueError(f"input_ids must have shape [B, S], got {list(columns.shape)}")
    if columns.is_floating_point() or columns.is_complex() or columns.dtype is torch.bool:
        raise ValueError(f"input_ids must be integers, got {columns.dtype}")
    at_least = "attention_mask must leave at least one token in each row"
    if columns.is_meta:
        raise ValueError("input_ids must hold token ids, got a tensor on the device meta")
    if attention_mask is None:
        attention_mask = inferred_mask(columns, fields)
        at_least = (
            f"input_ids must have a token beside the padding id {fields.pad_token_id} in each row, or a mask be given"
        )
    given = torch.as_tensor(attention_mask, device=columns.device)
    mask = given != 0
    if bool((mask & (given != 1)).any()):  # positions are counted by its sums
        raise ValueError(f"attention_mask must be of 0 and 1, got {given[mask & (given != 1)][0].item()}")
    if mask.shape != columns.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(columns.shape)}, got {list(mask.shape)}"
        )
    for row, count in enumerate(mask.sum(1).tolist()):
        if not count:
            raise ValueError(f"{at_least}, got none in row {row}")
    rows = [ids[real] for ids, real in zip(columns.cpu(), mask.cpu(), strict=True)]
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    return Prompts(rows=rows, columns=columns.long(), mask=mask, holes=bool((starts > 1).any()))


def inferred_mask(columns: Tensor, fields: Fields) -> Tensor:
    """As `model.generate` infers it: padding ids are padding, unless they end sequences too. [B, S] bool."""
    pad = fields.pad_token_id
    if pad is None or pad in fields.eos_token_ids:
        return torch.ones_like(columns, dtype=torch.bool)
    return columns != pad
