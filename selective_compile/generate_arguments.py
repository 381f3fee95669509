"""The arguments of `model.generate` that an engine has nothing for: refused by name, unless they ask for nothing."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.utils import TransformersKwargs

from selective_compile.generate_fields import Fields, described
from selective_compile.generate_prompts import Prompts
from selective_compile.model_facts import why_no_head
from selective_compile.options import integer_of
from selective_compile.own_generation import unlike_transformers
from selective_compile.runtime.generation_fields import OWN_OPTIONS
from selective_compile.runtime.merged_fields import unknown

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

# Of a model's forward that transformers' loop never hands on (`GenerationMixin.prepare_inputs_for_generation`): batches
# of a data set for training have them beside the ids.
LEFT_OUT = frozenset({"labels"})


def refuse_unsupported(arguments: Mapping[str, Any], model: nn.Module, taken: Collection[str]) -> None:
    """Refuse every argument but those that ask for nothing, and those that `generate` itself leaves out.

    Args:
        taken: the names that are known beside these, one of which may be meant.

    Raises:
        ValueError: naming the first of them; of one that the model's own `generate` does not know either, that.
    """
    for name, value in arguments.items():
        if value is not None and not (name in NONE_OR_EMPTY and not value):
            known = name in INSTEAD or name in arguments_of(model)
            if known and name in LEFT_OUT:
                continue
            if not known:
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
