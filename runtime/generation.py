"""What a request asks of generation, read from a `GenerationConfig`; what is not supported is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

# What `generate` takes for a field that neither the call nor the model sets
# (`GenerationConfig._get_default_generation_params` in transformers), for the fields that are implemented.
SAMPLING_DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
DEFAULT_NEW_TOKENS = 20

IMPLEMENTED = frozenset({*SAMPLING_DEFAULTS, "do_sample", "max_length", "max_new_tokens", "eos_token_id"})

# Options of a request that GenerationConfig has no field for.
OWN_OPTIONS = frozenset({"seed", "logprobs"})

# These do not change which tokens are generated: padding and the return type are the business of the one who
# calls `generate`, a decoder-only model has no decoder start, the rest is about transformers' own compiling
# and bookkeeping.
WITHOUT_EFFECT = frozenset(
    {
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "return_dict_in_generate",
        "compile_config",
        "disable_compile",
        "transformers_version",
    }
)

# For every other field the values, besides None, that ask for nothing. A field that is not here, such as one
# that a later transformers brings, must be None. "hybrid" is in the files of older checkpoints, and
# `generate` drops it too.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "early_stopping": (False,),
    "num_beams": (1,),
    "use_mtp": (False,),
    "use_cache": (True,),
    "cache_implementation": ("dynamic", "hybrid"),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "guidance_scale": (1.0,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "is_assistant": (False,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
    "low_memory": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
}


# Read off an instance, so that a field of a later transformers is known, and refused until it has its line
# above.
KNOWN = OWN_OPTIONS | {name for name in vars(GenerationConfig()) if not name.startswith("_")}


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """How one request is sampled and when it ends; every value resolved and checked.

    Attributes:
        max_new_tokens: the request ends with "length" after so many.
        eos_token_ids: the request ends with "stop" after one of these, which is its last token.
        do_sample: False takes the most probable token; the next three fields then have no effect.
        temperature, top_k, top_p: as transformers' logits warpers, applied in this order; top_k 0 and top_p 1
            are off.
        seed: 64 bits; with the token's index in the request it decides the draw, whatever else is in the
            batch.
        logprobs: keep the log probability of each token.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: bool

    @classmethod
    def resolve(
        cls,
        config: GenerationConfig | None,
        options: Mapping[str, Any],
        model_config: GenerationConfig | None,
        *,
        prompt_length: int,
        max_positions: int | None,
        default_seed: int,
    ) -> GenerationParams:
        """Put together what a request asks for, with the precedence of `model.generate`.

        Args:
            config: the request's configuration.
            options: single fields by name, which come before `config`; also those of `OWN_OPTIONS`.
            model_config: `model.generation_config`, for what neither of the two sets.
            prompt_length: of the request, since `max_length` counts the prompt in.
            max_positions: of the model; caps the number of new tokens only where nothing asks for a number.
            default_seed: for a request that brings no seed.

        Raises:
            ValueError: an unknown or unsupported option, or a value outside of what it must be.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise ValueError(f"generation_config must be a transformers.GenerationConfig, got {config!r}")
        values = _merge(config, options, model_config)
        # Greedy decoding looks at none of the sampling fields, and `generate` takes any value for them then.
        do_sample = _boolean("do_sample", values.get("do_sample", False))
        sampling = {**SAMPLING_DEFAULTS, **values} if do_sample else SAMPLING_DEFAULTS
        return cls(
            max_new_tokens=_max_new_tokens(values, prompt_length, max_positions),
            eos_token_ids=_token_ids("eos_token_id", values.get("eos_token_id")),
            do_sample=do_sample,
            temperature=_temperature(sampling["temperature"]),
            top_k=_integer("top_k", sampling["top_k"], at_least=0),
            top_p=_top_p(sampling["top_p"]),
            seed=_integer("seed", values.get("seed", default_seed), at_least=0, below=2**64),
            logprobs=_boolean("logprobs", values.get("logprobs", False)),
        )


def _merge(
    config: GenerationConfig | None, options: Mapping[str, Any], model_config: GenerationConfig | None
) -> dict[str, Any]:
    """Every field that is set to something; unknown names and unsupported values are refused.

    A model's own configuration may carry names that are none, from its makers or from an older transformers.
    `generate` passes over them, and so does this, also where the request's configuration is a copy of the
    model's.
    """
    of_model = _set_fields(model_config)
    of_request = _set_fields(config)
    for name in of_model.keys() - KNOWN:
        value = of_model.pop(name)
        if name in of_request and of_request[name] == value:
            del of_request[name]
    of_request.update({name: value for name, value in options.items() if value is not None})
    for name in of_request.keys() | options.keys():
        if name not in KNOWN:
            raise ValueError(f"generation option must be one of {', '.join(sorted(KNOWN))}, got {name!r}")
    merged = of_model | of_request
    for name, value in merged.items():
        _refuse_unsupported(name, value, "" if name in of_request else " (from model.generation_config)")
    return merged


def _set_fields(config: GenerationConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def _refuse_unsupported(name: str, value: Any, origin: str) -> None:
    if name in IMPLEMENTED or name in OWN_OPTIONS or name in WITHOUT_EFFECT:
        return
    neutral = NEUTRAL.get(name, ())
    # Compared one by one: a value such as a dictionary or a tensor has no truth value or hash to go by.
    if not any(type(value) in (bool, int, float, str) and value == allowed for allowed in neutral):
        allowed = " or ".join(repr(item) for item in (*neutral, None))
        raise ValueError(f"generation option {name!r} must be {allowed}, got {value!r}{origin}: not supported yet")


def _max_new_tokens(values: Mapping[str, Any], prompt_length: int, max_positions: int | None) -> int:
    """As `generate` has it: `max_new_tokens`, or else `max_length` less the prompt, or else 20 more."""
    if "max_new_tokens" in values:
        return _integer("max_new_tokens", values["max_new_tokens"], at_least=1)
    if "max_length" in values:
        max_length = _integer("max_length", values["max_length"], at_least=1)
        if max_length <= prompt_length:
            raise ValueError(
                f"max_length must be more than the {prompt_length} tokens of the prompt, got {max_length}; "
                "max_new_tokens counts without the prompt"
            )
        return max_length - prompt_length
    if max_positions is None:
        return DEFAULT_NEW_TOKENS
    return max(1, min(DEFAULT_NEW_TOKENS, max_positions - prompt_length))


def _token_ids(name: str, value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    items = value.tolist() if hasattr(value, "tolist") else value
    items = items if isinstance(items, Iterable) else [items]
    try:
        return frozenset(operator.index(item) for item in items)
    except TypeError:
        raise ValueError(f"{name} must be a token id, a list of them, or None, got {value!r}") from None


def _integer(name: str, value: Any, *, at_least: int, below: int | None = None) -> int:
    limit = f" and less than {below}" if below else ""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < (below or math.inf):
        raise ValueError(f"{name} must be an integer of at least {at_least}{limit}, got {value!r}")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
        raise ValueError(f"temperature must be a number above 0, got {value!r}; do_sample=False is greedy decoding")
    return float(value)


def _top_p(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"top_p must be a number from 0 to 1, got {value!r}")
    return float(value)
