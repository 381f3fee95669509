"""What `Engine.submit` was given, checked and brought to the form in which the engine keeps it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig

from selective_compile.backend import Program
from selective_compile.options import EngineConfig
from selective_compile.runtime.assistants import Assistants
from selective_compile.runtime.block_names import extend_names
from selective_compile.runtime.early_layers import EarlyLayers
from selective_compile.runtime.generation import GenerationParams, Served
from selective_compile.runtime.grammar import Grammars
from selective_compile.runtime.merged_fields import merged, samples_asked
from selective_compile.runtime.prompt import check_length, check_terms, token_ids
from selective_compile.runtime.request_state import RequestId, RequestState, Terms
from selective_compile.runtime.samples import Asked, options_of_samples
from selective_compile.step import LongForm

# Samples of one request, all of which are made before the first of them runs, while nobody else is taken in. They may
# be more than run at a time: the others wait.
MOST_SAMPLES = 1024


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A prompt on its terms.

    Attributes:
        block_names: of its full blocks, if blocks are reused.
        deadline: as given.
        shown: what stands for the prompt where others than the model look at it; None: the prompt does.
        id_offset: what is added to the ids of generated tokens where the model looks at them.
        known_ids: it can go on from generated tokens less than this.
        long_form: of the model.
        cut_up_to: of requests of at most so many tokens the prompt may be computed in parts; None: of all.
        prefix: of any prompt, so many first tokens may not.
    """

    prompt: array[int]
    terms: Terms
    block_names: list[bytes]
    deadline: float | None
    cut_up_to: int | None
    prefix: int
    known_ids: int
    shown: array[int] | None = None
    id_offset: int = 0
    long_form: LongForm | None = None

    def is_whole(self, max_new_tokens: int) -> bool:
        """Whether its prompt must be computed in one step."""
        return self.cut_up_to is not None and len(self.prompt) + max_new_tokens - 1 > self.cut_up_to

    def max_positions(self, of_model: int | None) -> int | None:
        """How many tokens it may come to have: as many as the model's requests, or as those of its form."""
        own = None if self.long_form is None else self.long_form.bound(len(self.prompt))
        return min((bound for bound in (of_model, own) if bound is not None), default=None)

    def state(self, request_id: RequestId, number: int, params: GenerationParams) -> RequestState:
        return RequestState(
            request_id,
            number,
            self.prompt,
            max_new_tokens=params.max_new_tokens,
            terms=self.terms,
            block_names=list(self.block_names),
            whole=self.is_whole(params.max_new_tokens),
            prefix=self.prefix,
            shown=self.shown,
            id_offset=self.id_offset,
            known_ids=self.known_ids,
            use_cache=params.use_cache,
            long_form=self.long_form,
        )


