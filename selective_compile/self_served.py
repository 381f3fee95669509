"""Calls of `generate` that a model serves itself, in transformers' own loop over the padded batch: what rows that are
requests by themselves could not be right about.

| what | why |
|---|---|
| processors for a tensor of several rows, but some of transformers' | they may tell rows apart |
| criteria for one, where `batch_criteria` cannot ask them | they may, too |
| whatever a processor or a loop of such a call asks of the same model | it is a part of that call |
| autocast around it, of a model with modules that run by themselves | steps, which call these, are not under it |
| training mode that changes logits, as by dropout | an engine is traced in evaluation mode |
| PEFT's `adapter_names` | each row has an adapter of its own |
| `custom_generate` | it is a loop of its own |
| a cache that is given | whoever gives it wants it filled, or the tokens in it taken for computed |
| weights that accelerate has offloaded | they come and go with the modules that run |
| a model that is refused | whatever runs each request by itself cannot, as with modules that keep what they saw |

Prompts that are given as a list are no batch: each is asked for by itself, whatever comes with it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import nn
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from selective_compile.model_call import CANNOT
from selective_compile.module_state import lock_of
from selective_compile.runtime.grammar import GRAMMARS
from selective_compile.training_mode import differs_in_training, in_training

logger = logging.getLogger(__name__)
NESTED = "it is a part of one that the model serves itself"
NAMES = "adapter_names"  # of PEFT's generate, which puts them into hooks before layers
OF_ARGUMENTS = {
    NAMES: "gives each row an adapter of its own",
    "custom_generate": "is a loop of its own",
    "past_key_values": "is the model's own cache, which an engine does not fill",
    "cache_params": "is the model's own cache, which an engine does not fill",
}
# Of transformers those that treat each row by itself, and do not ask where in a padded row a token stands.
ROW_WISE = (
    *(processors.TemperatureLogitsWarper, processors.TopKLogitsWarper, processors.TopPLogitsWarper),
    *(processors.MinPLogitsWarper, processors.TypicalLogitsWarper, processors.EpsilonLogitsWarper),
    *(processors.EtaLogitsWarper, processors.NoRepeatNGramLogitsProcessor, processors.NoBadWordsLogitsProcessor),
    *(processors.SequenceBiasLogitsProcessor, processors.SuppressTokensLogitsProcessor),
    *(processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization),
    *(criteria.MaxLengthCriteria, criteria.MaxTimeCriteria, criteria.EosTokenCriteria, criteria.StopStringCriteria),
)
# Models whose own generate is under way, in this thread and task.
_serving: ContextVar[frozenset[int]] = ContextVar("serving", default=frozenset())
_said: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def why_of_model(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """Why the model as it is, or what is ``given`` for it, makes a call one that the model serves itself; or None."""
    if id(model) in _serving.get():
        return NESTED
    for name, reason in OF_ARGUMENTS.items():
        if given.get(name) is not None:
            return f"{name} {reason}"
    if any(weight.is_meta for weight in model.parameters()):
        offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
        return "weights are offloaded, and come and go with the modules that run" if offloaded else None
    if any(map(_has_names, model.modules())):
        return f"{NAMES} {OF_ARGUMENTS[NAMES]}"
    if in_training(model) and _differs(model):
        return "the model is in training mode, which changes what it computes, as by dropout"
    return None


def why_of_objects(objects: Mapping[str, Any], rows: int) -> str | None:
    """The same of processors and criteria, by the name of their argument, for a tensor of so many rows."""
    for name, given in objects.items() if rows > 1 else ():
        if found := of_batches(given):
            return (
                f"{name} has {type(found[0]).__name__}, which may tell the rows of a batch apart (prompts given as a "
                "list are asked for by themselves, without padding)"
            )
    return None


def of_batches(given: Any) -> list[Any]:
    """Those of processors or criteria that may tell rows apart."""
    found = given if isinstance(given, (list, tuple)) else ()
    # Compared exactly: a class derived from one of these does something else.
    return [each for each in found if type(each) not in ROW_WISE]


def self_served(
    model: nn.Module, own: Callable[..., Any], asked: Mapping[str, Any], reason: str, *, refuse: bool, seed: Any
) -> Any:
    """What the model's ``own`` generate returns for what is ``asked``. The first time it is said why.

    Raises:
        ValueError: that is refused, or there is something among it that transformers has not.
    """
    if refuse:
        raise ValueError(
            f"EngineConfig.fallback must be 'sequential' for a call that the model serves itself: {reason}"
        )
    ours = {"seed": seed} | {name: asked.get(name) for name in GRAMMARS}
    if foreign := next((name for name, value in ours.items() if value is not None), None):
        raise ValueError(f"{foreign} must be None in a call that the model serves itself: {reason}")
    if isinstance(asked.get("generation_config"), (list, tuple)):
        raise ValueError(f"generation_config must be one for all rows of a tensor, got a list: {reason}")
    said = _said.setdefault(model, set())
    if reason not in (*said, NESTED):
        said.add(reason)
        logger.warning("%s serves calls of generate itself, padded and no faster: %s", type(model).__name__, reason)
    arguments = {name: value for name, value in asked.items() if name not in GRAMMARS}
    prompt = [arguments.pop("inputs")] if "inputs" in arguments else []  # as it came, by its place
    within = _serving.set(_serving.get() | {id(model)})
    try:
        with lock_of(model):
            return own(*prompt, **arguments)
    finally:
        _serving.reset(within)


def _differs(model: nn.Module) -> bool:
    try:
        return differs_in_training(model)
    except CANNOT:
        return True  # what its own generate says of it is said there


def _has_names(module: nn.Module) -> bool:
    return any(isinstance(hook, partial) and NAMES in hook.keywords for hook in module._forward_pre_hooks.values())
