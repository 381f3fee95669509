"""What a request's options come to: its own before its configuration's before the model's, each value checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig

from selective_compile.runtime.generation_fields import FIELDS, KNOWN, refuse_unsupported
from selective_compile.runtime.generation_values import ALWAYS, WHEN_SAMPLING, WITH_BEAMS, boolean, count
from selective_compile.runtime.grammar import GRAMMARS

# What several beams do not go with, and what to do instead.
NOT_WITH_BEAMS: Mapping[str, str] = {
    "num_beam_groups": "call model.generate(custom_generate='transformers-community/group-beam-search')",
    "low_memory": "leave it out, as transformers has it no more; beams share blocks",
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit"),
        "leave it out, drafts go with one sequence and change no token",
    ),
    "processed_logprobs": "output_scores has those of all tokens for each beam",
    "top_logprobs": "output_scores has those of all tokens for each beam",
    "prompt_logprobs": "Engine.score has them",
    **dict.fromkeys(GRAMMARS, "prefix_allowed_tokens_fn constrains beams"),
}

# What other engines call them.
NAMES_ELSEWHERE: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "stop_token_ids": "eos_token_id",
    "logit_bias": "sequence_bias",
    "bad_words": "bad_words_ids",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "random_seed": "seed",
}

# What `generate` takes for a field that neither the call nor the model sets. Lengths are resolved by themselves.
DEFAULTS: Mapping[str, Any] = {
    name: value
    for name, value in GenerationConfig._get_default_generation_params().items()
    if name in FIELDS and name != "max_length"
}


def samples_asked(*sources: GenerationConfig | Mapping[str, Any] | None) -> int:
    """How many sequences to sample of a prompt: by options, configuration and the model's, the first that says.

    Those of a beam search are no samples.

    Raises:
        ValueError: it is not a number of at least 1, or several of greedy decoding, which would all be the same.
    """
    asked = _first_of("num_return_sequences", sources)
    asked = 1 if asked is None else count("num_return_sequences", asked)
    beams = _first_of("num_beams", sources)
    if beams is not None and count("num_beams", beams) > 1:
        return 1
    if asked > 1 and not _first_of("do_sample", sources):
        raise ValueError(f"num_return_sequences must be 1 for greedy decoding, got {asked}")
    return int(asked)


def _first_of(name: str, sources: Sequence[GenerationConfig | Mapping[str, Any] | None]) -> Any:
    for source in sources:
        if isinstance(source, Mapping):
            if name in source:
                return source[name]
        elif getattr(source, name, None) is not None:
            return getattr(source, name)
    return None


def merged(
    config: GenerationConfig | None, options: Mapping[str, Any], model_config: GenerationConfig | None
) -> dict[str, Any]:
    """Every field that is set to something; unknown names and unsupported values are refused.

    A model's own configuration may carry names that are none, from its makers or from an older transformers.
    `generate` passes over them, and so does this, also where the request's configuration is a copy of the model's.
    """
    of_model = set_fields(model_config)
    of_request = set_fields(config)
    for name in of_model.keys() - KNOWN:
        value = of_model.pop(name)
        if name in of_request and of_request[name] == value:
            del of_request[name]
    of_request |= options
    for name in of_request:
        if name not in KNOWN:
            raise ValueError(unknown("generation option", name, KNOWN))
    values = of_model | of_request
    for name, value in values.items():
        refuse_unsupported(name, value, "" if name in of_request else " (from model.generation_config)")
    return {**DEFAULTS, **values}


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """What to say of a name that other engines have, or that was misspelled."""
    near = NAMES_ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, n=1)), None)
    instead = f" where {near!r} is one" if near else ""
    return f"{what} must be a known one, got {name!r}{instead}; known are {', '.join(sorted(known))}"


def set_fields(config: GenerationConfig | None) -> dict[str, Any]:
    """What a configuration does not leave open."""
    if config is None:
        return {}
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """The same, with each value as it is to be read.

    Raises:
        ValueError: one is not what it must be, or does not go with another.
    """
    do_sample = values.get("do_sample")
    values["do_sample"] = False if do_sample is None else boolean("do_sample", do_sample)
    if values.get("num_beams") is None:
        values["num_beams"] = 1
    checks = {**ALWAYS, **WHEN_SAMPLING} if values["do_sample"] else ALWAYS
    for name, check in checks.items():
        if values.get(name) is not None:
            values[name] = check(name, values[name])
    _refuse_forced_and_suppressed(values)
    return values


def _refuse_forced_and_suppressed(values: Mapping[str, Any]) -> None:
    """As transformers does: no token would be left where one of them must come."""
    suppressed = set(values.get("suppress_tokens") or ())
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        given = values.get(name)
        forced = {given} if isinstance(given, int) else set(given or ())
        if forced and forced <= suppressed:
            raise ValueError(f"{name} must have a token that is not among suppress_tokens, got {sorted(forced)}")


def check_beams(values: dict[str, Any]) -> None:
    """Check what only beams have, and refuse what they do not go with."""
    beams = values["num_beams"]
    for name, check in WITH_BEAMS.items():
        if values.get(name) is not None:
            values[name] = check(name, values[name])
    sequences = values.get("num_return_sequences") or 1
    if sequences > beams:
        raise ValueError(f"num_return_sequences must be at most num_beams, {beams}, got {sequences}")
    for name, instead in NOT_WITH_BEAMS.items():
        value = values.get(name)
        nothing = (None, False, 0) if name != "num_beam_groups" else (None, 1)
        if value not in nothing or value is True:
            raise ValueError(f"{name} must be None with num_beams={beams}, got {value!r}: {instead}")