class Intake:
    """Refuses what the model, the pools or the sampler could not serve, before it touches anybody else."""

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        config: EngineConfig,
        *,
        reuses_blocks: bool,
        pool_tokens: int,
        fits_together: Callable[[int, int], bool],
        assistants: Assistants,
    ) -> None:
        """
        Args:
            pool_tokens: the most that a request can come to hold.
            fits_together: whether requests of so many tokens, so many of them, can run side by side.
            assistants: which compile a model when a request first names it.
        """
        self.model = model
        self._program = program
        self._config = config
        self._reuses_blocks = reuses_blocks
        self._pool_tokens = pool_tokens
        self._fits_together = fits_together
        self._assistants = assistants
        self._grammars = Grammars()
        self._early_layers = EarlyLayers()

    def prompt(
        self,
        prompt_ids: Any,
        *,
        arrival: float,
        deadline: float | None,
        shown: Any = None,
        id_offset: int = 0,
        **terms: Any,
    ) -> Submission:
        """Raises ValueError; `shown`, `id_offset` are those of `Engine.submit_samples`, `terms` those of `submit`."""
        known = self._program.num_ids
        prompt = token_ids(prompt_ids, known if shown is not None else min(known, self._program.vocab_size))
        checked = check_terms(arrival=arrival, deadline=deadline, **terms)
        names: list[bytes] = []
        prefix, form = self._program.prefix, self._program.long_form
        # Made here: in a step, they would keep all other requests waiting.
        if self._reuses_blocks and len(prompt) >= prefix:
            size = self._config.block_size
            long = form is not None and form.has(len(prompt))
            extend_names(names, prompt, checked.cache_salt, len(prompt) // size, size, prefix=prefix, long=long)
        return Submission(
            prompt=prompt,
            terms=checked,
            block_names=names,
            deadline=deadline,
            cut_up_to=self._program.cut_up_to,
            prefix=prefix,
            known_ids=self._program.known_ids,
            shown=None if shown is None else token_ids(shown, self._program.vocab_size, least=0),
            id_offset=id_offset,
            long_form=form,
        )

    def samples(self, config: GenerationConfig | None, options: dict[str, Any]) -> list[Asked]:
        """What each of the sequences that a request is to have asks for. Raises ValueError."""
        count = samples_asked(options, config, getattr(self.model, "generation_config", None))
        if count > MOST_SAMPLES:
            raise ValueError(f"num_return_sequences must be at most {MOST_SAMPLES}, got {count}")
        return [Asked(config=config, options=each) for each in options_of_samples(options, count)]

    def params(
        self, submission: Submission, request_id: RequestId, config: GenerationConfig | None, options: Mapping[str, Any]
    ) -> GenerationParams:
        """Raises ValueError. Preparing stop strings for a large vocabulary takes seconds."""
        max_positions = submission.max_positions(self._program.max_positions)
        served = Served(
            config=getattr(self.model, "generation_config", None),
            max_positions=max_positions,
            vocab_size=self._program.vocab_size,
            device=self._program.device,
            model=self.model,
            grammars=self._grammars,
            early_layers=self._early_layers,
        )
        seed = seed_of(self._config.seed, request_id)
        seen = submission.prompt if submission.shown is None else submission.shown
        params = GenerationParams.resolve(config, options, served, prompt=seen, default_seed=seed)
        check_length(
            len(submission.prompt),
            params.max_new_tokens,
            max_positions=max_positions,
            pool_tokens=self._pool_tokens,
        )
        if submission.is_whole(params.max_new_tokens) and len(submission.prompt) > self._config.token_budget:
            modules = ", ".join(self._program.isolated)
            raise ValueError(
                f"a prompt must have at most EngineConfig.token_budget = {self._config.token_budget} tokens, if it and "
                f"what it generates are more than {submission.cut_up_to}: it is not known that modules which run for "
                f"one request after another ({modules}) may be given longer ones in parts; got {len(submission.prompt)}"
            )
        together = min(submission.prefix, len(submission.prompt))
        if together > self._config.token_budget:
            raise ValueError(
                f"EngineConfig.token_budget must be at least {together} for a prompt of {len(submission.prompt)}: the "
                f"first {submission.prefix} tokens see one another and are computed in one step; got "
                f"{self._config.token_budget}"
            )
        asked = merged(config, options, served.config)
        if len(submission.prompt) < submission.prefix and asked["use_cache"] is False:
            raise ValueError(
                f"use_cache must not be False for a prompt of {len(submission.prompt)} tokens: the first "
                f"{submission.prefix} see one another, and those that are generated would be seen as well"
            )
        parts = asked.get("prefill_chunk_size")
        if parts is not None and parts < together:
            raise ValueError(
                f"prefill_chunk_size must be None or at least {together} for a prompt of {len(submission.prompt)}: the "
                f"first {submission.prefix} tokens see one another, and in parts the first ones would not see the "
                f"others; got {parts}"
            )
        guidance = asked.get("guidance_scale")
        if self._config.max_attention_window is not None and guidance not in (None, 1):
            raise ValueError(
                f"guidance_scale must be None with EngineConfig.max_attention_window, got {guidance!r}: "
                "transformers' own pass over the model sees all of a prompt"
            )
        form, longest = submission.long_form, len(submission.prompt)
        last = 0 if parts is None or longest <= parts else longest % parts if parts > 1 else 1
        if last == 1 and self._program.unlimited_steps:
            raise ValueError(
                f"prefill_chunk_size must leave more than one token for the last part of a prompt of {longest}: "
                f"generate would compute it without the limits of the time step that a prompt has; got {parts}"
            )
        if parts is not None and form is not None and form.has(longest) and parts < longest:
            raise ValueError(
                f"prefill_chunk_size must be None or at least {longest} for a prompt of {longest}: requests of more "
                f"than {form.beyond} tokens are computed otherwise, and generate would compute the first parts of this "
                f"one as it does short ones; got {parts}"
            )
        if params.keeps_prompt and not self._program.gives_every_row:
            name = "prompt_logprobs" if params.prompt_logprobs else "prompt_logits"
            raise ValueError(f"{name} must be False for a model that runs whole, got True")
        if params.assistant is not None:
            self._assistants.of(params.assistant, self._program.vocab_size).check()
        if params.beams is not None:
            self._check_beams(len(submission.prompt) + params.max_new_tokens - 1, params.beams.num_beams)
        return params

    def _check_beams(self, length: int, beams: int) -> None:
        if not self._program.forks_requests:
            paths = ", ".join(getattr(self._program, "isolated", ()))
            raise ValueError(
                f"num_beams must be 1 for a model with modules that run for one request after another, which keep what "
                f"no other beam can go on from ({paths}), got {beams}: "
                "call model.generate, of a model that is not wrapped"
            )
        if self._config.record is not None:
            raise ValueError(
                f"num_beams must be 1 where EngineConfig.record is set, got {beams}: "
                "a log has a token of each request for each step, and no beams; leave record out"
            )
        if not self._fits_together(length, beams):
            counts = range(min(beams, self._config.max_requests), -1, -1)
            most = next(count for count in counts if self._fits_together(length, count))
            raise ValueError(
                f"num_beams must be at most {most} for {length} tokens each in the blocks of {self._config.block_size} "
                f"tokens that there are and max_requests {self._config.max_requests}, got {beams}"
            )


def seed_of(engine_seed: int, request_id: RequestId) -> int:
    """64 bits that depend on the engine's seed and the request's id, the same in every process."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
