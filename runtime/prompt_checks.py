"""What a submission may not ask for, given what the program can compute and the engine was configured for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from selective_compile.backend import Program
from selective_compile.options import EngineConfig
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.submitted_prompt import Submission


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A prompt and what is asked for it.

    Attributes:
        asked: the fields of a GenerationConfig as they come out.
    """

    submission: Submission
    params: GenerationParams
    asked: Mapping[str, Any]
    program: Program
    config: EngineConfig

    @property
    def length(self) -> int:
        return len(self.submission.prompt)

    @property
    def together(self) -> int:
        """How many of its first tokens see one another."""
        return min(self.submission.prefix, self.length)

    @property
    def parts(self) -> int | None:
        """Of how many tokens each part of the prompt is to be."""
        return self.asked.get("prefill_chunk_size")


def whole_prompt_fits_a_step(wish: Wish) -> None:
    budget = wish.config.token_budget
    if wish.submission.is_whole(wish.params.max_new_tokens) and wish.length > budget:
        modules = ", ".join(wish.program.isolated)
        raise ValueError(
            f"a prompt must have at most EngineConfig.token_budget = {budget} tokens, if it and "
            f"what it generates are more than {wish.submission.cut_up_to}: it is not known that modules which run for "
            f"one request after another ({modules}) may be given longer ones in parts; got {wish.length}"
        )


def prefix_fits_a_step(wish: Wish) -> None:
    if wish.together > wish.config.token_budget:
        raise ValueError(
            f"EngineConfig.token_budget must be at least {wish.together} for a prompt of {wish.length}: the "
            f"first {wish.submission.prefix} tokens see one another and are computed in one step; got "
            f"{wish.config.token_budget}"
        )


def prefix_is_in_the_prompt_without_cache(wish: Wish) -> None:
    if wish.length < wish.submission.prefix and wish.asked["use_cache"] is False:
        raise ValueError(
            f"use_cache must not be False for a prompt of {wish.length} tokens: the first "
            f"{wish.submission.prefix} see one another, and those that are generated would be seen as well"
        )


def parts_hold_the_prefix(wish: Wish) -> None:
    if wish.parts is not None and wish.parts < wish.together:
        raise ValueError(
            f"prefill_chunk_size must be None or at least {wish.together} for a prompt of {wish.length}: the "
            f"first {wish.submission.prefix} tokens see one another, and in parts the first ones would not see the "
            f"others; got {wish.parts}"
        )


def guidance_sees_all(wish: Wish) -> None:
    guidance = wish.asked.get("guidance_scale")
    if wish.config.max_attention_window is not None and guidance not in (None, 1):
        raise ValueError(
            f"guidance_scale must be None with EngineConfig.max_attention_window, got {guidance!r}: "
            "transformers' own pass over the model sees all of a prompt"
        )


def last_part_is_limited(wish: Wish) -> None:
    parts = wish.parts
    last = 0 if parts is None or wish.length <= parts else wish.length % parts if parts > 1 else 1
    if last == 1 and wish.program.unlimited_steps:
        raise ValueError(
            f"prefill_chunk_size must leave more than one token for the last part of a prompt of {wish.length}: "
            f"generate would compute it without the limits of the time step that a prompt has; got {parts}"
        )


def long_prompt_is_one_part(wish: Wish) -> None:
    form, parts = wish.submission.long_form, wish.parts
    if parts is not None and form is not None and form.has(wish.length) and parts < wish.length:
        raise ValueError(
            f"prefill_chunk_size must be None or at least {wish.length} for a prompt of {wish.length}: requests of "
            f"more than {form.beyond} tokens are computed otherwise, and generate would compute the first parts of "
            f"this one as it does short ones; got {parts}"
        )


def rows_are_given(wish: Wish) -> None:
    if wish.params.keeps_prompt and not wish.program.gives_every_row:
        name = "prompt_logprobs" if wish.params.prompt_logprobs else "prompt_logits"
        raise ValueError(f"{name} must be False for a model that runs whole, got True")


CHECKS: tuple[Callable[[Wish], None], ...] = (
    whole_prompt_fits_a_step,
    prefix_fits_a_step,
    prefix_is_in_the_prompt_without_cache,
    parts_hold_the_prefix,
    guidance_sees_all,
    last_part_is_limited,
    long_prompt_is_one_part,
    rows_are_given,
)
