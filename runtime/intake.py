"""What `Engine.submit` was given, checked and brought to the form in which the engine keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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
from selective_compile.runtime.prompt_checks import CHECKS, Wish
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.samples import Asked, options_of_samples
from selective_compile.runtime.submitted_prompt import Submission

# Samples of one request, all of which are made before the first of them runs, while nobody else is taken in. They may
# be more than run at a time: the others wait.
MOST_SAMPLES = 1024


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
        wish = Wish(
            submission=submission,
            params=params,
            asked=merged(config, options, served.config),
            program=self._program,
            config=self._config,
        )
        for check in CHECKS:
            check(wish)
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
