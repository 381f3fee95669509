"""Every field of `GenerationConfig`: implemented, without effect on one sequence at a time, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

# Read off an instance, so that a field of a later transformers is known, and refused until it has its line below.
FIELDS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))

# Options of a request that GenerationConfig has no field for.
OWN_OPTIONS = frozenset(
    {
        "seed",
        "logprobs",
        "prompt_logits",
        "prompt_logprobs",
        "processed_logprobs",
        "top_logprobs",
        "output_beams",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "tokenizer",
        "assistant_model",
        "json_schema",
        "regex",
        "grammar",
    }
)
KNOWN = FIELDS | OWN_OPTIONS

# What transformers makes a logits processor of.
PROCESSED = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "watermarking_config",
        "guidance_scale",
        "remove_invalid_values",
        "renormalize_logits",
    }
)
# What makes it stop.
STOPPING = frozenset({"max_length", "max_new_tokens", "max_time", "stop_strings", "eos_token_id"})
# What a request keeps of every step.
KEPT = frozenset({"output_scores", "output_logits"})
IMPLEMENTED = (
    PROCESSED
    | STOPPING
    | KEPT
    | {"do_sample", "num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "assistant_early_exit"}
)

# How several beams are searched; how drafts are made; how transformers keeps its cache; how it compiles.
OF_BEAMS = frozenset({"early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"})
OF_DRAFTS = frozenset(
    {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "max_matching_ngram_size",
    }
)
OF_CACHES = frozenset({"cache_config", "max_cache_len", "prefill_chunk_size"})
OF_COMPILING = frozenset({"compile_config", "disable_compile"})

# These do not change which tokens a decoder generates as one sequence without an assistant, but for `use_cache` of
# models that are not causal, which run whole and by what it says: any value is taken, as `generate` takes it. Padding
# and the return type are the business of the one who calls `generate`.
WITHOUT_EFFECT = (
    OF_BEAMS
    | OF_DRAFTS
    | OF_CACHES
    | OF_COMPILING
    | {
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "return_dict_in_generate",
        "transformers_version",
        "use_cache",
        "low_memory",
    }
)

# For every other field the values, besides None, that ask for nothing. A field that is not here, such as one that a
# later transformers brings, must be None. Which cache `generate` keeps does not show in its tokens, unless the cache
# is quantised.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_mtp": (False,),
    "cache_implementation": (
        "dynamic",
        "offloaded",
        "static",
        "offloaded_static",
        "sliding_window",
        "hybrid",
        "hybrid_chunked",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
    ),
    "token_healing": (False,),
    "penalty_alpha": (0,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_assistant": (False,),
}

# What to do instead, for the fields that are refused.
INSTEAD: Mapping[str, str] = {
    "use_mtp": "leave it out: the tokens of greedy decoding are the same without drafts",
    "cache_implementation": "leave it out: the engine's own KV blocks hold keys and values unquantised",
    "token_healing": "heal the prompt with model.heal_tokens before",
    "output_attentions": "sc.generate returns them with return_dict_in_generate",
    "output_hidden_states": "sc.generate returns them with return_dict_in_generate",
    "is_assistant": "leave it out: it is how transformers marks the model that drafts",
    "penalty_alpha": "call model.generate(custom_generate='transformers-community/contrastive-search')",
    "dola_layers": "call model.generate(custom_generate='transformers-community/dola')",
    "constraints": "call model.generate(custom_generate='transformers-community/constrained-beam-search')",
    "force_words_ids": "call model.generate(custom_generate='transformers-community/constrained-beam-search')",
    "speculation_type": "leave it out: the tokens of greedy decoding are the same without drafts",
    "continuous_batching_config": "give sc.EngineConfig in its place",
}


def refuse_unsupported(name: str, value: Any, origin: str) -> None:
    """Refuse a value that asks for what is not implemented.

    Raises:
        ValueError: naming the field, where its value came from, and what to do instead.
    """
    if name in IMPLEMENTED or name in OWN_OPTIONS or name in WITHOUT_EFFECT or value is None:
        return
    neutral = NEUTRAL.get(name, ())
    # Compared one by one: a value such as a dictionary or a tensor has no truth value or hash to go by.
    if not any(type(value) in (bool, int, float, str) and value == allowed for allowed in neutral):
        allowed = " or ".join(repr(item) for item in (*neutral, None))
        instead = INSTEAD.get(name, "leave it out")
        raise ValueError(
            f"generation option {name!r} must be {allowed}, got {value!r}{origin}: not supported yet; {instead}"
        )
