"""What the value of each generation option must be; the checked value, in one form, or a ValueError."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers.generation.configuration_utils import WatermarkingConfig

from selective_compile.options import integer_of


def integer(name: str, value: Any, *, at_least: int = 0, below: int | None = None) -> int:
    limit = f" and less than {below}" if below else ""
    found = integer_of(value)
    if found is None or not at_least <= found < (below or math.inf):
        raise ValueError(f"{name} must be an integer of at least {at_least}{limit}, got {value!r}")
    return found


def count(name: str, value: Any) -> int:
    return integer(name, value, at_least=1)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def temperature(name: str, value: Any) -> float:
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}; do_sample=False is greedy decoding")
    return float(value)


def number(name: str, value: Any) -> float:
    if not _is_number(value) or math.isinf(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def positive(name: str, value: Any) -> float:
    if not _is_number(value) or not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def duration(name: str, value: Any) -> float:
    """Of no length: the first token is the last."""
    if not _is_number(value) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds of at least 0, got {value!r}")
    return float(value)


def share(name: str, value: Any) -> float:
    if not _is_number(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def positive_share(name: str, value: Any) -> float:
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be a number above 0 and at most 1, got {value!r}")
    return float(value)


def early_stopping(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise ValueError(f"{name} must be True, False or 'never', got {value!r}")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """In the order given; one id, a list, an array or a tensor of them."""
    items = value.tolist() if hasattr(value, "tolist") else value
    items = items if isinstance(items, Iterable) else [items]
    try:
        found = tuple(operator.index(item) for item in items)
    except TypeError:
        raise ValueError(f"{name} must be a token id, a list of them, or None, got {value!r}") from None
    if any(not -(2**63) <= token < 2**63 for token in found):
        raise ValueError(f"{name} must be token ids of at most 64 bits, got {value!r}")
    return found


def token_ids_to_force(name: str, value: Any) -> list[int]:
    found = list(token_ids(name, value))
    if not found or any(token < 0 for token in found):
        raise ValueError(f"{name} must be a token id, or a list of them, of at least 0, got {value!r}")
    return found


def token_id(name: str, value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise ValueError(f"{name} must be a token id of at least 0, got {value!r}")
    return found


def decay(name: str, value: Any) -> tuple[int, float]:
    pair = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or not all(_is_number(item) for item in pair):
        raise ValueError(f"{name} must be a pair of a number of tokens and a factor, got {value!r}")
    return pair[0], pair[1]


def words(name: str, value: Any) -> Any:
    """As transformers takes it; its processor looks closer."""
    if not isinstance(value, (list, tuple, dict)) or not value:
        raise ValueError(f"{name} must be a list or a dictionary with at least one entry, got {value!r}")
    return value


def strings(name: str, value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"{name} must be a string or a list of strings, none of them empty, got {value!r}")
    return list(found)


def watermark(name: str, value: Any) -> Any:
    try:
        found = WatermarkingConfig.from_dict(value) if isinstance(value, dict) else value
    except TypeError as error:
        raise ValueError(f"{name} must be of fields of a WatermarkingConfig, got {value!r}: {error}") from error
    if not callable(getattr(found, "construct_processor", None)):
        raise ValueError(f"{name} must be a watermarking configuration of transformers, got {value!r}")
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value in (math.inf, -math.inf) or abs(value) <= sys.float_info.max  # NaN is neither


# Greedy decoding looks at none of these, and `generate` takes any value for them then.
WHEN_SAMPLING: Mapping[str, Callable[[str, Any], Any]] = {
    "temperature": temperature,
    "top_k": integer,
    "top_p": share,
    "min_p": share,
    "top_h": positive_share,
    "typical_p": positive,
    "epsilon_cutoff": share,
    "eta_cutoff": share,
}
WITH_BEAMS: Mapping[str, Callable[[str, Any], Any]] = {"length_penalty": number, "early_stopping": early_stopping}
ALWAYS: Mapping[str, Callable[[str, Any], Any]] = {
    "num_beams": count,
    "num_return_sequences": count,
    "prompt_lookup_num_tokens": count,
    "assistant_early_exit": count,
    "guidance_scale": number,
    "repetition_penalty": positive,
    "encoder_repetition_penalty": positive,
    "no_repeat_ngram_size": integer,
    "encoder_no_repeat_ngram_size": integer,
    "min_length": integer,
    "min_new_tokens": integer,
    "bad_words_ids": words,
    "sequence_bias": words,
    "forced_bos_token_id": token_id,
    "forced_eos_token_id": token_ids_to_force,
    "suppress_tokens": token_ids,
    "begin_suppress_tokens": token_ids,
    "exponential_decay_length_penalty": decay,
    "watermarking_config": watermark,
    "remove_invalid_values": boolean,
    "renormalize_logits": boolean,
    "eos_token_id": token_ids,
    "max_time": duration,
    "stop_strings": strings,
    "output_scores": boolean,
    "output_logits": boolean,
}
