"""The ledger of generation: each field of transformers' GenerationConfig, what it comes to here, and the test of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from rich import box
from rich.table import Table
from transformers import GenerationConfig

from selective_compile.generate_fields import STATES
from selective_compile.runtime.generation_fields import (
    IMPLEMENTED,
    INSTEAD,
    NEUTRAL,
    OF_BEAMS,
    OF_CACHES,
    OF_COMPILING,
    OF_DRAFTS,
    WITHOUT_EFFECT,
)

Status = Literal["equal", "implemented", "refused"]

MEANINGS: Mapping[Status, str] = {
    "equal": "the tokens and scores of `model.generate` on the request alone, by the test",
    "implemented": "does what it does there, but equality of tokens is not what there is to test",
    "refused": "any value that would have an effect is a ValueError that names the field and what to do instead",
}
PARITY = "tests/test_generation_parity.py::test_a_field_equals_generate"
REFUSAL = "tests/runtime/test_generation.py::test_every_field_is_implemented_without_effect_or_refused_by_name"
CALLS = "tests/test_generate_random.py::test_random_calls_equal_generate"
BEAMS = "tests/runtime/test_beams.py::test_random_configurations_equal_generate"
ONE_BEAM = "no effect with one beam, as there"
NO_DRAFT = "changes no token, with or without an assistant"
OWN_CACHE = "no effect: the engine keeps its own blocks"
PROMPT = "of a decoder, the tokens of the prompt"
WHEN_SAMPLING = "with do_sample, as there"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A field's line; `limits` says what else is to know, and for a refused field what to do instead."""

    field: str
    status: Status
    test: str
    limits: str


def ledger() -> list[Entry]:
    """A line for each field of the installed transformers, in the order in which it lists them."""
    return [_entry(name) for name in vars(GenerationConfig()) if not name.startswith("_")]


def _entry(name: str) -> Entry:
    if name in IMPLEMENTED or name in WITHOUT_EFFECT or name in OF_GENERATE:
        status: Status = "implemented" if name in NOT_COMPARABLE else "equal"
        return Entry(field=name, status=status, test=_test_of(name), limits=LIMITS.get(name, ""))
    neutral = " or ".join(repr(value) for value in (*NEUTRAL.get(name, ()), None))
    instead = INSTEAD.get(name, "a field that this version does not know: leave it out")
    test = f"{PARITY}[{name}]" if name in COMPARED_WHERE_NEUTRAL else REFUSAL
    return Entry(field=name, status="refused", test=test, limits=f"but {neutral}; {instead}")


def _test_of(name: str) -> str:
    return TESTS.get(name, f"{PARITY}[{name}]")


# Fields whose effect is on time, on the return type, or on nothing that tokens show.
NOT_COMPARABLE = frozenset({"max_time", "compile_config", "disable_compile", "transformers_version"})
# What `sc.generate` returns, and the engine refuses.
OF_GENERATE = frozenset(STATES)
COMPARED_WHERE_NEUTRAL = frozenset({"cache_implementation"})

TESTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("output_scores", "output_logits", *STATES, "return_dict_in_generate", "num_return_sequences"), CALLS
    ),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), CALLS),
    "compile_config": REFUSAL,
    "transformers_version": REFUSAL,
    **dict.fromkeys(OF_BEAMS, f"{PARITY}[beams that are one]"),
    **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), BEAMS),
    **dict.fromkeys(OF_DRAFTS, f"{PARITY}[drafts that are none]"),
    **dict.fromkeys(
        OF_CACHES | {"decoder_start_token_id", "disable_compile", "low_memory"}, f"{PARITY}[caches of transformers]"
    ),
}
LIMITS: Mapping[str, str] = {
    "do_sample": "the engine's own draws by seed: the tokens of generate where it rolls the same dice",
    "max_length": "counts the prompt; of a padded tensor its columns too, as there",
    "min_length": "counts the prompt; of a padded tensor its columns too, as there",
    "max_time": "seconds from submit, for each request by itself; looked at after each token",
    "stop_strings": "needs `tokenizer`; rows of a tensor need a padding id",
    **dict.fromkeys(("encoder_repetition_penalty", "encoder_no_repeat_ngram_size"), PROMPT),
    **dict.fromkeys(
        ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), WHEN_SAMPLING
    ),
    "top_p": "with do_sample; of equal scores at the limit as many stay as there, those with the larger ids",
    "exponential_decay_length_penalty": "needs an end-of-sequence id, as there",
    "watermarking_config": "both kinds",
    "guidance_scale": "transformers' own pass for each request by itself, with a cache beside the blocks; with "
    "a model that keeps its state in its modules generate itself mixes up two prompts', and use_cache=False is right",
    "output_scores": "rows that have ended: 0 for the padding id, -inf for all else",
    "output_logits": "rows that have ended: 0 for the padding id, -inf for all else",
    **dict.fromkeys(
        STATES,
        "of sc.generate, by the model's own loop over the finished sequences, which takes as long as model.generate; "
        "Engine.submit refuses it by name",
    ),
    "return_dict_in_generate": "past_key_values with hidden states, attentions, inputs_embeds or use_cache=True",
    "num_return_sequences": "of beams; with do_sample, each with a seed of its own, the prompt computed once for all",
    "decoder_start_token_id": "no effect on a decoder, as there",
    "use_cache": "the engine keeps its own blocks in any case; a model that runs whole is run as it says; True in the "
    "call returns a cache",
    **dict.fromkeys(OF_CACHES, OWN_CACHE),
    "prefill_chunk_size": f"{OWN_CACHE}; of less than a prefix whose tokens see one another, or than a prompt in the "
    "long form of longrope, refused by name",
    **dict.fromkeys(OF_BEAMS, ONE_BEAM),
    "num_beams": "also with do_sample; grammars, streamers, EngineConfig.record, isolated modules are refused by name",
    **dict.fromkeys(("length_penalty", "early_stopping"), "with num_beams, as there"),
    **dict.fromkeys(
        ("num_beam_groups", "diversity_penalty"), "no effect with one beam group; more are refused by name"
    ),
    **dict.fromkeys(OF_DRAFTS, NO_DRAFT),
    "assistant_ensemble_weight": "no effect without an assistant; refused beside one, as it changes what is sampled",
    "prompt_lookup_num_tokens": "as many at most, by how many were right; sampled tokens too are those without it; "
    "stops where generate does without it, which goes on behind a stop string",
    "assistant_early_exit": "the model's first layers draft for it; sampled tokens too are those without it",
    "num_assistant_tokens": "with assistant_model or assistant_early_exit, as many at most; changes no token",
    "max_matching_ngram_size": "with prompt_lookup_num_tokens; changes no token",
    "low_memory": "no effect, as there",
    **dict.fromkeys(OF_COMPILING, "no effect: how transformers compiles"),
    "transformers_version": "no effect: a note of who wrote the file",
}


def ledger_table(entries: list[Entry]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("field", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("limits")
    colours = {"equal": "green", "implemented": "cyan", "refused": "yellow"}
    for entry in entries:
        table.add_row(entry.field, f"[{colours[entry.status]}]{entry.status}", entry.limits)
    return table


def ledger_counts(entries: list[Entry]) -> str:
    counts = {status: sum(entry.status == status for entry in entries) for status in MEANINGS}
    return f"{len(entries)} fields: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def ledger_json(entries: list[Entry]) -> str:
    return json.dumps([asdict(entry) for entry in entries], indent=1)


def ledger_markdown(entries: list[Entry]) -> str:
    """The table of docs/generation.md."""
    lines = ["| field | status | test | limits |", "|---|---|---|---|"]
    lines += [f"| `{one.field}` | {one.status} | `{one.test}` | {one.limits} |" for one in entries]
    return "\n".join(lines) + "\n"
