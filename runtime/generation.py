"""What a request asks of generation, read from a `GenerationConfig`; what is not supported is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig

from selective_compile.kernels.draw_cpu import packed_warping
from selective_compile.runtime.beams import BeamParams
from selective_compile.runtime.criteria import RowCriteria, beam_criteria, row_criteria
from selective_compile.runtime.early_layers import EarlyLayers
from selective_compile.runtime.generation_values import boolean, count, integer
from selective_compile.runtime.grammar import GrammarProcessor, Grammars
from selective_compile.runtime.merged_fields import check_beams, checked, merged
from selective_compile.runtime.processors import Ban, RowProcessors, row_processors

DEFAULT_NEW_TOKENS = 20
CPU = torch.device("cpu")

LOGPROBS = ("logprobs", "processed_logprobs")
OF_PROMPT = ("prompt_logprobs", "prompt_logits")


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model as far as a request's options depend on it.

    Attributes:
        config: `model.generation_config`, for what a request leaves open.
        max_positions: caps the number of new tokens only where nothing asks for a number.
        vocab_size: V.
        device: of the logits.
        model: called by itself for guidance, which no request needs else.
        grammars: what structured output needs of tokenizers, kept from one request to the next.
        early_layers: the model's first layers, which draft; likewise.
    """

    config: GenerationConfig | None = None
    max_positions: int | None = None
    vocab_size: int = 0
    device: torch.device = CPU
    model: Any = None
    grammars: Grammars = field(default_factory=Grammars)
    early_layers: EarlyLayers = field(default_factory=EarlyLayers)


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """How one request is sampled and when it ends; every value resolved and checked.

    Attributes:
        max_new_tokens: the request ends with "length" after so many.
        eos_token_ids: the request ends with "stop" after one of these, which is its last token.
        do_sample: False takes the most probable token.
        seed: 64 bits; with the token's index in the request it decides the draw, whatever else is in the batch.
        processors: applied first, to the request's row alone; None: there are none.
        repetition_penalty, bans, temperature, top_k, top_p, min_p: as transformers' processors, applied in this
            order to all rows at once; 1.0, none, 1.0, 0, 1.0 and 0.0 are off.
        grammar: leaves the tokens that the text can go on with, after penalties and bans; None: any text will do.
        criteria: asked after each token whether to end; None: there are none.
        logprobs: keep the log probability of each token under the model's own distribution.
        processed_logprobs: keep it under the distribution that it was drawn from.
        top_logprobs: of as many of the likeliest tokens too, under each of the two that is kept.
        prompt_logprobs: keep the log probability of each token of the prompt but the first.
        prompt_logits: keep the rows [V] of the prompt's tokens.
        output_scores, output_logits: keep the rows [V] themselves.
        lookup_tokens: most tokens of a draft that is looked up in the tokens so far; 0: there are no such drafts.
        lookup_ngram: most tokens that are looked up.
        assistant: a model that drafts, at most `assistant_tokens` at a time; None: there is none.
        beams: how several are searched, in place of all above that chooses tokens; None: there is one.
        use_cache: whether a model that runs whole has a cache: there are some of which the tokens are others without.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    logprobs: bool
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bans: tuple[Ban, ...] = ()
    processors: RowProcessors | None = None
    grammar: GrammarProcessor | None = None
    criteria: RowCriteria | None = None
    processed_logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_logits: bool = False
    output_scores: bool = False
    output_logits: bool = False
    beams: BeamParams | None = None
    lookup_tokens: int = 0
    lookup_ngram: int = 2
    assistant: Any = None
    assistant_tokens: int = 20
    use_cache: bool = True

    @property
    def keeps_prompt(self) -> bool:
        """Whether anything of the prompt's own logits is kept."""
        return self.prompt_logprobs or self.prompt_logits

    @cached_property
    def recorded(self) -> bool:
        """Whether anything but the tokens is kept."""
        return self.logprobs or self.processed_logprobs or self.output_scores or self.output_logits

    @cached_property
    def keeps_scores(self) -> bool:
        """Whether the processed row is wanted as it is."""
        return self.output_scores or self.processed_logprobs

    @cached_property
    def warping(self) -> bytes:
        """Temperature, top-k, top-p and min-p as the kernel for draws reads them."""
        return packed_warping(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @cached_property
    def changes_scores(self) -> bool:
        """Whether choosing the token writes to the request's row."""
        whole = self.do_sample and (not self.top_k or self.keeps_scores)
        return bool(whole or self.bans or self.repetition_penalty != 1.0 or self.processors or self.grammar)

    @cached_property
    def plain(self) -> bool:
        """Whether each token is that of the largest logit and nothing else is asked for."""
        return self.unchanged and not (self.processors or self.grammar or self.criteria or self.recorded)

    @cached_property
    def unchanged(self) -> bool:
        """Whether none of what is applied to all rows at once applies to it."""
        return not (self.do_sample or self.bans or self.repetition_penalty != 1.0)

    @cached_property
    def chosen_on_device(self) -> bool:
        """Whether each token follows from its row of logits and the tokens before it, and of it nothing else is kept.

        Criteria that are asked after it can be asked a step late. Whether there is a draft may depend on who else is
        there, and who chooses must not.
        """
        drafts = self.lookup_tokens or self.assistant is not None
        return not (self.processors or self.grammar or self.beams or self.recorded or drafts)

    @cached_property
    def device_choice(self) -> tuple[float, float, float, float]:
        """Temperature, 0 for the largest logit, 1 - top_p, min_p and top_k, as `device_draw.choose` reads them."""
        if not self.do_sample:
            return 0.0, 0.0, 0.0, 0.0
        return self.temperature, 1.0 - self.top_p, self.min_p, float(self.top_k)

    @classmethod
    def resolve(
        cls,
        config: GenerationConfig | None,
        options: Mapping[str, Any],
        served: Served,
        *,
        prompt: Sequence[int],
        default_seed: int,
    ) -> GenerationParams:
        """Put together what a request asks for, with the precedence of `model.generate`.

        Args:
            config: the request's configuration.
            options: single fields by name, which come before `config`, where None turns off what it or the model
                sets; also those of `OWN_OPTIONS`.
            prompt: of the request; `max_length` counts it in, and some processors look at it.
            default_seed: for a request that brings no seed.

        Raises:
            ValueError: an unknown or unsupported option, or a value outside of what it must be.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise ValueError(f"generation_config must be a transformers.GenerationConfig, got {config!r}")
        values = checked(merged(config, options, served.config))
        values["max_new_tokens"] = _max_new_tokens(values, len(prompt), served.max_positions)
        criteria, stop = row_criteria(values, len(prompt), served.device)
        if values["num_beams"] > 1:
            check_beams(values)
        grammar = served.grammars.processor(values, prompt_length=len(prompt), vocab_size=served.vocab_size)
        processors, tail = row_processors(
            values, prompt, grammar, vocab_size=served.vocab_size, device=served.device, model=served.model
        )
        found: dict[str, Any]
        if values["num_beams"] > 1:
            found = {"beams": _beams(values, processors, beam_criteria(values, len(prompt)))}
        else:
            found = {
                "processors": processors,
                "criteria": criteria,
                "output_scores": bool(values.get("output_scores")),
                "output_logits": bool(values.get("output_logits")),
            }
        return cls(
            max_new_tokens=stop.max_new_tokens,
            eos_token_ids=stop.eos_token_ids,
            do_sample=values["do_sample"],
            seed=_seed(values, default_seed),
            use_cache=values.get("use_cache") is not False,
            **found,
            **tail,
            **_drafts(values, served),
            **_logprobs(values),
        )


def _beams(values: Mapping[str, Any], processors: RowProcessors | None, criteria: Any) -> BeamParams:
    penalty, stopping = values.get("length_penalty"), values.get("early_stopping")
    return BeamParams(
        num_beams=values["num_beams"],
        num_return_sequences=values.get("num_return_sequences") or 1,
        length_penalty=1.0 if penalty is None else penalty,
        early_stopping=False if stopping is None else stopping,
        do_sample=values["do_sample"],
        max_new_tokens=values["max_new_tokens"],
        num_eos=len(values.get("eos_token_id") or ()),
        processors=processors,
        criteria=criteria,
        keeps_scores=bool(values.get("output_scores")),
        keeps_logits=bool(values.get("output_logits")),
        keeps_logprobs=boolean("logprobs", values.get("logprobs") or False),
        keeps_beams=boolean("output_beams", values.get("output_beams") or False),
    )


def _max_new_tokens(values: Mapping[str, Any], prompt_length: int, max_positions: int | None) -> int:
    """As `generate` has it: `max_new_tokens`, or else `max_length` less the prompt, or else 20 more."""
    if values.get("max_new_tokens") is not None:
        return integer("max_new_tokens", values["max_new_tokens"], at_least=1)
    if values.get("max_length") is not None:
        max_length = integer("max_length", values["max_length"], at_least=1)
        if max_length <= prompt_length:
            raise ValueError(
                f"max_length must be more than the {prompt_length} tokens of the prompt, got {max_length}; "
                "max_new_tokens counts without the prompt"
            )
        return max_length - prompt_length
    if max_positions is None:
        return DEFAULT_NEW_TOKENS
    return max(1, min(DEFAULT_NEW_TOKENS, max_positions - prompt_length))


def _seed(values: Mapping[str, Any], default: int) -> int:
    seed = values.get("seed")
    return default if seed is None else integer("seed", seed, below=2**64)


def _drafts(values: Mapping[str, Any], served: Served) -> dict[str, Any]:
    """Other fields about drafts change no token, and without drafts `generate` takes any value for them."""
    most, assistant = values.get("prompt_lookup_num_tokens"), values.get("assistant_model")
    early = values.get("assistant_early_exit")
    if early is not None:
        for name, value in (("prompt_lookup_num_tokens", most), ("assistant_model", assistant)):
            if value is not None:
                raise ValueError(f"{name} must be None with assistant_early_exit, got {value!r}: leave one of them out")
        assistant = served.early_layers.of(served.model, early)
    if assistant is not None:
        if most is not None:
            raise ValueError(f"prompt_lookup_num_tokens must be None with an assistant_model, got {most}")
        if values.get("assistant_ensemble_weight") is not None:
            raise ValueError("assistant_ensemble_weight must be None, for it changes what is sampled; leave it out")
        asked = values.get("num_assistant_tokens")
        return {
            "assistant": assistant,
            "assistant_tokens": count("num_assistant_tokens", 20 if asked is None else asked),
        }
    if most is None:
        return {}
    ngram = values.get("max_matching_ngram_size")
    return {"lookup_tokens": most, "lookup_ngram": 2 if ngram is None else count("max_matching_ngram_size", ngram)}


def _logprobs(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: boolean(name, values.get(name) or False) for name in LOGPROBS}
    top = integer("top_logprobs", values.get("top_logprobs") or 0)
    if top and not any(found.values()):
        raise ValueError(f"top_logprobs must be 0 without logprobs or processed_logprobs, got {top}")
    of_prompt = {name: boolean(name, values.get(name) or False) for name in OF_PROMPT}
    return {**found, "top_logprobs": top, **of_prompt}
