"""What a model has of its own in the place of functions that transformers' `generate` is made of.

An engine does what `generate` does around the forward.  What a model does there in its own way is either seen in trials
of its steps (`one_token`), or, in a class of transformers', is about other inputs than tokens, or is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import transformers
from transformers import GenerationMixin

FOLDER: Final = Path(transformers.__file__).parent
FUNCTIONS: Final = tuple(name for name, value in vars(GenerationMixin).items() if isinstance(value, FunctionType))
# What a trial of steps runs: whatever it is, logits that are others are seen.
TRIED: Final = (
    "prepare_inputs_for_generation",
    "_prepare_cache_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
# What chooses and counts tokens, which an engine does itself. Classes of transformers' that have one of these make
# sound, or read text from images or sound.
REPLACED: Final = frozenset(
    {
        "generate",
        "_assisted_decoding",
        "_beam_search",
        "_get_candidate_generator",
        "_get_logits_processor",
        "_get_running_beams_for_next_iteration",
        "_get_stopping_criteria",
        "_get_top_k_continuations",
        "_has_unfinished_sequences",
        "_prefill",
        "_prepare_generated_length",
        "_prepare_generation_config",
        "_prepare_special_tokens",
        "_sample",
        "_update_finished_beams",
    }
)


def unlike_transformers(model: object) -> str | None:
    """The name of a function of `generate` that is the model's own, and that nothing tells to do the same; or None."""
    for name in FUNCTIONS:
        own = own_function(model, name)
        if own is None or name in TRIED:
            continue
        if name in REPLACED or not is_of_transformers(own):
            return name
    return None


def generate_of_transformers(kind: type[Any]) -> Callable[..., Any]:
    """The `generate` of the nearest of its classes that is transformers' own: what a model has in its place may take
    other arguments."""
    found = (vars(each).get("generate") for each in kind.__mro__ if each.__module__.startswith("transformers."))
    return next(filter(None, found))


def own_function(model: object, name: str) -> object | None:
    """What stands in the place of a function of `GenerationMixin`; None where that stands there itself."""
    # A `generate` of the object's own may well be the one that ends here.
    if name in vars(model) and name != "generate":
        found: object = vars(model)[name]
        return found
    found = inspect.getattr_static(type(model), name)
    return None if found is vars(GenerationMixin)[name] else found


def is_of_transformers(function: object) -> bool:
    """Whether its code is in a file of transformers': a name can be had by anything."""
    code = code_of(function)
    return code is not None and FOLDER in Path(code.co_filename).parents


def code_of(function: object) -> CodeType | None:
    found = getattr(getattr(function, "__func__", function), "__code__", None)
    return found if isinstance(found, CodeType) else None


def tried(kind: type, attributes: Mapping[str, Any]) -> list[tuple[object, CodeType | None]]:
    """What trials of steps have run: of the class of a model, or of its own ``attributes``."""
    functions = [attributes.get(name, inspect.getattr_static(kind, name, None)) for name in TRIED]
    return [(let_go(function), code_of(function)) for function in functions]


def let_go(function: object) -> object:
    """What is equal for the same function, and does not keep the model that it may belong to."""
    function = getattr(function, "__func__", function)
    return weakref.ref(function) if isinstance(function, FunctionType) else id(function)
