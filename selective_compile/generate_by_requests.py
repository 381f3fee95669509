"""One call of `generate` as requests to an engine, a row each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers.generation import BaseStreamer

from selective_compile.generate_arguments import (
    FORWARD_ARGUMENTS,
    check_configuration,
    check_fields_with,
    check_forward_arguments,
    expanded,
    prompts_of,
    prompts_of_embeddings,
    refuse_unsupported,
    seeds_of,
    with_types,
)
from selective_compile.generate_beams import check_beams
from selective_compile.generate_fields import GENERATION_FIELDS, fields_of
from selective_compile.generate_objects import CallObjects
from selective_compile.generate_requests import finished_requests
from selective_compile.generate_results import refuse_ends_without_padding, returned
from selective_compile.generate_states import check_states, states_of
from selective_compile.kept_refusals import KeptRefusals
from selective_compile.model_facts import device_of
from selective_compile.options import EngineConfig
from selective_compile.passes import RefusedError
from selective_compile.runtime.grammar import GRAMMARS
from selective_compile.self_served import why_of_objects

TAKEN = GENERATION_FIELDS | FORWARD_ARGUMENTS | {"tokenizer", *GRAMMARS}


def by_requests(
    model: nn.Module,
    config: EngineConfig,
    by_model: Callable[[str], Any] | None,
    seed: int | Sequence[int] | None,
    /,
    *,
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: BaseStreamer | None = None,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    input_ids: Any = None,
    attention_mask: Any = None,
    inputs_embeds: Any = None,
    token_type_ids: Any = None,
    **kwargs: Any,
) -> Any:
    """What `generate` returns, by an engine; or ``by_model``, if that can be, which it tells why."""
    others = {name: kwargs[name] for name in kwargs if name not in TAKEN}
    refuse_unsupported(others | {"synced_gpus": synced_gpus}, model, NAMES)
    if inputs is not None and input_ids is not None:
        raise ValueError("input_ids must be None where inputs is given, got both")
    inputs = input_ids if inputs is None else inputs
    arguments = {name: value for name, value in kwargs.items() if name in GENERATION_FIELDS}
    if generation_config is None:
        check_configuration(model)
    fields = fields_of(arguments, generation_config, getattr(model, "generation_config", None), inputs)
    if inputs_embeds is None:
        prompts = prompts_of(inputs, attention_mask, fields, device_of(model))
    else:
        check_fields_with("inputs_embeds", fields)
        prompts = prompts_of_embeddings(inputs_embeds, inputs, attention_mask, fields[0])
    if token_type_ids is not None:
        check_fields_with("token_type_ids", fields)
        prompts = with_types(prompts, token_type_ids)
    check_forward_arguments(prompts, kwargs)
    fields = fields * len(prompts.rows) if len(fields) == 1 else fields
    prompts, fields = expanded(prompts, fields)
    own_code = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
    if by_model is not None and (reason := why_of_objects(own_code, len(fields))) is not None:
        return by_model(reason)
    before = torch.get_rng_state()
    seeds = seeds_of(seed, len(fields), sampled=any(each["do_sample"] for each in fields))
    if streamer is not None and prompts.columns is None and len(fields) > 1:
        raise ValueError(f"streamer must be None for a list of more than one prompt, got one for {len(fields)}")
    check_beams(fields, streamer=streamer)
    check_states(model, prompts, fields, config)
    refuse_ends_without_padding(
        fields, criteria=stopping_criteria or (), rows=0 if prompts.columns is None else len(fields)
    )
    objects = CallObjects(
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        tokenizer=kwargs.get("tokenizer"),
        negative_prompt_ids=negative_prompt_ids,
        negative_prompt_attention_mask=negative_prompt_attention_mask,
        assistant_model=assistant_model,
        structure={name: kwargs[name] for name in GRAMMARS if name in kwargs},
    )
    own = by_model if config.fallback == "sequential" else None
    kind = inputs_embeds is not None, prompts.types is not None, id(assistant_model)
    reason = None if own is None else REFUSALS.of(model, config, *kind)
    try:
        if reason is None:
            results = finished_requests(model, config, prompts, fields, seeds, objects, streamer)
    except RefusedError as error:
        if own is None:
            raise
        reason = str(error)
        REFUSALS.keep(model, config, *kind, reason=reason)
    if own is not None and reason is not None:
        torch.set_rng_state(before)  # what is drawn there is as if nothing had been drawn here
        return own(reason)
    return returned(prompts, results, fields, device_of(model), states_of(model, prompts, results, fields))


REFUSALS: Final = KeptRefusals()
# All that a call may name, of which a name that is close to one is told.
NAMES = TAKEN | {"engine_config", "custom_generate"} | inspect.signature(by_requests).parameters.keys()
NAMES -= {"model", "config", "by_model", "kwargs"}
