"""One call of `generate` as requests to an engine, a row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from selective_compile.generate_arguments import seeds_of
from selective_compile.generate_call import GenerateCall
from selective_compile.generate_requests import finished_requests
from selective_compile.generate_results import returned
from selective_compile.generate_states import states_of
from selective_compile.kept_refusals import KeptRefusals
from selective_compile.model_facts import device_of
from selective_compile.options import EngineConfig
from selective_compile.passes import RefusedError

REFUSALS: Final = KeptRefusals()


def by_requests(
    model: nn.Module,
    config: EngineConfig,
    by_model: Callable[[str], Any] | None,
    seed: int | Sequence[int] | None,
    given: Mapping[str, Any],
) -> Any:
    """What `generate` returns, by an engine; or ``by_model``, if that can be, which it tells why."""
    call = GenerateCall.of(model, given)
    if by_model is not None and (reason := call.why_the_models_own()) is not None:
        return by_model(reason)
    before = torch.get_rng_state()
    seeds = seeds_of(seed, len(call.fields), sampled=call.sampled)
    call.check(model, config)
    own = by_model if config.fallback == "sequential" else None
    reason = None if own is None else REFUSALS.of(model, config, *call.kind)
    try:
        if reason is None:
            results = finished_requests(model, config, call, seeds)
    except RefusedError as error:
        if own is None:
            raise
        reason = str(error)
        REFUSALS.keep(model, config, *call.kind, reason=reason)
    if own is not None and reason is not None:
        torch.set_rng_state(before)  # what is drawn there is as if nothing had been drawn here
        return own(reason)
    states = states_of(model, call.prompts, results, call.fields)
    return returned(call.prompts, results, call.fields, device_of(model), states)
