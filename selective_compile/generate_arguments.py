"""The arguments of `model.generate` read as requests; what is not supported is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import TransformersKwargs

from selective_compile.generate_fields import Fields, described
from selective_compile.model_facts import why_no_head
from selective_compile.options import integer_of
from selective_compile.own_generation import unlike_transformers
from selective_compile.runtime.generation_fields import OWN_OPTIONS
from selective_compile.runtime.merged_fields import unknown
from selective_compile.token_types import UNIT

# Of these, an empty list or False asks for nothing either.
NONE_OR_EMPTY = frozenset({"synced_gpus", "trust_remote_code"})

# What to do instead, of arguments that are refused.
OF_HUGGING_FACE = "leave it out, or call model.generate, of a model that is not wrapped"
OF_ENGINE = "leave it out, or submit to an sc.Engine"
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys((*OWN_OPTIONS, "request_id", "priority", "deadline", "user", "cache_salt"), OF_ENGINE),
    "trust_remote_code": OF_HUGGING_FACE,
    "cache": "give it all tokens: the engine finds the blocks of those that it has computed",
    "assistant_tokenizer": "prompt_lookup_num_tokens drafts without a model; an assistant needs the same vocabulary",
    "synced_gpus": "leave it out: a request does not wait for other processes",
}

# Arguments of a model's forward that may be given as long as they say what holds in any case.
FORWARD_ARGUMENTS = frozenset({"position_ids", "logits_to_keep", "output_router_logits"})


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


def refuse_unsupported(arguments: Mapping[str, Any], model: nn.Module, taken: Collection[str]) -> None:
    """Refuse every argument but those that ask for nothing.

    Args:
        taken: the names that are known beside these, one of which may be meant.

    Raises:
        ValueError: naming the first of them; of one that the model's own `generate` does not know either, that.
    """
    for name, value in arguments.items():
        if value is not None and not (name in NONE_OR_EMPTY and not value):
            if name not in INSTEAD and name not in arguments_of(model):
                raise ValueError(unknown("argument of generate", name, taken))
            raise ValueError(
                f"argument {name!r} of generate must be None, got {described(value)}: not supported; "
                f"{INSTEAD.get(name, OF_HUGGING_FACE)}"
            )


def arguments_of(model: nn.Module) -> set[str]:
    """What a model's own `generate` takes beside fields of generation, as it looks for typos itself."""
    found = set(TransformersKwargs.__annotations__)
    for name in ("generate", "prepare_inputs_for_generation", "forward"):
        if (function := getattr(type(model), name, None)) is not None:
            found |= inspect.signature(function).parameters.keys()
    return found


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


def check_fields_with(name: str, fields: Sequence[Fields]) -> None:
    """Refuse what looks at a prompt's ids in other ways than processors and criteria do, beside the argument `name`.

    Raises:
        ValueError: naming it.
    """
    for each in fields:
        if each["guidance_scale"] not in (None, 1, 1.0):
            raise ValueError(
                f"guidance_scale must be None with {name}, got {each['guidance_scale']!r}: {OF_HUGGING_FACE}"
            )


def check_forward_arguments(prompts: Prompts, arguments: Mapping[str, Any]) -> None:
    """Refuse what is not so of the engine: it numbers the tokens of each row from 0, and keeps the last row of logits.

    Of routers' logits a forward makes a loss, and `generate` returns neither.

    Raises:
        ValueError: other position ids, a number of rows to keep that is none, or a switch that is none.
    """
    routers = arguments.get("output_router_logits")
    if not (routers is None or isinstance(routers, bool)):
        raise ValueError(f"output_router_logits must be True, False or None, got {described(routers)}")
    kept = arguments.get("logits_to_keep")
    count = integer_of(kept)
    if kept is not None and (count is None or count < 0):
        raise ValueError(f"logits_to_keep must be an integer of at least 0 or None, got {described(kept)}")
    given = arguments.get("position_ids")
    if given is None:
        return
    if prompts.mask is None:
        raise ValueError(f"position_ids must be None for a list of prompts, got {described(given)}")
    found = torch.as_tensor(given, device=prompts.mask.device)
    if found.dim() != 2 or found.shape[1] != prompts.mask.shape[1] or len(found) not in (1, len(prompts.mask)):
        raise ValueError(f"position_ids must have shape {list(prompts.mask.shape)}, got {described(given)}")
    if bool(((found != prompts.mask.cumsum(1) - 1) & prompts.mask).any()):
        raise ValueError("position_ids must number the tokens of each row from 0, padding left out, got others")


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


def seeds_of(seed: Any, count: int, *, sampled: bool) -> list[int]:
    """A seed for each prompt.

    Row i of a call with one seed has seed + i. Without one, they are drawn from torch's default generator,
    which `torch.manual_seed` sets; greedy decoding does not draw.

    Raises:
        ValueError: it is not an integer, nor a list of as many as there are prompts.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (count,), device="cpu").tolist() if sampled else [0] * count
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise ValueError(f"seed must be an integer or a list of {count}, one for each prompt, got {len(seed)}")
        return list(seed)
    first = integer_of(seed)
    if first is None or not 0 <= first < 2**64:
        raise ValueError(f"seed must be an integer of at least 0 and less than 2**64, got {seed!r}")
    return [(first + row) % 2**64 for row in range(count)]


def check_configuration(model: Any) -> None:
    """Refuse generation fields in a model's own configuration, as `generate` does: they were read there once.

    Raises:
        ValueError: there are some.
    """
    found: dict[str, Any] = getattr(getattr(model, "config", None), "_get_generation_parameters", dict)()
    if found:
        raise ValueError(f"generation fields must be set in model.generation_config, got in model.config {found}")


def check_model(model: Any) -> None:
    """Refuse what `generate` could not be right about.

    Raises:
        ValueError: not a decoder-only model, or one without a head, or that generates in its own way.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {described(model)}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder without an encoder, got {type(model).__name__}")
    if reason := why_no_head(model):
        raise ValueError(reason)
    if isinstance(model, GenerationMixin) and (own := unlike_transformers(model)):
        raise ValueError(f"model must generate as transformers does, got {type(model).__name__} with its own {own}")
